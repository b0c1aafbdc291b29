"""Pallas (Mosaic GPU) kernel of `attention_inputs` for Hopper GPUs."""

import functools
from math import gcd

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.paging.page_tiles import KEYS, VALUES

_MAX_CHANNELS = 4096  # channels per block: 32 per thread


@functools.partial(jax.jit, static_argnames=("heads", "gated", "interpret"))
def attention_inputs_kernel(
    qkv, norm, angles, kv, layer, kv_slots, *, heads, gated, interpret=None
):
    """Run `attention_inputs`: a block has some query heads of a token, or key heads with values.

    Norm and rotation are static: a None leaves them out of the compiled kernel.
    """
    tokens, (num_pages, page_size, kv_heads, head_dim) = qkv.shape[0], kv.shape[2:]
    half = head_dim // 2 if angles is None else angles[0].shape[1]
    max_heads = _MAX_CHANNELS // head_dim
    block_keys, block_queries = gcd(kv_heads, max_heads), gcd(heads, max_heads)
    key_blocks, first_key = kv_heads // block_keys, (1 + gated) * heads

    def body(by_query, by_head, weights, angles, layer, kv_slots, kv, queries):
        block, token = lax.axis_index("block"), lax.axis_index("token")

        def norm_and_rotate(row, pieces):
            weight = None if norm is None else weights.at[row]  # row 0: queries, 1: keys
            return _norm_and_rotate(pieces, weight, angles, token, norm)

        @pl.when(block < key_blocks)  # keys start first: their stores wait for a KV slot
        def _():
            head, slot = block * block_keys, kv_slots[token]
            k = _load_heads(by_head.at[token, pl.ds(first_key + head, block_keys)], half, head_dim)
            v = by_head.at[token, pl.ds(first_key + kv_heads + head, block_keys)]
            v = _load_heads(v, half, head_dim)
            k = norm_and_rotate(1, k)
            page = lax.div(slot, page_size)

            @pl.when((slot >= page_size) & (page < num_pages))
            def _():
                offset, key_heads = slot - page * page_size, pl.ds(head, block_keys)
                _store_heads(kv.at[layer[0], KEYS, page, offset, key_heads], k)
                _store_heads(kv.at[layer[0], VALUES, page, offset, key_heads], v)

        @pl.when(block >= key_blocks)
        def _():
            heads = pl.ds((block - key_blocks) * block_queries, block_queries)
            q = _load_heads(by_query.at[token, heads], half, head_dim)
            _store_heads(queries.at[token, heads], norm_and_rotate(0, q))

    kernel = plgpu.kernel(
        body,
        kernel_name="attention_inputs",
        out_type=jax.ShapeDtypeStruct((tokens, heads, head_dim), qkv.dtype),
        grid=(key_blocks + heads // block_queries, tokens),
        grid_names=("block", "token"),
        # Safe without automatic barriers: the kernel never reads what it writes.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True),
        **({} if interpret is None else {"interpret": interpret}),
    )
    pool = jax.new_ref(kv, memory_space=plgpu.GMEM)
    # Two views of one array: with a gate, a query head is the first half of a wider head.
    widths = (1 + gated) * head_dim, head_dim
    by_query, by_head = (qkv.reshape(tokens, qkv.shape[1] // n, n) for n in widths)
    weights = None if norm is None else norm.weights
    queries = kernel(by_query, by_head, weights, angles, layer[None], kv_slots, pool)
    return queries, jax.freeze(pool)


def _load_heads(heads, half, head_dim):
    """Load the first `head_dim` columns of `heads` as pieces `[heads, half]`, all in one layout.

    A thread then holds both channels of a rotated pair, at the same index of the first two pieces,
    and only the sum of squares crosses lanes.
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


def _norm_and_rotate(pieces, weight, angles, token, norm):
    """Normalise and rotate heads, rounding where the reference does; all loads are issued first."""
    half, first = pieces[0].shape[1], pieces[0]
    columns = [pl.ds(i * half, half) for i in range(len(pieces))]
    weights = [] if norm is None else [_row(weight.at[c], first) for c in columns]
    turns = None if angles is None else [_row(ref.at[token], first) for ref in angles]
    if norm is not None:
        pieces = _norm(pieces, weights, norm.eps, norm.zero_centred)
    return pieces if turns is None else _rotate(pieces, *turns)


def _norm(pieces, weights, eps, zero_centred):
    """Normalise the pieces of heads, rounding where `rms_norm` does."""
    shape = pieces[0].shape
    wide = [piece.astype(jnp.float32) for piece in pieces]
    squares = functools.reduce(jnp.add, [x * x for x in wide])
    scale = lax.rsqrt(jnp.sum(squares, axis=1) * (1 / (shape[1] * len(pieces))) + eps)
    scale = lax.broadcast_in_dim(scale, shape, (0,))
    weights = [w + 1.0 if zero_centred else w for w in weights]
    return [(x * scale * w).astype(pieces[0].dtype) for x, w in zip(wide, weights, strict=True)]


def _rotate(pieces, cos, sin):
    """Rotate the first two of the pieces of heads, rounding where `rotate` does."""
    first, second = (x.astype(jnp.float32) for x in pieces[:2])
    rotated = first * cos - second * sin, second * cos + first * sin
    return *(x.astype(pieces[0].dtype) for x in rotated), *pieces[2:]


def _row(ref, piece):
    """Load a row as float32 and broadcast it to every head of `piece`."""
    heads, half = piece.shape
    layout = layouts.piece_layout(heads, half, piece.dtype.itemsize).reduce(0)
    row = access.load(ref, layout).astype(jnp.float32)
    return lax.broadcast_in_dim(row, piece.shape, (1,))
