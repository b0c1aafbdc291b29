"""The write of keys and values into their pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import device

KVPool = Float[Array, "layers 2 pages page_size kv_heads head_dim"]  # keys, then values

_MAX_FLOAT8 = 448  # the largest float8_e4m3fn


def kv_write(
    kv: KVPool,
    layer: int,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    kv_slots: Int[Array, " tokens"],
) -> KVPool:
    """The pool with the keys and values of this step's tokens written into one layer.

    They are cast to the pool's dtype. A pool of float8_e4m3fn saturates: a number beyond its range
    becomes its largest, 448 or -448; NaN stays NaN. `kv_slots` (int32) comes from `slot_mapping`. A
    token is dropped where its slot is -1, lies in the null page or lies beyond the pool. No two
    tokens of a step may have the same slot.
    """
    if kv.dtype != jnp.float8_e4m3fn or device.default_device().platform != "cpu":
        return kv_write_reference(kv, layer, keys, values, kv_slots)
    # As bytes: XLA's CPU backend would scatter into a wider copy of the pool.
    new = (_saturate(x, kv.dtype) for x in (keys, values))
    pool, *new = (jax.lax.bitcast_convert_type(x, jnp.uint8) for x in (kv, *new))
    pool = kv_write_reference(pool, layer, *new, kv_slots)
    return jax.lax.bitcast_convert_type(pool, kv.dtype)


def kv_write_reference(kv, layer, keys, values, kv_slots):
    """The specification of `kv_write`, in plain JAX."""
    num_pages, page_size = kv.shape[2:4]
    # A dropped token goes to a page out of range: a negative index would wrap.
    page = jnp.where(kv_slots >= page_size, kv_slots // page_size, num_pages)
    offset = jnp.where(kv_slots >= page_size, kv_slots % page_size, 0)
    # Not through a reshape of the pool: XLA's CPU backend then copies all of it.
    kv = kv.at[layer, 0, page, offset].set(_saturate(keys, kv.dtype), mode="drop")
    return kv.at[layer, 1, page, offset].set(_saturate(values, kv.dtype), mode="drop")


def _saturate(x, dtype):
    """`x` in `dtype`. float8_e4m3fn has no infinity: a plain cast makes NaN of a large number."""
    if dtype == jnp.float8_e4m3fn:
        x = jnp.clip(x, -_MAX_FLOAT8, _MAX_FLOAT8)
    return x.astype(dtype)
