"""Packing loses nothing, and spares a call many arrays."""

import sys
from pathlib import Path

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import FIXTURES

from jaxspec.models import load_model
from jaxspec.models.config import parse_config
from jaxspec.models.qwen3_5 import Qwen3_5
from jaxspec.runner.weights import WeightLayout

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from model_shapes import SHAPES


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("fixture", ["qwen3_5", "qwen3_5_tied", "qwen3_5_vl", "qwen3"])
def test_unpacking_gives_every_leaf_again(fixture, dtype):
    """In bfloat16 a Gated DeltaNet's decay and output norm stay float32: two kinds of vectors."""
    weights = nnx.state(load_model(FIXTURES / fixture, jnp.dtype(dtype)))
    layout = WeightLayout.of(weights)
    arrays = layout.pack(weights)
    chex.assert_trees_all_equal(jax.jit(layout.unpack)(arrays), weights, strict=True)
    leaves = jax.tree.leaves(weights)
    kinds = {leaf.dtype for leaf in leaves if leaf.ndim == 1}
    assert len(kinds) == 1 + (fixture != "qwen3" and dtype == "bfloat16")
    assert len(arrays) == len(kinds) + sum(leaf.ndim > 1 for leaf in leaves)
    assert sum(x.nbytes for x in arrays) == sum(x.nbytes for x in leaves)


def test_vectors_of_several_dtypes_may_come_in_any_order():
    weights = {
        "a": np.arange(3, dtype=np.float32),
        "b": np.arange(4, dtype=np.int32),
        "c": np.ones((2, 2), np.float32),
        "d": np.arange(5, dtype=np.float32),
        "e": np.float32(1),
        "f": np.zeros(0, np.int32),
    }
    layout = WeightLayout.of(weights)
    arrays = layout.pack(weights)
    assert [x.shape for x in arrays] == [(8,), (4,), (2, 2), ()]
    chex.assert_trees_all_equal(layout.unpack(arrays), weights)


def test_a_long_vector_is_an_array_of_its_own():
    weights = {str(size): np.zeros(size, np.float16) for size in (3, 512, 511)}
    layout = WeightLayout.of(weights)
    assert [x.shape for x in layout.pack(weights)] == [(514,), (512,)]


def test_layouts_of_equal_models_are_equal_so_that_they_share_programs():
    sizes = {"a": np.zeros(3, np.float32), "b": np.zeros((2, 2), np.float32)}
    layout, same = (WeightLayout.of(sizes) for _ in range(2))
    assert layout == same and hash(layout) == hash(same)
    assert layout != WeightLayout.of(sizes | {"a": np.zeros(4, np.float32)})


@pytest.mark.parametrize(("shape", "before", "after"), [("tiny", 47, 32), ("qwen3.5-9b", 286, 263)])
def test_a_call_is_given_fewer_arrays(shape, before, after):
    config = parse_config(SHAPES[shape].config())
    weights = nnx.state(nnx.eval_shape(lambda: Qwen3_5.for_config(config, jnp.dtype("bfloat16"))))
    arrays = jax.eval_shape(WeightLayout.of(weights).pack, weights)
    assert (len(jax.tree.leaves(weights)), len(arrays)) == (before, after)
