"""Rows of every kind for the kernels that replay Gated DeltaNet, and how they are compared."""

import re

import jax
import jax.numpy as jnp
import numpy as np
from gated_delta import operands, oracle
from regions import decode_region
from sm90 import array

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.ring import GdnRing
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import default_window, must_fold, next_ring_length
from jaxspec.regions import DecodeRegion

LAYERS, SLOTS = 2, 7

COMPILED_CASES = [  # shape, dtype, width, rows; with 1, 2 and 16 rows a head has 4, 2 and 1 block
    *((GDN["qwen3.5-9b"], jnp.float32, width, rows) for width in (1, 4, 8) for rows in (1, 16)),
    *((GDN["qwen3.5-9b"], jnp.float16, width, rows) for width in (1, 4, 8) for rows in (1, 16)),
    (GDN["qwen3.5-9b"], jnp.bfloat16, 4, 16),
    (GDN["qwen3.5-9b"], jnp.float32, 4, 2),
    *((GdnShape(2, 4, 64, 64), dtype, 4, 64) for dtype in (jnp.float32, jnp.float16)),
    *(
        (shape, dtype, 4, 16)
        for shape in GDN.values()
        if shape != GDN["qwen3.5-9b"]
        for dtype in (jnp.float32, jnp.float16, jnp.bfloat16)
    ),
]


def window_of(dtype):
    """The default window of a ring in this dtype."""
    return default_window(jnp.dtype(dtype).itemsize)


def empty_pools(shape, dtype=jnp.float32, *, width, window=None, slots=5, fill=0.0):
    """Checkpoints and a ring for steps of up to `width` tokens, every element `fill`."""
    window = window or window_of(dtype)
    states = (LAYERS, slots, 1, shape.value_heads, shape.value_dim, shape.key_dim)
    lead = (LAYERS, slots, window + width)
    return jnp.full(states, fill, dtype), GdnRing(
        k=jnp.full((*lead, shape.key_heads, shape.key_dim), fill, dtype),
        u=jnp.full((*lead, shape.value_heads, shape.value_dim), fill, dtype),
        g=jnp.full((*lead, shape.value_heads), fill, jnp.float32),
        window=window,
    )


def walk(run, rng, pools, widths, kept_of, *, shape, padded=False, decay=1.0):
    """Steps of these widths with rows that change places; outputs are the oracle's to 1e-5.

    `kept_of(real)`: how many of a step's `real` tokens stand. `padded`: steps may have fewer tokens
    than their width, and the others are NaN. `decay`: a factor on `g`; with a small one the oldest
    tokens of a ring still count. Returns the pools, and how often a row folded.
    """
    states, ring = pools
    slots = (1, 3, 4)
    states = states.at[1, slots, 0].set(0.0)
    true = {slot: np.zeros(states.shape[3:]) for slot in slots}
    computed, length = dict.fromkeys(slots, 5), dict.fromkeys(slots, 0)
    folds = 0
    for width in widths:
        order = rng.permutation(slots)
        query_len = rng.integers(0, width + 1, size=3) if padded else np.full(3, width)
        tokens = operands(rng, 3, width, shape=shape)
        tokens[3] *= np.float32(decay)
        for x in tokens:
            for row, real in enumerate(query_len):
                x[row, real:] = np.nan
        rows = decode_region(
            order,
            query_len,
            num_computed=[computed[slot] for slot in order],
            ring_length=[length[slot] for slot in order],
        )
        out, states, ring = run(GdnTokens(*tokens), states, ring, 1, rows)
        for row, slot in enumerate(order):
            if not (real := query_len[row]):
                continue
            expected, after = oracle(true[slot], *(x[row, :real] for x in tokens))
            np.testing.assert_allclose(out[row, :real], expected, atol=1e-5)
            kept = kept_of(real)
            new = int(next_ring_length(length[slot], kept, width, ring.window))
            folds += new < length[slot] + kept
            true[slot], computed[slot], length[slot] = after[kept - 1], computed[slot] + kept, new
    return states, ring, folds


def real_tokens(width):
    """How many of each row of `pools` are no padding; a NaN comes in live row 2."""
    return [width, max(1, width - 1), width, 0, 0, 0, 0, width]


def pools(rng, shape, dtype, width, window=None):
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
    g = -0.1 * np.abs(filled(num_rows, shape.value_heads, scale=1.0))
    for slot, computed, length in zip(slots, num_computed, ring_length, strict=True):
        if not 0 < slot < SLOTS:
            continue
        counted = [(computed - 1 - i) % num_rows for i in range(min(max(length, 0), window))]
        for x in (k, u, g):
            x[1, slot, np.setdiff1d(range(num_rows), counted)] = np.nan
    ring = GdnRing(jnp.asarray(k, dtype), jnp.asarray(u, dtype), jnp.asarray(g), window)
    rows = decode_region(slots, query_len, num_computed=num_computed, ring_length=ring_length)
    return jnp.asarray(states, dtype), ring, rows


def norm_of(shape, rows, width, dtype, first=8):
    """The output norm of so many tokens; other columns than the gates are NaN."""
    rng = np.random.default_rng(width)
    features = shape.value_heads * shape.value_dim
    gates = np.full((rows * width, first + features + 4), np.nan)
    gates[:, first : first + features] = rng.normal(size=(rows * width, features))
    weight = jnp.asarray(rng.normal(size=shape.value_dim), jnp.float32)
    return GatedNorm(jnp.asarray(gates, dtype), weight, first=first, eps=1e-3)


def compare(got, want, before, rows, width, loose, norm=None):
    """Outputs and pools `(out, states, ring)` are the reference's, which norms nothing.

    `before`: the checkpoints, of which only those change whose row folds.
    """
    real = real_tokens(width)
    (out, states, ring), (wanted, *expected) = got, want
    dtype = states.dtype
    eps = float(jnp.finfo(dtype).eps)
    pool_error = loose
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


def assert_bits_are_the_same(first, others):
    """All arrays are the same to the bit, but for which NaN it is."""
    for other in others:
        for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(first), strict=True):
            # NumPy does not know bfloat16's NaN for equal.
            ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
            np.testing.assert_array_equal(ours, theirs)


def abstract_pools(shape, dtype, width):
    """Shapes of checkpoints and ring, for programs that are only compiled."""
    return jax.eval_shape(lambda: empty_pools(shape, dtype, width=width, slots=33))


def abstract_region(rows):
    """Shapes of a region, for programs that are only compiled."""
    return DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)


def assert_one_row_table(compiled, rows):
    """All layers together have one table of the rows."""
    program = compiled.as_text()
    tables = re.findall(rf"= s32\[6,{rows}\]\S* fusion", program[program.index("ENTRY") :])
    assert len(tables) == 1
