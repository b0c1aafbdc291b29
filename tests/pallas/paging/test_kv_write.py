"""kv_write: each token lands in its slot, padding nowhere, and 8 bits saturate."""

import jax.numpy as jnp
import numpy as np
import pytest
from attention import GARBAGE, int32, kv_slots_of, normal

from jaxspec.pallas.paging.kv_write import kv_write, vector_write

LAYERS, PAGES, PAGE_SIZE, KV_HEADS, DIM = 2, 12, 4, 2, 8


def test_padding_is_inert():
    rng = np.random.default_rng(0)
    kv = jnp.asarray(normal(rng, LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    slots = int32([-1, 0, PAGE_SIZE - 1, PAGES * PAGE_SIZE, *GARBAGE])
    noise = jnp.full((len(slots), KV_HEADS, DIM), jnp.nan)
    np.testing.assert_array_equal(kv_write(kv, 1, noise, noise, slots), kv)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_8_bit_pools_saturate(dtype):
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.float8_e4m3fn)
    edges = jnp.asarray([449, -1e9, np.inf, -np.inf, np.nan, 448, 2**-9, 1.0])
    new = jnp.broadcast_to(edges, (1, KV_HEADS, DIM)).astype(dtype)
    kv = kv_write(kv, 1, new, -new, int32([PAGE_SIZE]))
    kept = np.asarray(kv.astype(jnp.float32))[1, :, 1, 0, 0]
    expected = [448, -448, 448, -448, np.nan, 448, 2**-9, 1.0]
    np.testing.assert_array_equal(kept, [expected, np.negative(expected)])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_scaled_keys_and_values_are_divided_before_they_saturate(dtype):
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM), jnp.float8_e4m3fn)
    numbers = jnp.asarray([112.5, -1e9, np.inf, -np.inf, np.nan, 112, 2**-11, 0.25])
    new = jnp.broadcast_to(numbers, (1, KV_HEADS, DIM)).astype(dtype)
    scales = jnp.asarray([0.25, 0.5])
    kv = kv_write(kv, 1, new, new, int32([PAGE_SIZE]), scales)
    keys, values = np.asarray(kv.astype(jnp.float32))[1, :, 1, 0, 0]
    np.testing.assert_array_equal(keys, [448, -448, 448, -448, np.nan, 448, 2**-9, 1.0])
    # 2^-10 is half of the least number, and 225 lies between 224 and 240.
    np.testing.assert_array_equal(values, [224, -448, 448, -448, np.nan, 224, 0, 0.5])


def test_a_layer_is_written_alone():
    rng = np.random.default_rng(0)
    kv = jnp.zeros((LAYERS, 2, PAGES, PAGE_SIZE, KV_HEADS, DIM))
    keys, values = normal(rng, 6, KV_HEADS, DIM), normal(rng, 6, KV_HEADS, DIM)
    slots = kv_slots_of(np.array([3, 5]), PAGE_SIZE, 6)
    kv = kv_write(kv, 1, jnp.asarray(keys), jnp.asarray(values), slots)
    assert not np.any(kv[0])
    flat = np.asarray(kv[1]).reshape(2, PAGES * PAGE_SIZE, KV_HEADS, DIM)
    np.testing.assert_array_equal(flat[0, [12, 13, 14, 15, 20, 21]], keys)
    np.testing.assert_array_equal(flat[1, [12, 13, 14, 15, 20, 21]], values)
    assert np.count_nonzero(flat) == keys.size + values.size


@pytest.mark.few(1)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float8_e4m3fn])
def test_vectors_are_written_as_keys_and_values_are(dtype):
    rng = np.random.default_rng(7)
    pool = jnp.asarray(rng.normal(size=(2, 5, 4, 6)), dtype)
    vectors = jnp.asarray(rng.normal(size=(5, 6)), jnp.float32).at[0, 0].set(1e6)
    slots = jnp.asarray([9, -1, 3, 10**6, 4], jnp.int32)  # two of them are written
    kv = kv_write(
        jnp.stack([pool, pool], 1)[:, :, :, :, None], 1, vectors[:, None], vectors[:, None], slots
    )
    written = vector_write(pool, 1, vectors, slots)
    assert written.dtype == pool.dtype
    wide = [np.asarray(x, np.float32) for x in (written, kv[:, 0, :, :, 0], pool)]
    np.testing.assert_array_equal(wide[0], wide[1])
    assert (wide[0] != wide[2]).any(-1).sum() == 2
