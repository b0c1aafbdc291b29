"""Replay ring of recurrent states: the row of each token, and when a step folds the ring.

Instead of a state after every token, a slot stores one replay base (an older state) and, in a ring,
the factors that each token since then added to it. The token at position `p` of its request is in
row `p % ring_rows`. The last `ring_length` tokens before `num_computed` are not part of the replay
base yet. Accepting drafts means counting them in both numbers. Rejected drafts are not counted, so
they are never read, and later tokens overwrite them.

A ring keeps at most `window` tokens between steps. If the tokens of a step might not fit into the
window, the step first folds: it adds the ring's tokens to the replay base. Each row decides this on
the device, so the host need not keep the counts. The window is a property of the ring and not of a
step, because programs of several widths share a ring. A ring has `window` rows plus one for each
token of the widest step, so that no step writes a row that it reads. For example, with a window of
5 in 8 rows, and steps of 3 tokens or 1:

    num_computed  ring_length  tokens  folds       writes rows  kept
    10            0            3       no          2, 3, 4      2
    12            2            3       no          4, 5, 6      3
    15            5            3       10 .. 14    7, 0, 1      1
    16            1            3       no          0, 1, 2      3
    19            4            1       no          3            1
    20            5            1       15 .. 19    4            …

"ReplaySSM" (Dao AI Lab and NVIDIA, 2026) replays Mamba2 like this, with the counts on the host.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.regions import DecodeRegion, real_tokens

_DEFAULT_WINDOWS = {4: 32, 2: 16}  # by bytes per element of a state
# Rows that fold start within the first 3/5 of a launch. On an H200, any share from .3 to .75 takes
# the same time or up to 6% longer.
_FOLD_SHARE = 3, 5


def default_window(itemsize: int) -> int:
    """Return the default window of a ring, in tokens, for states with `itemsize` bytes per element.

    It balances the bytes of the ring that each step reads against how often a step folds.
    """
    return _DEFAULT_WINDOWS[itemsize]


def check_ring(width: int, window: int, rows: int) -> None:
    """Check that a ring with this window and number of rows fits steps of `width` tokens.

    Raises:
        ValueError: The window is narrower than a step, or the ring lacks rows for window and step.
    """
    if window < width:
        raise ValueError(
            f"A ring's window must hold the {width} tokens of a step, but this ring's holds "
            f"{window}. Allocate the pool with a window of at least {width}."
        )
    if rows < window + width:
        raise ValueError(
            f"A ring must have a row for each of the {window} tokens of its window and the {width} "
            f"of a step, but this one has {rows} rows. Build it with at least {window + width}."
        )


def must_fold(ring_length: Int[Array, "..."], width: int, window: int) -> Bool[Array, "..."]:
    """Return whether a step of `width` tokens folds: ring and step might exceed the window."""
    return ring_length > window - width  # a sum could overflow: padding has any `ring_length`


def next_ring_length(
    ring_length: Int[Array, "..."], kept: Int[Array, "..."], width: int, window: int
) -> Int[Array, "..."]:
    """Return `ring_length` after a step of `width` tokens, of which `kept` count."""
    return jnp.where(must_fold(ring_length, width, window), 0, ring_length) + kept


def ring_writer(
    ring: Any, layer: int, rows: DecodeRegion, live: Bool[Array, " rows"], width: int
) -> Callable[[Array, Array], Array]:
    """Return `append(pool, new)`, which stores a step's real tokens in one array of the ring."""
    num_slots = jax.tree.leaves(ring)[0].shape[1]
    token = jnp.arange(width, dtype=jnp.int32)[None, :]
    ring_row = (rows.num_computed[:, None] + token) % ring.num_rows
    is_real = live[:, None] & real_tokens(rows.query_len, width)
    target = jnp.where(is_real, rows.slots[:, None], num_slots)
    return lambda pool, new: pool.at[layer, target, ring_row].set(
        new.astype(pool.dtype), mode="drop"
    )


def ring_reader(ring: Any, layer: int, rows: DecodeRegion) -> Callable[[Array], Array]:
    """Return `gather(pool)`: one array of the ring by age, float32 `[rows, ring, ...]`.

    The newest token is last. Tokens that do not count, of age `ring_length` or more, are 0.
    """
    num_slots, num_rows = jax.tree.leaves(ring)[0].shape[1], ring.num_rows
    slot = jnp.clip(rows.slots, 0, num_slots - 1)
    age = jnp.arange(num_rows, 0, -1, dtype=jnp.int32)[None, :]
    ring_row = (rows.num_computed[:, None] - age) % num_rows
    # Rows older than the window are written by this step.
    counts = age <= jnp.minimum(rows.ring_length, ring.window)[:, None]
    # One extra row, for the reason given in `state_select_reference`.
    slot_and_null, ring_row = jnp.pad(slot, (0, 1))[:, None], jnp.pad(ring_row, ((0, 1), (0, 0)))

    def gather(pool):
        found = pool[layer, slot_and_null, ring_row][:-1].astype(jnp.float32)
        return jnp.where(counts.reshape(*counts.shape, *(1,) * (found.ndim - 2)), found, 0.0)

    return gather


def write_folded(
    states: Array, start: Array, folds: Bool[Array, " rows"], layer: int, rows: DecodeRegion
) -> Array:
    """Return the pool with `start`, the state before the step, as replay base of rows that fold."""
    slot = jnp.where(folds, rows.slots, states.shape[1])
    return states.at[layer, slot, 0].set(start.astype(states.dtype), mode="drop")


class RowTable(NamedTuple):
    """Scalars that a block reads about its row. As an array, the table has one row per field."""

    row: Any  # index in the decode region
    slot: Any  # state slot; 0 means that the row is padding
    ring_start: Any  # ring row of the step's first token
    ring_length: Any  # number of ring tokens that count, 0 .. window
    num_tokens: Any  # number of real tokens in the step, 0 .. width
    conv_start: Any  # row in the convolution's ring of the step's first input

    @staticmethod
    def read(table: Any, block: Any) -> "RowTable":
        return RowTable(*(table[i, block] for i in range(len(RowTable._fields))))


def row_table(
    rows: DecodeRegion,
    num_slots: int,
    width: int,
    window: int,
    ring_rows: int,
    *,
    in_one_wave: bool,
    conv_rows: int = 1,
) -> Int[Array, "6 rows"]:
    """Return the `RowTable` of a launch as an array: one column per row, all entries in range.

    Columns are in launch order (`launch_order`); with `in_one_wave`, where all blocks start
    together, they are in the order of the rows. `conv_rows` is the number of rows of the
    convolution's ring. All layers of a step have the same table, so XLA computes it once.
    """
    live = rows.is_live(num_slots)
    index = jnp.arange(rows.slots.shape[0], dtype=jnp.int32)
    position = jnp.maximum(rows.num_computed, 0)
    table = RowTable(
        row=index,
        slot=jnp.where(live, rows.slots, 0),
        ring_start=lax.rem(position, ring_rows),
        ring_length=jnp.clip(rows.ring_length, 0, window),
        num_tokens=jnp.clip(rows.query_len, 0, width),
        conv_start=lax.rem(position, conv_rows),
    )
    columns = jnp.stack(table)
    if in_one_wave:
        return columns
    order = launch_order(live, must_fold(table.ring_length, width, window))
    # A sum with a single term: XLA would turn a gather of each field into a separate kernel.
    chosen = order[None, :] == index[:, None]
    return jnp.sum(jnp.where(chosen[None], columns[:, None, :], 0), axis=2, dtype=jnp.int32)


def launch_order(live: Bool[Array, " rows"], folds: Bool[Array, " rows"]) -> Int[Array, " rows"]:
    """Return each row's position in a launch order that keeps memory and arithmetic units busy.

    A fold is mostly arithmetic, any other row mostly memory traffic. Live rows that fold are hence
    spaced evenly among the plain ones, except in the last part of the launch, where no plain rows
    would be left to overlap with a fold. Rows that are not live are last.

    Fold `i` of `f` is placed at `(2 i + 1) / (2 f)` of the first part, plain row `j` of `n` at
    `(2 j + 1) / (2 n)` of the whole. Sorting the rows would take XLA many kernels; comparing these
    fractions as integers gives the number of rows of the other kind before each row.
    """
    index = jnp.arange(live.shape[0], dtype=jnp.int32)
    folds = live & folds

    def num_before(mask):
        return jnp.sum(mask[None, :] & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)

    part, whole = _FOLD_SHARE
    fold, row = num_before(folds), num_before(live)
    num_folds = fold[-1] + folds[-1].astype(jnp.int32)
    num_live = row[-1] + live[-1].astype(jnp.int32)
    plain = row - fold
    fold_unit, plain_unit = part * (num_live - num_folds), jnp.maximum(whole * num_folds, 1)
    # `2 j + 1 < x` holds for `ceil(x) // 2` values of `j`, and `2 i + 1 <= x` for
    # `(floor(x) + 1) // 2` values of `i`.
    plain_before = ((2 * fold + 1) * fold_unit + plain_unit - 1) // plain_unit // 2
    folds_before = ((2 * plain + 1) * plain_unit // jnp.maximum(fold_unit, 1) + 1) // 2
    order = jnp.where(folds, fold + plain_before, plain + jnp.minimum(folds_before, num_folds))
    return jnp.where(live, order, num_live + index - row)


def rounded_to(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """Round `x` to the `dtype` of a ring, and return it as float32.

    A step must compute with the numbers that are replayed later. On a GPU, XLA removes a cast there
    and back (`xla_allow_excess_precision`) unless an optimization barrier separates the two.
    """
    if x.dtype == dtype:
        return x.astype(jnp.float32)
    return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def sums_after(x: Float[Array, "rows tokens heads"]) -> Float[Array, "rows tokens heads"]:
    """Return for each token the sum over the tokens after it.

    A difference of running sums would lose the digits of the terms after a strong decay. XLA's GPU
    compiler fails where it fuses `cumsum` with another sum (JAX 0.11.2), so the sums are masked.
    """
    token = jnp.arange(x.shape[1])
    is_after = token[None, :] > token[:, None]
    return jnp.sum(jnp.where(is_after[None, :, :, None], x[:, None], 0.0), axis=2)
