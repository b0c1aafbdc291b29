"""A folder in FP8 by blocks of 128 x 128, with a published vocabulary and heads, as published."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from pairwise import soak
from quantised_folders import Format, float8, write_pair
from real_models import write_small

from benchmarks.measure.weights import write_weights
from jaxspec.models import load_model

CONFIG = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
PUBLISHED = Format(lambda weight: float8(weight, (128, 128), name="weight_scale_inv"), CONFIG)


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", soak("qwen3.5-35b-a3b")])
def test_a_published_size_in_fp8_blocks_holds_its_weights(name, tmp_path):
    folder = write_small(name, tmp_path / "small")
    write_weights(folder)
    pair = write_pair(folder, tmp_path / "pair", PUBLISHED)
    found, expected = (load_model(each, jnp.dtype("bfloat16")) for each in pair)
    for leaf, other in zip(
        jax.tree.leaves(nnx.state(found)), jax.tree.leaves(nnx.state(expected)), strict=True
    ):
        np.testing.assert_array_equal(leaf, other)
