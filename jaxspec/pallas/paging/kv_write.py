"""The write of keys and values into their pages."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import device

_KV = Float[Array, "layers 2 pages page_size kv_heads head_dim"]


def kv_write(
    kv: _KV,
    layer: int,
    keys: Float[Array, "tokens kv_heads head_dim"],
    values: Float[Array, "tokens kv_heads head_dim"],
    kv_slots: Int[Array, " tokens"],
) -> _KV:
    """The pool with this step's keys and values of one layer written, cast to the pool's dtype.

    In a pool of float8_e4m3fn what lies beyond its range becomes its largest, 448; NaN stays NaN.
    `kv_slots` (int32) comes from `slot_mapping`. A token with -1, with a slot of the null page or
    with one beyond the pool is dropped. Slots of one step must differ.
    """
    if kv.dtype != jnp.float8_e4m3fn or device.default_device().platform != "cpu":
        return kv_write_reference(kv, layer, keys, values, kv_slots)
    # As bytes: XLA's CPU backend would scatter into a wider copy of the pool.
    new = (_rounded(x, kv.dtype) for x in (keys, values))
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
    kv = kv.at[layer, 0, page, offset].set(_rounded(keys, kv.dtype), mode="drop")
    return kv.at[layer, 1, page, offset].set(_rounded(values, kv.dtype), mode="drop")


def _rounded(x, dtype):
    """`x` in the pool's dtype. 8 bits have no infinity: a cast makes NaN of what is too large."""
    return (jnp.clip(x, -448, 448) if dtype == jnp.float8_e4m3fn else x).astype(dtype)
