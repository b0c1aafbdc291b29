"""The cases of the ops that replay; `table.OPS` lists them."""

import dataclasses
import functools
import itertools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import INPUTS, Case, about, filled
from benchmarks.kernels.cases.conv import MAMBA2_SIZES, mamba2_params, mamba2_projections
from benchmarks.kernels.cases.prefill import mamba2_tokens
from benchmarks.measure.shapes import GDN, KDA, MAMBA2
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay, gdn_conv_replay_reference
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams, GdnRing, GdnTokens
from jaxspec.pallas.gated_delta.replay import gdn_replay, gdn_replay_reference
from jaxspec.pallas.mamba2.conv_replay import (
    mamba2_conv_replay,
    mamba2_conv_replay_reference,
)
from jaxspec.pallas.mamba2.heads import Mamba2Ring, Mamba2Tokens
from jaxspec.pallas.mamba2.replay import mamba2_replay, mamba2_replay_reference
from jaxspec.pallas.recurrent.replay import default_window, must_fold
from jaxspec.regions import DecodeRegion


def _run(op, pool, layer, tokens, region):
    out, *pool = op(tokens, *pool, layer, region)
    return out, tuple(pool)


def gdn_tokens(rng, shape, rows, width, by_channel=False):
    """The tokens of a rectangle as a layer makes them; `by_channel`: its decays are by channel."""
    key = (rows, width, shape.key_heads, shape.key_dim)
    value = (rows, width, shape.value_heads, shape.value_dim)
    q, k = (rng.normal(size=key).astype(np.float32) for _ in range(2))
    q, k = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    v = rng.normal(size=value).astype(np.float32)
    g = -rng.exponential(size=key if by_channel else value[:3]).astype(np.float32)
    return GdnTokens(q, k, v, g, rng.random(size=value[:3]).astype(np.float32))


def _region(rng, rows, width, window):
    """A region whose rings are as full as chance has them; all rows are full and live.

    Every length of a ring comes as often as the others. A single row has the middle one.
    """
    length = rng.permutation(np.linspace(0, window, rows + 2)[1:-1].round())
    computed, slots = rng.integers(window, 10**4, rows), 1 + rng.permutation(rows)
    query_len, unused = np.full(rows, width), np.zeros(rows)
    fields = slots, computed, query_len, unused, length
    return DecodeRegion(*(x.astype(np.int32) for x in fields))


def _folding(region, width, window):
    """Return the number of rows that fold, and a description of the rings' lengths."""
    folds, length = int(np.sum(must_fold(region.ring_length, width, window))), region.ring_length
    return folds, {"ring": float(length.mean()), "folds": round(folds / len(length), 3)}


def _nbytes(operands):
    """Bytes of what a launch reads; it does not read `state_offset`."""
    unread = [x.state_offset.nbytes for x in operands if isinstance(x, DecodeRegion)]
    return sum(x.nbytes for x in jax.tree.leaves(operands)) - sum(unread)


def gdn_replay_cases() -> Iterator[Case]:
    """Rings as full as chance would have them; the results say how many rows fold."""
    yield from _gdn_cases(_gdn_replay_case)
    for dtype, width in itertools.product(("float32", "float16", "bfloat16"), (4, 1)):
        for model, shape in KDA.items():
            yield _gdn_replay_case(model, shape, jnp.dtype(dtype), 64, width, by_channel=True)


def gdn_conv_replay_cases() -> Iterator[Case]:
    """As for `gdn_replay`, from a projection on, whose output gate is not read."""
    yield from _gdn_cases(_gdn_conv_replay_case)


def _gdn_cases(case):
    sizes = [(d, r, w) for w in (4, 1) for d in ("float32", "float16") for r in (64, 256, 1)]
    for model, shape in GDN.items():
        for dtype, rows, width in sizes:
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield case(model, shape, jnp.dtype(dtype), rows, width)


def _gdn_replay_case(model, shape, dtype, rows, width, by_channel=False):
    rng, window = np.random.default_rng(0), default_window(dtype.itemsize)
    tokens = gdn_tokens(rng, shape, rows, width, by_channel)
    region = _region(rng, rows, width, window)
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    decays = tokens.g.shape[2:]

    def pool(layers):
        fill = functools.partial(filled, layers, rows)
        in_ring = window + width
        return fill(1, *state, dtype=dtype), GdnRing(
            k=fill(in_ring, shape.key_heads, shape.key_dim, dtype=dtype),
            u=fill(in_ring, *state[:2], dtype=dtype),
            g=-jnp.abs(fill(in_ring, *decays, dtype=jnp.float32)),
            window=window,
        )

    folds, of_ring = _folding(region, width, window)
    state_bytes = math.prod(state) * dtype.itemsize
    factors = shape.key_heads * shape.key_dim + shape.value_heads * shape.value_dim
    token_bytes = factors * dtype.itemsize + 4 * math.prod(decays)
    ring_bytes = int(region.ring_length.sum() + rows * width) * token_bytes
    return Case(
        op="gdn_replay",
        about=about(model, shape, dtype, rows=rows, width=width, **of_ring),
        run=functools.partial(_run, gdn_replay),
        reference=functools.partial(_run, gdn_replay_reference),
        pool=pool,
        layer_bytes=rows * state_bytes + ring_bytes,
        operands=jax.tree.map(jnp.asarray, (tokens, region)),
        total_bytes=(rows + folds) * state_bytes
        + ring_bytes
        + _nbytes((tokens, region))
        + tokens.v.nbytes,
    )


def _gdn_conv_replay_case(model, shape, dtype, rows, width, kernel=4):
    case, x_dtype = _gdn_replay_case(model, shape, dtype, rows, width), jnp.dtype("bfloat16")
    tokens, region = case.operands
    keys = jax.random.split(jax.random.key(0), INPUTS + 1)
    size = rows, width, shape.projected
    # Several, so that none is found in the cache.
    xs = tuple(jax.random.normal(key, size).astype(x_dtype) for key in keys[1:])
    taps = jax.random.normal(keys[0], (kernel, shape.conv_dim)).astype(x_dtype)
    decay = jnp.zeros((shape.value_heads, 2))
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)
    conv_rows = kernel - 1 + width  # read, and written

    def run(op, pools, layer, xs, taps, decay, region):
        params = GdnParams(taps, decay, heads)
        out, *pools = op(xs[layer % INPUTS], params, *pools, layer, region)
        return out, tuple(pools)

    def pool(layers):
        return filled(layers, rows, conv_rows, shape.conv_dim, dtype=x_dtype), *case.pool(layers)

    conv_bytes = rows * conv_rows * shape.conv_dim * x_dtype.itemsize
    x_bytes = rows * width * (shape.conv_dim + 2 * shape.value_heads) * x_dtype.itemsize
    return dataclasses.replace(
        case,
        op="gdn_conv_replay",
        run=functools.partial(run, gdn_conv_replay),
        reference=functools.partial(run, gdn_conv_replay_reference),
        pool=pool,
        layer_bytes=case.layer_bytes + conv_bytes,
        operands=(xs, taps, decay, region),
        total_bytes=case.total_bytes - _nbytes(tokens) + x_bytes + taps.nbytes + conv_bytes,
    )


def mamba2_replay_cases() -> Iterator[Case]:
    """As for `gdn_replay`; in float32 also with the shorter window, which costs less to go over."""
    sizes = [(d, r, w) for w in (4, 1) for d in ("float32", "float16") for r in (64, 256, 1)]
    for dtype, rows, width in [*sizes, ("float32", 8, 4), ("float32", 64, 8)]:
        for window in (None, 16) if dtype == "float32" else (None,):
            yield _mamba2_replay_case("nemotron-3-nano", jnp.dtype(dtype), rows, width, window)
    yield _mamba2_replay_case("nemotron-h-8b", jnp.dtype("float32"), 64, 4, None)


def _mamba2_replay_case(model, dtype, rows, width, window):
    rng, shape = np.random.default_rng(0), MAMBA2[model]
    window = window or default_window(dtype.itemsize)
    region = _region(rng, rows, width, window)
    tokens = Mamba2Tokens(*mamba2_tokens(shape, rows, width))
    state = (shape.heads, shape.head_dim, shape.state_dim)

    def pool(layers):
        fill = functools.partial(filled, layers, rows)
        in_ring = window + width
        return fill(1, *state, dtype=dtype), Mamba2Ring(
            x=fill(in_ring, *state[:2], dtype=dtype),
            b=fill(in_ring, shape.groups, shape.state_dim, dtype=dtype),
            dt=0.1 * jnp.abs(fill(in_ring, shape.heads, dtype=jnp.float32)),
            window=window,
        )

    folds, of_ring = _folding(region, width, window)
    state_bytes = math.prod(state) * dtype.itemsize
    factors = math.prod(state[:2]) + shape.groups * shape.state_dim
    token_bytes = factors * dtype.itemsize + 4 * shape.heads
    ring_bytes = int(region.ring_length.sum() + rows * width) * token_bytes
    return Case(
        op="mamba2_replay",
        about=about(model, shape, dtype, rows=rows, width=width, window=window, **of_ring),
        run=functools.partial(_run, mamba2_replay),
        reference=functools.partial(_run, mamba2_replay_reference),
        pool=pool,
        layer_bytes=rows * state_bytes + ring_bytes,
        operands=(tokens, jax.tree.map(jnp.asarray, region)),
        total_bytes=(rows + folds) * state_bytes + ring_bytes + _nbytes(tokens) + 4 * tokens.x.size,
    )


def mamba2_conv_replay_cases() -> Iterator[Case]:
    """As for `mamba2_replay`, from a projection on, whose gate is not read."""
    for model, rows, widths in MAMBA2_SIZES:
        for width in widths:
            yield _mamba2_conv_replay_case(model, jnp.dtype("float32"), rows, width)
    for width in (4, 1):
        yield _mamba2_conv_replay_case("nemotron-3-nano", jnp.dtype("float16"), 64, width)


def _mamba2_conv_replay_case(model, dtype, rows, width, kernel=4):
    case, x_dtype = _mamba2_replay_case(model, dtype, rows, width, None), jnp.dtype("bfloat16")
    shape, (tokens, region) = MAMBA2[model], case.operands
    params, xs = mamba2_params(shape, kernel), mamba2_projections(shape, rows, width)
    conv_rows = kernel - 1 + width  # read, and written

    def run(op, pools, layer, xs, params, region):
        out, *pools = op(xs[layer % INPUTS], params, *pools, layer, region)
        return out, tuple(pools)

    def pool(layers):
        return filled(layers, rows, conv_rows, shape.conv_dim, dtype=x_dtype), *case.pool(layers)

    conv_bytes = rows * conv_rows * shape.conv_dim * x_dtype.itemsize
    x_bytes = rows * width * (shape.conv_dim + shape.heads) * x_dtype.itemsize
    return dataclasses.replace(
        case,
        op="mamba2_conv_replay",
        run=functools.partial(run, mamba2_conv_replay),
        reference=functools.partial(run, mamba2_conv_replay_reference),
        pool=pool,
        layer_bytes=case.layer_bytes + conv_bytes,
        operands=(xs, params, region),
        total_bytes=case.total_bytes - _nbytes(tokens) + x_bytes + _nbytes((params,)) + conv_bytes,
    )
