"""Pages of keys and values: their dtype, and which layer is whose."""

import jax.numpy as jnp

from jaxspec.cache import KVLayers, PagedKV, PoolSizes, kv_dtype_of

SIZES = PoolSizes(num_pages=6, page_size=2, num_slots=5, width=4)


def test_the_draft_heads_layers_lie_behind_the_trunks_in_one_pool():
    layers = KVLayers(trunk=2, draft=1)
    pool = PagedKV(layers, 3, 8, jnp.dtype("float32")).allocate(SIZES)
    assert pool.shape == (3, 2, 6, 2, 3, 8)
    assert layers.of_draft() == 2 == layers.total - 1


def test_keys_and_values_may_have_a_dtype_of_their_own():
    dtype = jnp.dtype("bfloat16")
    pools = [
        PagedKV(KVLayers(2), 1, 4, kv_dtype_of(word, dtype)).allocate(SIZES)
        for word in (None, "bfloat16", "float8_e4m3fn")
    ]
    assert pools[0].dtype == pools[1].dtype == dtype
    assert pools[0].nbytes == 2 * pools[2].nbytes
