"""Pages of keys and values: their dtype, and which layers share them."""

import dataclasses

import jax.numpy as jnp
import pytest

from jaxspec.cache import PagedKV, PoolSizes, kv_dtype_of, merged

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
