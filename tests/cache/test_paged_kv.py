"""Pages of keys and values, or of vectors: their dtype, copies, and which layers share them."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import (
    MEMORY_LABELS,
    Moves,
    PagedKV,
    PagedVectors,
    PoolSizes,
    allocate,
    kv_dtype_of,
    merged,
)
from jaxspec.cache.portable import pages_of, token_arrays

SIZES = PoolSizes(num_pages=6, page_size=2, num_slots=5, width=4)


def spec(layers, dtype="float32"):
    return PagedKV("kv", layers, 3, 8, jnp.dtype(dtype))


def test_layers_that_keep_the_same_share_one_pool():
    (shared,) = merged([spec(1), spec(1), spec(1)])
    assert shared.allocate(SIZES).shape == (3, 2, 6, 2, 3, 8)


def test_layers_that_keep_another_dtype_need_a_pool_of_their_own():
    with pytest.raises(ValueError, match="the pool 'kv' must keep the same"):
        merged([spec(1), spec(1, "bfloat16")])
    apart = dataclasses.replace(spec(1, "bfloat16"), name="draft_kv")
    assert [each.layers for each in merged([spec(1), apart, spec(1)])] == [2, 1]


def test_keys_and_values_may_have_a_dtype_of_their_own():
    dtype = jnp.dtype("bfloat16")
    pools = [
        PagedKV("kv", 2, 1, 4, kv_dtype_of(word, dtype)).allocate(SIZES)
        for word in (None, "bfloat16", "float8_e4m3fn")
    ]
    assert pools[0].dtype == pools[1].dtype == dtype
    assert pools[0].nbytes == 2 * pools[2].nbytes


VECTOR_SIZES = PoolSizes(num_pages=5, page_size=4, num_slots=2, width=1)
LATENTS = PagedVectors("latent", 3, 6, jnp.dtype("float32"))


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def test_a_page_of_vectors_is_copied_in_all_layers():
    pool = jnp.asarray(np.random.default_rng(0).normal(size=(3, 5, 4, 6)), jnp.float32)
    assert LATENTS.allocate(VECTOR_SIZES).shape == pool.shape
    moved = LATENTS.copy(pool, Moves(int32(), int32(), int32(2, 1), int32(4, 0)))
    np.testing.assert_array_equal(moved, pool.at[:, 4].set(pool[:, 2]))


def test_vectors_leave_and_enter_pages_of_another_size():
    pool = np.random.default_rng(1).normal(size=(3, 5, 4, 6)).astype(np.float32)
    pages = {"latent": np.moveaxis(pool[:, [3, 1]], 1, 0)}
    arrays = token_arrays([LATENTS], pages, 7)
    np.testing.assert_array_equal(arrays["latent"][5], pool[:, 1, 1])
    wide = PoolSizes(num_pages=5, page_size=8, num_slots=2, width=1)
    entered = pages_of([LATENTS], arrays, 7, wide)
    np.testing.assert_array_equal(token_arrays([LATENTS], entered, 7)["latent"], arrays["latent"])


def test_pools_of_latents_and_of_index_keys_are_apart_and_have_labels():
    index = PagedVectors("index", 1, 2, jnp.dtype("float32"))
    specs = merged([LATENTS, index, LATENTS, index])
    assert [(each.name, each.layers) for each in specs] == [("latent", 6), ("index", 2)]
    assert allocate(specs, VECTOR_SIZES).keys() <= MEMORY_LABELS.keys()
