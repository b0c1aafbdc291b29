"""What attention reads: normalised, rotated queries, and the pool with this step's keys, values."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.norm.rms_norm import rms_norm
from jaxspec.pallas.paging.kv_write import kv_write, kv_write_reference

Rotation = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]
_KV = Float[Array, "layers 2 pages page_size kv_heads head_dim"]


def attention_inputs(
    qkv: Float[Array, "tokens columns"],
    norms: Float[Array, "2 head_dim"],
    angles: Rotation,
    kv: _KV,
    layer: int,
    kv_slots: Int[Array, " tokens"],
    *,
    heads: int,
    gated: bool,
    eps: float,
    zero_centred: bool,
) -> tuple[Float[Array, "tokens heads head_dim"], _KV]:
    """Queries in the dtype of `qkv`, and the pool with the keys and values of one layer written.

    `qkv` is a projection as it comes, its columns side by side: all query heads, each followed by
    a gate of its size where they are `gated`, which is not read; all key heads; all value heads.
    ValueError where the columns are not as many as that makes. Queries and keys go through
    `rms_norm` head by head, with `eps`, `zero_centred` and the weights `norms[0]` and `norms[1]`,
    and then through `rotate` with the token's float32 `angles`; keys and values through `kv_write`,
    which says what becomes of `kv_slots` and of other dtypes.

    One kernel where projection, norms and pool are all bfloat16 or all float32, heads are of 64,
    128 or 256 channels, and as many as are rotated together divide them.
    """
    _check_columns(qkv, kv, heads, gated)
    if dispatch.runs_kernel("attention_inputs", _unsupported(qkv, norms, angles, kv)):
        from jaxspec.pallas.attention.inputs_kernel import attention_inputs_kernel

        return attention_inputs_kernel(
            qkv, norms, *angles, kv, dispatch.layer_index(kv, layer), kv_slots,
            heads=heads, gated=gated, eps=eps, zero_centred=zero_centred,
        )  # fmt: skip
    q, k, v = _parts(qkv, norms, angles, kv, heads, gated, eps, zero_centred)
    return q, kv_write(kv, layer, k, v, kv_slots)


def attention_inputs_reference(
    qkv, norms, angles, kv, layer, kv_slots, *, heads, gated, eps, zero_centred
):
    """The specification of `attention_inputs`."""
    q, k, v = _parts(qkv, norms, angles, kv, heads, gated, eps, zero_centred)
    return q, kv_write_reference(kv, layer, k, v, kv_slots)


def _check_columns(qkv, kv, heads, gated):
    kv_heads, head_dim = kv.shape[4:]
    needed = ((1 + gated) * heads + 2 * kv_heads) * head_dim
    if qkv.shape[1] != needed:
        raise ValueError(
            f"A projection has {heads} query heads{' with gates' * gated} and {kv_heads} each of "
            f"keys and values, of {head_dim} channels: {needed} columns, but this one has "
            f"{qkv.shape[1]}. Hand over all of it."
        )


def _parts(qkv, norms, angles, kv, heads, gated, eps, zero_centred):
    """Queries, keys and values of a projection, `[tokens, heads, head_dim]`."""
    tokens, (kv_heads, head_dim) = qkv.shape[0], kv.shape[4:]
    keys = (1 + gated) * heads * head_dim
    q, k, v = jnp.split(qkv, [keys, keys + kv_heads * head_dim], axis=-1)
    q = q.reshape(tokens, heads, -1)[..., :head_dim]
    k, v = (x.reshape(tokens, kv_heads, head_dim) for x in (k, v))
    q, k = (
        rotate(rms_norm(x, weight, eps, zero_centred=zero_centred), angles)
        for x, weight in ((q, norms[0]), (k, norms[1]))
    )
    return q, k, v


def rotate(
    x: Float[Array, "tokens heads dim"], angles: Rotation
) -> Float[Array, "tokens heads dim"]:
    """`x` with its first `2 * half` channels rotated, pairs `(i, i + half)`; the rest untouched.

    In float32, then cast to `x`'s dtype. Su et al. 2021, "RoFormer".
    """
    cos, sin = (a[:, None, :] for a in angles)
    half = cos.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    turned = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([turned.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def _unsupported(qkv, norms, angles, kv):
    """Why `attention_inputs_kernel` does not take these operands, or None."""
    head_dim, half = kv.shape[5], angles[0].shape[1]
    if not qkv.dtype == norms.dtype == kv.dtype or qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"a projection in {qkv.dtype} and norms in {norms.dtype} for a {kv.dtype} pool"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}, not 64, 128 or 256"
    if half < 8 or head_dim % (2 * half):
        return f"{2 * half} rotated channels of {head_dim}"
    return None
