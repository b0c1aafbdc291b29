"""Rows of every kind for the kernels that replay Gated DeltaNet, and how they are compared."""

import jax
import jax.numpy as jnp
import numpy as np
from gated_delta import int32

from jaxspec.pallas.gated_delta.replay import GdnRing
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import must_fold, ring_rows

LAYERS, SLOTS = 2, 7


def real_tokens(width):
    """How many of each row of `pools` are no padding; a NaN comes in live row 2."""
    return [width, max(1, width - 1), width, 0, 0, 0, 0, width]


def pools(rng, shape, dtype, width, rows=None):
    """Checkpoints, ring and index; NaN in all that no row may read.

    Rows: an empty ring; one that folds, of all the tokens it may have; one that just does not
    fold; padding by slot, by length, by slots that are not there; a length and a ring's length out
    of range.
    """
    rows = rows or ring_rows(width, jnp.dtype(dtype).itemsize)
    full, edge, large = rows - width, rows - 2 * width, 2**31 - 1
    index = {
        "slots": [2, 4, 6, 0, 3, 9, -1, 1],
        "num_computed": [rows + 5, 7 * rows + 3, rows - 1, -(2**31), large, -7, 5, 10**9 + 1],
        "ring_length": [0, full, edge, large, -5, 3, -(2**31), large],
        "query_len": [width, max(1, width - 1), width, width, 0, width, 2, 99],
    }

    def filled(*dims, scale):
        return (scale * rng.normal(size=(LAYERS, SLOTS, *dims))).astype(np.float32)

    states = filled(1, shape.value_heads, shape.value_dim, shape.key_dim, scale=0.3)
    k = filled(rows, shape.key_heads, shape.key_dim, scale=0.1)
    u = filled(rows, shape.value_heads, shape.value_dim, scale=0.5)
    g = -0.1 * np.abs(filled(rows, shape.value_heads, scale=1.0))
    for slot, computed, length in zip(*list(index.values())[:3], strict=True):
        if not 0 < slot < SLOTS:
            continue
        counted = [(computed - 1 - i) % rows for i in range(min(max(length, 0), full))]
        for x in (k, u, g):
            x[1, slot, np.setdiff1d(range(rows), counted)] = np.nan
    ring = GdnRing(jnp.asarray(k, dtype), jnp.asarray(u, dtype), jnp.asarray(g))
    index = [int32(*x) for x in index.values()]
    index[2] = jnp.clip(index[2], -5, large)
    return jnp.asarray(states, dtype), ring, index


def in_range(index, width, ring):
    """As the kernel takes it: no more of the ring than a step leaves."""
    return [*index[:2], jnp.clip(index[2], 0, ring.k.shape[2] - width), index[3]]


def norm_of(shape, rows, width, dtype, first=8):
    """The output norm of so many tokens; other columns than the gates are NaN."""
    rng = np.random.default_rng(width)
    features = shape.value_heads * shape.value_dim
    gates = np.full((rows * width, first + features + 4), np.nan)
    gates[:, first : first + features] = rng.normal(size=(rows * width, features))
    weight = jnp.asarray(rng.normal(size=shape.value_dim), jnp.float32)
    return GatedNorm(jnp.asarray(gates, dtype), weight, first=first, eps=1e-3)


def compare(got, want, before, index, width, loose, norm=None):
    """Outputs and pools `(out, states, ring)` are the reference's, which norms nothing.

    `before`: the checkpoints, of which only those change whose row folds.
    """
    real = real_tokens(width)
    (out, states, ring), (wanted, *expected) = got, want
    dtype = states.dtype
    eps = float(jnp.finfo(dtype).eps)
    of_pools = loose
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
        np.testing.assert_allclose(x, y, rtol=8 * eps, atol=of_pools)
    states, before = (np.asarray(x, np.float32) for x in (states, before))
    changed = (states != before).any(axis=(2, 3, 4, 5))
    length = in_range(index, width, ring)[2]
    folds = must_fold(length, width, ring.k.shape[2]) & (jnp.asarray(real) > 0)
    assert set(np.argwhere(changed)[:, 1]) == {
        int(slot) for slot, folded in zip(index[0], folds, strict=True) if folded
    }


def assert_bits_are_the_same(first, others):
    """Of all arrays, but for which NaN it is."""
    for other in others:
        for ours, theirs in zip(jax.tree.leaves(other), jax.tree.leaves(first), strict=True):
            # NumPy does not know bfloat16's NaN for equal.
            ours, theirs = (np.asarray(x, np.float32) for x in (ours, theirs))
            np.testing.assert_array_equal(ours, theirs)
