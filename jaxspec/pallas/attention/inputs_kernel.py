"""`attention_inputs` on a Hopper GPU."""

import functools
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts

_CHANNELS = 4096  # of a block at most: 32 a thread


@functools.partial(jax.jit, static_argnames=("heads", "gated", "eps", "zero_centred", "interpret"))
def attention_inputs_kernel(
    qkv, norms, cos, sin, kv, layer, kv_slots, *, heads, gated, eps, zero_centred, interpret=None
):
    """`attention_inputs` on a Hopper GPU: a block has query heads of a token, or its key heads and
    their values. `interpret`: parameters of Mosaic's interpreter.
    """

    tokens, (num_pages, page_size, kv_heads, head_dim) = qkv.shape[0], kv.shape[2:]
    of_keys, of_queries = (gcd(count, _CHANNELS // head_dim) for count in (kv_heads, heads))
    key_blocks, keys = kv_heads // of_keys, (1 + gated) * heads

    def body(by_query, by_head, norms, cos, sin, layer, kv_slots, kv, queries):
        block, token = lax.axis_index("block"), lax.axis_index("token")
        load = functools.partial(_load_heads, cos.shape[1], head_dim)
        angles = cos.at[token], sin.at[token]
        finish = functools.partial(_finish, angles, eps, zero_centred, qkv.dtype)

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
                _store_heads(kv.at[layer[0], 0, *place], k)
                _store_heads(kv.at[layer[0], 1, *place], v)

        @pl.when(block >= key_blocks)
        def _():
            heads = token, pl.ds((block - key_blocks) * of_queries, of_queries)
            q = finish(norms.at[0], load(by_query.at[*heads]))
            _store_heads(queries.at[*heads], q)

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


def _load_heads(half, head_dim, heads):
    """The first `head_dim` columns of `heads`, as pieces `[heads, half]` all in one layout.

    So a thread has both channels of a rotated pair, at one place of the first two pieces, and
    nothing but the sum of squares crosses lanes.
    """

    layout = layouts.piece_layout(heads.shape[0], half, heads.dtype.itemsize)
    return [
        access.load(heads.at[:, pl.ds(channel, half)], layout)
        for channel in range(0, head_dim, half)
    ]


def _store_heads(heads, pieces):

    half = pieces[0].shape[1]
    for i, piece in enumerate(pieces):
        access.store(heads.at[:, pl.ds(i * half, half)], piece)


def _finish(angles, eps, zero_centred, dtype, weight, pieces):
    """The pieces of heads, normalised and rotated, with the roundings of the specification."""

    count, half = pieces[0].shape
    layout = layouts.piece_layout(count, half, dtype.itemsize).reduce(0)

    def every_head(ref):
        row = access.load(ref, layout).astype(jnp.float32)
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
