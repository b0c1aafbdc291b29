"""No step writes a row of the ring that it reads; what blocks read about their rows."""

import re
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sm90 import array, compile_for

from jaxspec.pallas.recurrent.replay import (
    RowTable,
    default_window,
    launch_order,
    must_fold,
    next_ring_length,
    rounded_to,
    row_table,
    sums_after,
)
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes


@pytest.mark.few(9)
@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("widest", range(1, 10))
@pytest.mark.parametrize("mixed", [False, True])
def test_what_a_step_writes_it_does_not_read(widest, itemsize, mixed):
    """Any acceptance, and any widths, for as long as it takes to go round the ring many times."""
    rng, window = np.random.default_rng(widest), default_window(itemsize)
    num_rows = window + widest
    num_computed, length, longest, folds = 7, 0, 0, 0
    for _ in range(500):
        width = int(rng.integers(1, widest + 1)) if mixed else widest
        read = {p % num_rows for p in range(num_computed - length, num_computed)}
        written = {p % num_rows for p in range(num_computed, num_computed + width)}
        assert len(read) == length and len(written) == width and not read & written
        folds += bool(must_fold(length, width, window))
        kept = int(rng.integers(1, width + 1))
        length = int(next_ring_length(length, kept, width, window))
        num_computed, longest = num_computed + kept, max(longest, length)
    assert window - widest < longest <= window  # the window gets used
    assert folds > 5


def test_the_example_of_the_docstring():
    """A window of 5: a ring of 5 folds, and what that step kept stays in it."""
    steps = [(0, 3, 2), (2, 3, 3), (5, 3, 1), (1, 3, 3), (4, 1, 1), (5, 1, 1)]
    folds = [bool(must_fold(length, width, 5)) for length, width, _ in steps]
    assert folds == [False, False, True, False, False, True]
    lengths = [int(next_ring_length(length, kept, width, 5)) for length, width, kept in steps]
    assert lengths == [2, 5, 1, 4, 5, 1]


def test_rows_that_fold_come_among_the_others_and_padding_last():
    live = np.array([1, 0, 1, 1, 0, 1, 0], bool)
    folds = np.array([0, 1, 1, 0, 1, 1, 1], bool)
    order = launch_order(live, folds)
    assert np.argsort(order).tolist() == [2, 0, 5, 3, 1, 4, 6]
    assert order.dtype == np.int32


def by_fractions(live, folds):
    """The rows in the order of `launch_order`, by sorting."""
    folds = live & folds
    when = []
    for row in range(len(live)):
        alike = folds if folds[row] else live & ~folds
        at = Fraction(int(2 * alike[:row].sum() + 1), int(2 * alike.sum()) or 1)
        share = Fraction(3, 5) if folds[row] else 1
        when.append((not live[row], at * share if live[row] else 0, not folds[row], row))
    return [row for *_, row in sorted(when)]


@pytest.mark.few(12)
@pytest.mark.parametrize("count", [1, 2, 7, 64, 1024])
@pytest.mark.parametrize("folding", [0, 0.2, 0.5, 1])
@pytest.mark.parametrize("padding", [0, 0.3, 1])
def test_the_launch_order_is_that_of_a_sorted_list(count, folding, padding):
    rng = np.random.default_rng(count)
    live, folds = rng.random(count) >= padding, rng.random(count) < folding
    order = np.asarray(launch_order(live, folds))
    assert sorted(order) == list(range(count))
    assert np.argsort(order).tolist() == by_fractions(live, folds)


@pytest.mark.parametrize("in_one_wave", [True, False])
@pytest.mark.parametrize("count", [1, 8, 200])
def test_what_a_block_reads_of_its_row_is_in_bounds(count, in_one_wave):
    """For padding, slots that are not there, and counts out of range, too."""
    rng, slots, width, large = np.random.default_rng(count), 9, 3, 2**31 - 1
    window, ring_rows, conv_rows = 8, 12, 7

    def draw(*values):
        return rng.choice(np.asarray(values, np.int32), count)

    rows = DecodeRegion(
        slots=draw(*range(slots), slots, -1, large, -large - 1),
        num_computed=draw(0, 1, 10, 11, 12, 10**9, large, -1, -large - 1),
        query_len=draw(*range(width + 1), 99, -1),
        state_offset=draw(0),
        ring_length=draw(*range(ring_rows), large, -1, -large - 1),
    )
    fields = rows.slots, rows.num_computed, rows.query_len, rows.ring_length
    expected, live, folds = [], [], []
    for row, (slot, computed, tokens, length) in enumerate(zip(*fields, strict=True)):
        live.append(0 < slot < slots and tokens > 0)
        length = min(max(length, 0), window)
        folds.append(length > 5)
        position = max(computed, 0)
        entry = RowTable(
            row=row,
            slot=slot if live[row] else 0,
            ring_start=position % ring_rows,
            ring_length=length,
            num_tokens=min(max(tokens, 0), width),
            conv_start=position % conv_rows,
        )
        expected.append(entry)
    order = range(count) if in_one_wave else by_fractions(np.asarray(live), np.asarray(folds))
    table = jax.jit(
        row_table, static_argnums=(1, 2, 3, 4), static_argnames=("in_one_wave", "conv_rows")
    )(rows, slots, width, window, ring_rows, in_one_wave=in_one_wave, conv_rows=conv_rows)
    assert table.dtype == np.int32
    np.testing.assert_array_equal(table, np.transpose([expected[row] for row in order]))
    assert RowTable.read(np.asarray(table), 0) == expected[order[0]]


def test_what_a_ring_keeps_is_rounded_on_a_gpu_too(h200, monkeypatch):
    """There XLA drops a cast there and back."""

    def conversions(step):
        program = compile_for(h200, monkeypatch, step, (array(64, 128),)).as_text()
        return len(re.findall(r" convert\(", program))

    assert conversions(lambda x: x * rounded_to(x, jnp.bfloat16)) == 2
    assert conversions(lambda x: x * x.astype(jnp.bfloat16).astype(jnp.float32)) == 0


def test_the_sums_after_each_token():
    x = np.random.default_rng(0).normal(size=(3, 7, 2)).astype(np.float32)
    expected = [x[:, token + 1 :].sum(1) for token in range(7)]
    np.testing.assert_allclose(sums_after(jnp.asarray(x)), np.stack(expected, 1), atol=1e-6)


def test_sums_after_each_token_compile_beside_other_sums(h200, monkeypatch):
    """With `cumsum`, XLA's compiler refused the decoding steps of Falcon-H1 on a GPU."""

    def step(ring):
        x = ring.transpose(0, 2, 1)
        return (jnp.exp(sums_after(x)) * x).transpose(0, 2, 1), x.sum(1)

    compile_for(h200, monkeypatch, step, (array(64, 48, 36),))
