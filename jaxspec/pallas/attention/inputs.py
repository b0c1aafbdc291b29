"""Inputs of attention: rotated queries, and the KV pool with this step's keys and values."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.norm.rms_norm import rms_norm
from jaxspec.pallas.paging.kv_write import KVPool, KVScales, kv_write, kv_write_reference

_Heads = Float[Array, "tokens heads head_dim"]
Rotation = tuple[Float[Array, "tokens half"], Float[Array, "tokens half"]]  # cosines, sines


@flax.struct.dataclass
class QKNorm:
    """Norms of query heads and key heads, and perhaps value heads: `rms_norm` over each head."""

    weights: Float[Array, "2 head_dim"]  # row 0 for queries, row 1 for keys
    eps: float = flax.struct.field(pytree_node=False)  # added to the mean square
    zero_centred: bool = flax.struct.field(pytree_node=False)  # scale by `1 + weights`
    of_values: bool = flax.struct.field(pytree_node=False, default=False)  # values, with weight 1


def attention_inputs(
    qkv: Float[Array, "tokens columns"],
    norm: QKNorm | None,
    angles: Rotation | None,
    kv: KVPool,
    layer: int,
    kv_slots: Int[Array, " tokens"],
    *,
    heads: int,
    gated: bool,
    scales: KVScales | None = None,
) -> tuple[Float[Array, "tokens heads head_dim"], KVPool]:
    """Return the queries of a projection, and the pool with its keys and values in one layer.

    `qkv` is a whole projection: `heads` query heads, then all key heads, then all value heads. If
    `gated`, each query head is followed by a gate of its size, which is not read here. Queries and
    keys are normalised by `norm` unless it is None, then rotated (`rotate`) by the token's float32
    `angles` unless these are None. Keys and values are stored by `kv_write`, whose docstring
    defines `kv_slots`, `scales` and the casts. The queries have the dtype of `qkv`.

    One kernel computes all of this if projection, norm (if any) and pool are all bfloat16 or all
    float32, values are not normalised, heads have 64, 128 or 256 channels, and the number of
    rotated channels is at least 16 and divides that.

    Raises:
        ValueError: The projection has the wrong number of columns.
    """
    _check_columns(qkv, kv, heads, gated)
    why = _why_not_kernel(qkv, norm, angles, kv, scales)
    if dispatch.runs_kernel("attention_inputs", why, rows=qkv.shape[0]):
        from jaxspec.pallas.attention.inputs_kernel import attention_inputs_kernel

        on_device = dispatch.layer_index(kv, layer)
        return attention_inputs_kernel(
            qkv, norm, angles, kv, on_device, kv_slots, heads=heads, gated=gated
        )
    queries, keys, values = queries_keys_values(qkv, norm, angles, kv.shape[4:], heads, gated)
    return queries, kv_write(kv, layer, keys, values, kv_slots, scales)


def attention_inputs_reference(
    qkv, norm, angles, kv, layer, kv_slots, *, heads, gated, scales=None
):
    queries, keys, values = queries_keys_values(qkv, norm, angles, kv.shape[4:], heads, gated)
    return queries, kv_write_reference(kv, layer, keys, values, kv_slots, scales)


def _check_columns(qkv, kv, heads, gated):
    kv_heads, head_dim = kv.shape[4:]
    needed = ((1 + gated) * heads + 2 * kv_heads) * head_dim
    if qkv.shape[1] != needed:
        raise ValueError(
            f"A projection has {heads} query heads{' with gates' * gated} and {kv_heads} each of "
            f"keys and values, of {head_dim} channels: {needed} columns, but this one has "
            f"{qkv.shape[1]}. Hand over all of it."
        )


def queries_keys_values(
    qkv: Float[Array, "tokens columns"],
    norm: QKNorm | None,
    angles: Rotation | None,
    keys: tuple[int, ...],
    heads: int,
    gated: bool,
) -> tuple[_Heads, _Heads, _Heads]:
    """Return queries, keys and values of a projection, as `attention_inputs` computes them.

    `keys` are the number of key heads, and of their channels.
    """
    tokens, (kv_heads, head_dim) = qkv.shape[0], keys
    query_columns = (1 + gated) * heads * head_dim
    q, k, v = jnp.split(qkv, [query_columns, query_columns + kv_heads * head_dim], axis=-1)
    q = q.reshape(tokens, heads, (1 + gated) * head_dim)[..., :head_dim]
    k, v = (x.reshape(tokens, kv_heads, head_dim) for x in (k, v))
    if norm is not None:
        q, k = (
            rms_norm(x, weight, norm.eps, zero_centred=norm.zero_centred)
            for x, weight in ((q, norm.weights[0]), (k, norm.weights[1]))
        )
        if norm.of_values:
            v = rms_norm(v, jnp.ones(head_dim, jnp.float32), norm.eps)
    if angles is not None:
        q, k = rotate(q, angles), rotate(k, angles)
    return q, k, v


def rotate(
    x: Float[Array, "tokens heads dim"], angles: Rotation
) -> Float[Array, "tokens heads dim"]:
    """Rotate the first `2 * half` channels of `x`, in pairs `(i, i + half)`.

    Computed in float32, then cast to the dtype of `x`. Su et al. 2021, "RoFormer".
    """
    cos, sin = (a[:, None, :] for a in angles)
    half = cos.shape[-1]
    wide = x[..., : 2 * half].astype(jnp.float32)
    first, second = wide[..., :half], wide[..., half:]
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return jnp.concatenate([rotated.astype(x.dtype), x[..., 2 * half :]], axis=-1)


def _why_not_kernel(qkv, norm, angles, kv, scales):
    head_dim = kv.shape[5]
    half = head_dim // 2 if angles is None else angles[0].shape[1]
    norm_dtype = qkv.dtype if norm is None else norm.weights.dtype
    if not qkv.dtype == norm_dtype == kv.dtype or qkv.dtype not in (jnp.bfloat16, jnp.float32):
        norms = "" if norm is None else f" and norms in {norm_dtype}"
        return f"a projection in {qkv.dtype}{norms} for a {kv.dtype} pool"
    if scales is not None:
        return f"scaled keys and values in {kv.dtype}"
    if norm is not None and norm.of_values:
        return "normalised values"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}, not 64, 128 or 256"
    if half < 8 or head_dim % (2 * half):
        return f"{2 * half} rotated channels of {head_dim}"
    return None
