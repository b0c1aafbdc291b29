"""A folder in FP8 by blocks of 128 x 128, with a published vocabulary, heads and experts."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import soak
from quantised_folders import repeated
from real_models import write_small

from benchmarks.measure.weights import BLOCK, write_float8_weights
from jaxspec.models import load_model
from jaxspec.models.source import open_checkpoint, read_fields


@pytest.mark.parametrize("name", ["qwen3.5-0.8b", soak("qwen3.5-35b-a3b")])
def test_a_published_size_in_fp8_blocks_holds_its_weights(name, tmp_path):
    folder = write_small(name, tmp_path / "small")
    write_float8_weights(folder)
    with open_checkpoint(folder, read_fields(folder).scheme()) as checkpoint:
        assert len(checkpoint.matrices) > 10
        for weight, matrix in checkpoint.matrices.items():
            into = np.empty(math.prod(matrix.shape), np.float32)
            checkpoint.read(weight, 0, into)
            numbers, scale = (tensor.read().astype(np.float32) for tensor in matrix.tensors)
            expected = numbers * repeated(scale, matrix.shape, (BLOCK, BLOCK))
            np.testing.assert_array_equal(into.reshape(matrix.shape), expected)
    assert load_model(folder, jnp.dtype("bfloat16")).has_draft_head
