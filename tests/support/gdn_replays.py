"""Rows of every kind for the kernels that replay Gated DeltaNet, and how they are compared."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
from gated_delta import heads_of
from recurrences import GDN, spoil
from regions import decode_region
from replays import pools
from sm90 import array

from benchmarks.measure.shapes import GdnShape
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay, gdn_conv_replay_reference
from jaxspec.pallas.gated_delta.heads import GdnParams, GdnRing
from jaxspec.pallas.gated_delta.replay_kernel import Projection, gdn_conv_replay_kernel
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.conv_ring import past_rows
from jaxspec.pallas.recurrent.replay import default_window, must_fold
from jaxspec.regions import DecodeRegion

LAYERS, SLOTS = 2, 7

COMPILED_CASES = [  # shape, dtype, width, rows; with 1, 2 and 16 rows a head has 4, 2 and 1 block
    *((GDN.typical, jnp.float32, width, rows) for width in (1, 4, 8) for rows in (1, 16)),
    *((GDN.typical, jnp.float16, width, rows) for width in (1, 4, 8) for rows in (1, 16)),
    (GDN.typical, jnp.bfloat16, 4, 16),
    (GDN.typical, jnp.float32, 4, 2),
    *((GdnShape(2, 4, 64, 64), dtype, 4, 64) for dtype in (jnp.float32, jnp.float16)),
    *(
        (shape, dtype, 4, 16)
        for shape in GDN.published.values()
        if shape != GDN.typical
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
    ),
]


def window_of(dtype):
    """The default window of a ring in this dtype."""
    return default_window(jnp.dtype(dtype).itemsize)


def real_tokens(width):
    """How many of each row of `pools_and_rows` are no padding; a NaN comes in live row 2."""
    return [width, max(1, width - 1), width, 0, 0, 0, 0, width]


def pools_and_rows(rng, shape, dtype, width, window=None, family=GDN):
    """Checkpoints, ring and region; NaN in all that no row may read.

    Rows: an empty ring; one that folds, of all the tokens it may have; one that just does not
    fold; padding by slot, by length, by slots that are not there; a length and a ring's length out
    of range.
    """
    window = window or window_of(dtype)
    num_rows, edge, large = window + width, window - width, 2**31 - 1
    slots = [2, 4, 6, 0, 3, 9, -1, 1]
    num_computed = [num_rows + 5, 7 * num_rows + 3, num_rows - 1, -(2**31), large, -7, 5]
    num_computed.append(10**9 + 1)
    ring_length = [0, window, edge, large, -5, 3, -(2**31), large]
    query_len = [width, max(1, width - 1), width, width, 0, width, 2, 99]

    def filled(*dims, scale):
        return (scale * rng.normal(size=(LAYERS, SLOTS, *dims))).astype(np.float32)

    states = filled(1, shape.value_heads, shape.value_dim, shape.key_dim, scale=0.3)
    k = filled(num_rows, shape.key_heads, shape.key_dim, scale=0.1)
    u = filled(num_rows, shape.value_heads, shape.value_dim, scale=0.5)
    g = -0.1 * np.abs(filled(num_rows, *family.factors(shape)[2], scale=1.0))
    for slot, computed, length in zip(slots, num_computed, ring_length, strict=True):
        if not 0 < slot < SLOTS:
            continue
        counted = [(computed - 1 - i) % num_rows for i in range(min(max(length, 0), window))]
        for x in (k, u, g):
            x[1, slot, np.setdiff1d(range(num_rows), counted)] = np.nan
    ring = GdnRing(jnp.asarray(k, dtype), jnp.asarray(u, dtype), jnp.asarray(g), window)
    rows = decode_region(slots, query_len, num_computed=num_computed, ring_length=ring_length)
    return jnp.asarray(states, dtype), ring, rows


def norm_of(shape, rows, width, dtype, first=8, gate="silu"):
    """The output norm of so many tokens; other columns than the gates are NaN."""
    rng = np.random.default_rng(width)
    features = shape.value_heads * shape.value_dim
    gates = np.full((rows * width, first + features + 4), np.nan)
    gates[:, first : first + features] = rng.normal(size=(rows * width, features))
    weight = jnp.asarray(rng.normal(size=shape.value_dim), jnp.float32)
    return GatedNorm(jnp.asarray(gates, dtype), weight, first=first, eps=1e-3, gate=gate)


def interpreted(interpret, splits=None):
    """The kernel in Mosaic's interpreter, as the op."""

    def run(tokens, states, ring, layer, rows, norm=None):
        operands = tokens, states, ring, jnp.int32(layer), rows, norm
        return GDN.replay.kernel(*operands, interpret=interpret, splits=splits)

    return run


def check(run, shape, dtype, width, window=None, seed=0, normed=None, family=GDN):
    """`run` is the reference in what it puts out and in every element of the pools.

    NaN is in padding, in all that no row may read, and in live row 2's keys. `normed`: what it puts
    out is normed, in this dtype.
    """
    rng, real = np.random.default_rng(seed), real_tokens(width)
    states, ring, rows = pools_and_rows(rng, shape, dtype, width, window, family)
    # Slowed, so that the ring's oldest tokens still count.
    tokens = family.slowed(family.draw(rng, len(real), width, shape=shape), 0.1)
    for row, count in enumerate(real):
        spoil(tokens, np.s_[row, count:])
    tokens.k[2] = np.nan
    want = family.replay.reference(tokens, states, ring, 1, rows)
    norm = normed and norm_of(shape, len(real), width, normed, gate=family.gate)
    got = run(tokens, states, ring, 1, rows, norm)
    # An update may round the other way, and then so do those that follow.
    loose = 1e-5 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)
    compare(got, want, states, rows, width, loose, norm)


def compare(got, want, before, rows, width, loose, norm=None):
    """Outputs and pools `(out, states, ring)` are the reference's, which norms nothing.

    `before`: the checkpoints, of which only those change whose row folds.
    """
    real = real_tokens(width)
    (out, states, ring), (wanted, *expected) = got, want
    dtype = states.dtype
    eps = float(jnp.finfo(dtype).eps)
    pool_error = 2 * loose  # a fold adds several tokens, each of which may round the other way
    if norm:
        wanted = norm(wanted.reshape(-1, *wanted.shape[2:])).reshape(*wanted.shape[:2], -1)
        assert out.shape == wanted.shape and out.dtype == norm.gates.dtype
        # A head is small, but normed.
        loose = max(10 * loose, 8 * float(jnp.finfo(out.dtype).eps))
    wanted, out = (np.asarray(x, np.float32) for x in (wanted, out))
    for row, count in enumerate(real):
        np.testing.assert_allclose(out[row, :count], wanted[row, :count], rtol=0, atol=loose)
        assert count or not np.any(out[row])  # no uninitialised memory comes out
    assert np.isnan(out[2]).any() and np.isfinite(out[1, : real[1]]).all()
    for x, y in zip(jax.tree.leaves((states, ring)), jax.tree.leaves(expected), strict=True):
        x, y = (np.asarray(z, np.float32) for z in (x, y))
        np.testing.assert_allclose(x, y, rtol=8 * eps, atol=pool_error)
    states, before = (np.asarray(x, np.float32) for x in (states, before))
    changed = (states != before).any(axis=(2, 3, 4, 5))
    folds = must_fold(rows.ring_length, width, ring.window) & (jnp.asarray(real) > 0)
    assert set(np.argwhere(changed)[:, 1]) == {
        int(slot) for slot, folded in zip(rows.slots, folds, strict=True) if folded
    }


def _compiled(op):
    """`op` as one program: the heads and the layer are static."""

    @functools.partial(jax.jit, static_argnames=("heads", "layer"))
    def run(projected, conv_weight, decay, heads, conv, states, ring, layer, rows, *norm):
        params = GdnParams(conv_weight, decay, heads)
        return op(projected, params, conv, states, ring, layer, rows, *norm)

    return lambda projected, params, *others: run(projected, *params, *others)


conv_replay, conv_reference = map(_compiled, (gdn_conv_replay, gdn_conv_replay_reference))


def conv_kernel(projected, params, conv, states, ring, layer, rows, norm=None, **options):
    tokens = Projection(projected, params.conv, params.decay)
    operands = tokens, conv, states, ring, jnp.int32(layer), rows, norm
    return gdn_conv_replay_kernel(*operands, **options)


def conv_case(shape, x_dtype, dtype, width, *, window=None, kernel=4, spare=0):
    """All operands of a step from its projection on; `spare`: rows of the pool nobody needs."""
    rng = np.random.default_rng(width)
    states, ring, rows = pools_and_rows(rng, shape, dtype, width, window)
    projected, params, conv = _projection(rng, shape, x_dtype, width, rows, kernel, spare)
    return projected, params, conv, states, ring, 1, rows


def _projection(rng, shape, dtype, width, region, kernel, spare):
    """NaN in all that no live row may read, and in live row 2's keys."""
    rows, window = real_tokens(width), kernel - 1 + width + spare
    gates = shape.conv_dim + shape.value_heads * shape.value_dim
    a = gates + shape.value_heads
    x = rng.normal(size=(len(rows), width, shape.projected))
    x[..., shape.conv_dim : gates] = np.nan
    x[..., a : a + shape.value_heads] -= 3  # so that the ring's oldest tokens still count
    x[..., a + shape.value_heads :] = np.nan
    for row, count in enumerate(rows):
        x[row, count:] = np.nan
    keys = shape.key_heads * shape.key_dim
    x[2, :, keys : 2 * keys] = np.nan
    places = past_rows(region.num_computed, kernel - 1, window)
    conv = np.full((LAYERS, SLOTS, window, shape.conv_dim), np.nan)
    for slot, place in zip(region.slots, places, strict=True):
        if 0 < slot < SLOTS:
            conv[1, slot, place] = rng.normal(size=(kernel - 1, shape.conv_dim))
    weight = 0.5 * rng.normal(size=(kernel, shape.conv_dim))
    decay = jnp.asarray(rng.normal(size=(shape.value_heads, 2)) - 1, jnp.float32)
    x, weight, conv = (jnp.asarray(a, dtype) for a in (x, weight, conv))
    return x, GdnParams(weight, decay, heads_of(shape)), conv


def check_conv(run, shape, x_dtype, dtype, width, *, normed=None, **options):
    """`run` is the reference in what it puts out and in every element of the pools."""
    operands = conv_case(shape, x_dtype, dtype, width, **options)
    states, rows = operands[3], operands[-1]
    want, kept, *expected = conv_reference(*operands)
    norm = normed and norm_of(shape, len(rows.slots), width, normed)
    out, conv, *after = run(*operands, norm)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (conv, kept)))
    # The convolution may round to a neighbour, and what follows from it.
    eps = max(float(jnp.finfo(x).eps) for x in (x_dtype, dtype))
    loose = 2e-5 if eps < 1e-6 else 2 * eps
    compare((out, *after), (want, *expected), states, rows, width, loose, norm)


def assert_bits_are_the_same(first, others):
    """All arrays are the same to the bit, but for which NaN it is."""
    for other in others:
        for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(first), strict=True):
            # NumPy does not know bfloat16's NaN for equal.
            ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
            np.testing.assert_array_equal(ours, theirs)


def abstract_pools(shape, dtype, width, family=GDN, window=None):
    """Shapes of checkpoints and ring, for programs that are only compiled."""
    sizes = {"width": width, "slots": 33, "window": window}
    return jax.eval_shape(lambda: pools(family, jnp.zeros, shape, dtype, **sizes))


def abstract_region(rows):
    """Shapes of a region, for programs that are only compiled."""
    return DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)


def assert_one_row_table(compiled, rows):
    """All layers together have one table of the rows."""
    program = compiled.as_text()
    tables = re.findall(rf"= s32\[6,{rows}\]\S* fusion", program[program.index("ENTRY") :])
    assert len(tables) == 1
