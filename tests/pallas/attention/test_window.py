"""Attention over a sliding window against float64 attention, in prompts and between rejections."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from attention import attention_oracle, decode_rows, normal, prompt_chunks

from jaxspec.pallas.attention import references
from jaxspec.pallas.attention import window as window_op
from jaxspec.pallas.attention.ring_tables import PAGE, in_pages, ring_length
from jaxspec.pallas.attention.window import window_attention, window_prefill, window_scan
from jaxspec.regions import TokenRegion

KV_HEADS, HEADS, DIM, SLOTS, WIDTH = 2, 4, 8, 4, 3
LENGTH = 200  # of each sequence
TOKENS = 140  # of a prefill

decode = jax.jit(window_attention, static_argnums=4, static_argnames="window")
prefill = jax.jit(window_prefill, static_argnums=4, static_argnames="window")


class Sequences:
    """Keys and values of one sequence per slot, and the pool with those that are computed."""

    def __init__(self, window, has_sinks=False, ring=None):
        self.rng = rng = np.random.default_rng(window)
        self.window, self.computed = window, np.zeros(SLOTS, int)
        self.keys, self.values = (normal(rng, SLOTS, LENGTH, KV_HEADS, DIM) for _ in range(2))
        ring = ring or window - 1 + WIDTH
        self.pool = jnp.full((2, SLOTS, ring, 2, KV_HEADS, DIM), jnp.nan, jnp.float32)
        self.sinks = normal(rng, HEADS) if has_sinks else None
        self.options = {"window": window, "sinks": self.sinks}

    def expected(self, slot, queries):
        keys, values, first = self.keys[slot], self.values[slot], self.computed[slot]
        return attention_oracle(queries, keys, values, first, self.window, self.sinks)

    def prefill(self, slots, lengths):
        start = np.concatenate([[0], np.cumsum(lengths)])
        queries, expected = normal(self.rng, TOKENS, HEADS, DIM), np.zeros((TOKENS, HEADS, DIM))
        keys, values = np.full((2, TOKENS, KV_HEADS, DIM), np.nan, np.float32)
        queries[start[-1] :] = np.nan
        for slot, length, first in zip(slots, lengths, start, strict=False):
            there = slice(self.computed[slot], self.computed[slot] + length)
            chunk = slice(first, first + length)
            keys[chunk], values[chunk] = self.keys[slot, there], self.values[slot, there]
            if slot and length:
                expected[chunk] = self.expected(slot, queries[chunk])
        chunks = prompt_chunks(slots, self.computed[slots], start)
        out, self.pool = prefill(queries, keys, values, self.pool, 1, chunks, **self.options)
        np.testing.assert_allclose(out, expected, atol=3e-6)
        for slot, length in zip(slots, lengths, strict=True):
            self.computed[slot] += length if slot else 0

    def decode(self, slots, query_len, accepted):
        """A verify whose drafts beyond the accepted ones are wrong, or NaN in the last row."""
        shape = len(slots), WIDTH
        queries = normal(self.rng, *shape, HEADS, DIM)
        keys, values = normal(self.rng, 2, *shape, KV_HEADS, DIM)
        expected = np.zeros(queries.shape)
        values[-1, accepted[-1] :] = keys[-1, accepted[-1] :] = np.nan
        for row, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
            there = slice(self.computed[slot], self.computed[slot] + count)
            keys[row, :count] = self.keys[slot, there]
            values[row, :count] = self.values[slot, there]
            expected[row, :count] = self.expected(slot, queries[row, :count])
        rows = decode_rows(slots, self.computed[slots], query_len)
        out, self.pool = decode(queries, keys, values, self.pool, 1, rows, **self.options)
        for row, (slot, count) in enumerate(zip(slots, accepted, strict=True)):
            if slot:
                np.testing.assert_allclose(out[row, :count], expected[row, :count], atol=3e-6)
                self.computed[slot] += count
            assert not np.asarray(out[row, query_len[row] :]).any()


@pytest.mark.few(2)
@pytest.mark.parametrize(("window", "has_sinks"), [(2, False), (5, True), (64, False), (90, True)])
def test_each_token_sees_its_window(window, has_sinks):
    """Prompts in chunks of any length, then verifies of which some drafts are rejected."""
    rows = Sequences(window, has_sinks)
    rows.prefill([1, 2, 3], [70, 1, 69])
    rows.prefill([3, 0, 2], [1, 9, 66])  # the second is padding
    rows.prefill([2, 1], [0, 3])
    for step in range(40):
        slots = np.roll([1, 2, 3, 0], step)
        most = np.array([1 + (step + slot) % WIDTH for slot in slots])
        accepted = np.array(
            [1 + (step * slot) % size for slot, size in zip(slots, most, strict=True)]
        )
        rows.decode(slots, np.where(slots, most, 0), np.where(slots, accepted, 0))
    rows.prefill([2, 3], [20, 5])  # as of a request that was preempted
    assert rows.computed[1:].min() > 100


@pytest.mark.parametrize("window", [2, 17, 90])
def test_what_the_kernel_reads_of_a_ring_is_finite(window):
    """Positions before the window, too, whose values it multiplies by 0; the pool was NaN."""
    rows = Sequences(window, ring=ring_length(window, WIDTH))
    rows.prefill([1, 2, 3], [70, 1, 69])
    rows.prefill([3, 2, 1], [1, 9, 2])
    for step in range(12):
        slots, accepted = np.array([1, 2, 3]), np.array([1, 2, 1 + step % 2])
        region = decode_rows(slots, rows.computed[slots], accepted)
        tables, region = in_pages(region, SLOTS, rows.pool.shape[2], window, WIDTH)
        pages = np.asarray(rows.pool[1]).reshape(-1, PAGE, 2, KV_HEADS, DIM)
        for row, before in enumerate(np.asarray(region.num_computed)):
            read = pages[np.asarray(tables[row + 1])].reshape(-1, 2, KV_HEADS, DIM)
            assert np.isfinite(read[:before]).all()
        rows.decode(slots, np.array([3, 3, 3]), accepted)


@pytest.mark.parametrize("at_once", [2, 3])
def test_several_tiles_at_once_give_the_same(monkeypatch, at_once):
    """As on a GPU; the last ones have no tokens."""
    monkeypatch.setattr(references, "tiles_at_once", lambda most, scores: at_once)
    anew = functools.partial(window_prefill)  # another function, so that it is traced again
    traced = jax.jit(anew, static_argnums=4, static_argnames="window")
    monkeypatch.setattr(f"{__name__}.prefill", traced)
    rows = Sequences(5)
    rows.prefill([1, 2, 3], [70, 1, 69])
    rows.prefill([3, 0, 2], [1, 9, 66])


def test_other_layers_and_slots_are_unchanged():
    rows = Sequences(5)
    rows.prefill([1], [70])
    before = np.asarray(rows.pool)
    rows.decode(np.array([2, 0]), np.array([2, 0]), np.array([2, 0]))
    after = np.asarray(rows.pool)
    np.testing.assert_array_equal(before[0], after[0])
    np.testing.assert_array_equal(before[:, [0, 1, 3]], after[:, [0, 1, 3]])


def test_a_ring_that_is_too_short_is_refused():
    rows = Sequences(5)
    rows.pool = rows.pool[:, :, 1:]
    with pytest.raises(ValueError, match="window - 1 . width = 7"):
        rows.decode(np.array([1]), np.array([1]), np.array([1]))


@pytest.mark.few(2)
@pytest.mark.parametrize("has_sinks", [False, True])
@pytest.mark.parametrize("most_read", [2000, 2**26])
def test_a_scan_attends_from_each_token_as_by_itself(monkeypatch, has_sinks, most_read):
    """A verify, a prompt longer than the ring, one token and padding; in any tiles."""
    monkeypatch.setattr(window_op, "_MOST_READ", most_read)
    window, rng = 5, np.random.default_rng(2)
    slots = [2, 2, 2, *[1] * 11, 3, 0, 9]
    positions = [7, 8, 9, *range(11), 40, 0, 3]
    live = np.array([1] * 15 + [0, 1])
    count = 15
    queries = normal(rng, len(slots), HEADS, DIM)
    keys, values = normal(rng, 2, len(slots), KV_HEADS, DIM)
    keys[count:] = values[count:] = np.nan
    pool = jnp.asarray(normal(rng, 2, SLOTS, window - 1 + WIDTH, 2, KV_HEADS, DIM))
    options = {"window": window, "sinks": normal(rng, HEADS) if has_sinks else None}
    scan = jax.jit(functools.partial(window_scan, **options))
    expected, wanted = pool, []
    for token in range(count):
        own = slice(token, token + 1)
        rows = decode_rows(slots[own], positions[own], [1])
        operands = (x[own][:, None] for x in (queries, keys, values))
        out, expected = decode(*operands, expected, 1, rows, **options)
        wanted.append(out[0, 0])
    for bounds in [(0, 17), (0, 2, 9, 13, 14, 17)]:
        after, found = pool, []
        for begin, end in itertools.pairwise(bounds):
            own = slice(begin, end)
            rows = decode_rows(slots[own], positions[own], live[own])
            region = TokenRegion.of(rows, jnp.zeros(end - begin, jnp.int32))
            operands = (jnp.asarray(x[own]) for x in (queries, keys, values))
            out, after = scan(*operands, after, 1, region)
            found.append(out)
        np.testing.assert_allclose(jnp.concatenate(found)[:count], jnp.stack(wanted), atol=1e-6)
        np.testing.assert_array_equal(after, expected)
