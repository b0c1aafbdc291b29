"""Write keys and values, or one vector per token, into their pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import device

KVPool = Float[Array, "layers 2 pages page_size kv_heads head_dim"]  # axis 1: keys, values
VectorPool = Float[Array, "layers pages page_size width"]
KVScales = Float[Array, "2"]  # float32; of keys, of values

_MAX_FLOAT8 = 448  # the largest float8_e4m3fn


def kv_write(
    kv: KVPool,
    layer: int,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    kv_slots: Int[Array, " tokens"],
    scales: KVScales | None = None,
) -> KVPool:
    """Write the keys and values of this step's tokens into one layer, and return the pool.

    They are cast to the pool's dtype. A float8_e4m3fn pool saturates: numbers out of range become
    448 or -448; NaN stays NaN. With `scales`, numbers are first divided by theirs in float32, and
    the ops that read them multiply. `kv_slots` (int32) is computed by `slot_mapping`. A token is
    dropped if its KV slot is -1, in the null page, or past the end of the pool. No two tokens of a
    step may have the same KV slot.
    """
    if not _scatters_bytes(kv):
        return kv_write_reference(kv, layer, keys, values, kv_slots, scales)
    new = as_stored(keys, values, scales, kv.dtype)
    pool, *new = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (kv, *new))
    pool = kv_write_reference(pool, layer, *new, kv_slots)
    return jax.lax.bitcast_convert_type(pool, kv.dtype)


def kv_write_reference(kv, layer, keys, values, kv_slots, scales=None):
    page, offset = _places(kv_slots, *kv.shape[2:4])
    keys, values = as_stored(keys, values, scales, kv.dtype)
    # No reshape of the pool: XLA's CPU backend would then copy all of it.
    kv = kv.at[layer, 0, page, offset].set(keys, mode="drop")
    return kv.at[layer, 1, page, offset].set(values, mode="drop")


def vector_write(
    pool: VectorPool,
    layer: int,
    vectors: Float[Array, "tokens width"],
    kv_slots: Int[Array, " tokens"],
) -> VectorPool:
    """Write a vector for each of this step's tokens into one layer, as `kv_write` does."""
    vectors = _saturate(vectors, pool.dtype)
    if not _scatters_bytes(pool):
        return _vector_write(pool, layer, vectors, kv_slots)
    pool, vectors = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (pool, vectors))
    pool = _vector_write(pool, layer, vectors, kv_slots)
    return jax.lax.bitcast_convert_type(pool, jnp.float8_e4m3fn)


def _vector_write(pool, layer, vectors, kv_slots):
    page, offset = _places(kv_slots, *pool.shape[1:3])
    return pool.at[layer, page, offset].set(vectors, mode="drop")


def _places(kv_slots, num_pages, page_size):
    """Return pages and offsets; a dropped token gets a page out of range, which does not wrap."""
    is_kept = kv_slots >= page_size
    page = jnp.where(is_kept, kv_slots // page_size, num_pages)
    return page, jnp.where(is_kept, kv_slots % page_size, 0)


def _scatters_bytes(pool):
    """XLA's CPU backend would scatter float8 into a wider copy of the pool."""
    return pool.dtype == jnp.float8_e4m3fn and device.default_device().platform == "cpu"


def as_stored(keys, values, scales, dtype):
    """Return keys and values in a pool's dtype, divided by their scales if there are any."""
    if scales is not None:
        keys, values = (x.astype(jnp.float32) / scales[i] for i, x in enumerate((keys, values)))
    return _saturate(keys, dtype), _saturate(values, dtype)


def _saturate(x, dtype):
    """Cast `x` to `dtype`; clip for float8_e4m3fn, which has no infinity and overflows to NaN."""
    if dtype == jnp.float8_e4m3fn:
        x = jnp.clip(x, -_MAX_FLOAT8, _MAX_FLOAT8)
    return x.astype(dtype)
