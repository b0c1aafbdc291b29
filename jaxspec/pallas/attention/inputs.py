"""What attention reads: normalised, rotated queries, and the pool with this step's keys, values."""

import functools
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import access as mosaic
from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.norm.add_norm import rms_norm
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
        return _attention_inputs_kernel(
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


_CHANNELS = 4096  # of a block at most: 32 a thread


def _unsupported(qkv, norms, angles, kv):
    """Why `_attention_inputs_kernel` does not take these operands, or None."""
    head_dim, half = kv.shape[5], angles[0].shape[1]
    if not qkv.dtype == norms.dtype == kv.dtype or qkv.dtype not in (jnp.bfloat16, jnp.float32):
        return f"a projection in {qkv.dtype} and norms in {norms.dtype} for a {kv.dtype} pool"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}, not 64, 128 or 256"
    if half < 8 or head_dim % (2 * half):
        return f"{2 * half} rotated channels of {head_dim}"
    return None


@functools.partial(jax.jit, static_argnames=("heads", "gated", "eps", "zero_centred", "interpret"))
def _attention_inputs_kernel(
    qkv, norms, cos, sin, kv, layer, kv_slots, *, heads, gated, eps, zero_centred, interpret=None
):
    """`attention_inputs` on a Hopper GPU: a block has query heads of a token, or its key heads and
    their values. `interpret`: parameters of Mosaic's interpreter.
    """
    from jax.experimental import pallas as pl
    from jax.experimental.pallas import mosaic_gpu as plgpu

    tokens, (num_pages, page_size, kv_heads, head_dim) = qkv.shape[0], kv.shape[2:]
    of_keys, of_queries = (gcd(count, _CHANNELS // head_dim) for count in (kv_heads, heads))
    key_blocks, keys = kv_heads // of_keys, (1 + gated) * heads

    def body(by_query, by_head, norms, cos, sin, layer, kv_slots, kv, queries):
        block, token = lax.axis_index("block"), lax.axis_index("token")
        load = functools.partial(_load_heads, plgpu, cos.shape[1], head_dim)
        angles = cos.at[token], sin.at[token]
        finish = functools.partial(_finish, plgpu, angles, eps, zero_centred, qkv.dtype)

        @pl.when(block < key_blocks)  # they begin first: their stores wait for an index
        def _():
            first, slot = block * of_keys, kv_slots[token]
            k = load(by_head.at[token, pl.ds(keys + first, of_keys)])
            v = load(by_head.at[token, pl.ds(keys + kv_heads + first, of_keys)])
            k = finish(norms.at[1], k)
            page = lax.div(slot, page_size)

            @pl.when((slot >= page_size) & (page < num_pages))
            def _():
                place = page, slot - page * page_size, pl.ds(first, of_keys)
                _store_heads(plgpu, kv.at[layer[0], 0, *place], k)
                _store_heads(plgpu, kv.at[layer[0], 1, *place], v)

        @pl.when(block >= key_blocks)
        def _():
            heads = token, pl.ds((block - key_blocks) * of_queries, of_queries)
            q = finish(norms.at[0], load(by_query.at[*heads]))
            _store_heads(plgpu, queries.at[*heads], q)

    kernel = plgpu.kernel(
        body,
        kernel_name="attention_inputs",
        out_type=jax.ShapeDtypeStruct((tokens, heads, head_dim), qkv.dtype),
        grid=(key_blocks + heads // of_queries, tokens),
        grid_names=("block", "token"),
        # Safe without barriers: nothing is read that is written.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    pool = jax.new_ref(kv, memory_space=plgpu.GMEM)
    # The gates between the queries are no heads to be skipped, but half of wider ones.
    by_query, by_head = (qkv.reshape(tokens, -1, n * head_dim) for n in (1 + gated, 1))
    operands = by_query, by_head, norms, cos, sin, layer[None], kv_slots, pool
    return kernel(*operands), jax.freeze(pool)


def _load_heads(plgpu, half, head_dim, heads):
    """The first `head_dim` columns of `heads`, as pieces `[heads, half]` all in one layout.

    So a thread has both channels of a rotated pair, at one place of the first two pieces, and
    nothing but the sum of squares crosses lanes.
    """
    from jax.experimental import pallas as pl

    layout = layouts.piece_layout(plgpu, heads.shape[0], half, heads.dtype.itemsize)
    return [
        mosaic.load(plgpu, heads.at[:, pl.ds(channel, half)], layout)
        for channel in range(0, head_dim, half)
    ]


def _store_heads(plgpu, heads, pieces):
    from jax.experimental import pallas as pl

    half = pieces[0].shape[1]
    for i, piece in enumerate(pieces):
        mosaic.store(plgpu, heads.at[:, pl.ds(i * half, half)], piece)


def _finish(plgpu, angles, eps, zero_centred, dtype, weight, pieces):
    """The pieces of heads, normalised and rotated, with the roundings of the specification."""
    from jax.experimental import pallas as pl

    count, half = pieces[0].shape
    layout = layouts.piece_layout(plgpu, count, half, dtype.itemsize).reduce(0)

    def every_head(ref):
        row = mosaic.load(plgpu, ref, layout).astype(jnp.float32)
        return lax.broadcast_in_dim(row, (count, half), (1,))

    weights = [every_head(weight.at[pl.ds(i * half, half)]) for i in range(len(pieces))]
    cos, sin = map(every_head, angles)
    wide = [piece.astype(jnp.float32) for piece in pieces]
    squares = functools.reduce(jnp.add, [x * x for x in wide])
    root = lax.rsqrt(jnp.sum(squares, axis=1) * (1 / (half * len(pieces))) + eps)
    root = lax.broadcast_in_dim(root, (count, half), (0,))
    weights = [w + 1.0 if zero_centred else w for w in weights]
    normed = [(x * root * w).astype(dtype) for x, w in zip(wide, weights, strict=True)]
    first, second = (x.astype(jnp.float32) for x in normed[:2])
    turned = first * cos - second * sin, second * cos + first * sin
    return *(x.astype(dtype) for x in turned), *normed[2:]
