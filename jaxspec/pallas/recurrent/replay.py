"""Replay of recurrent states: where a token's factors lie in the ring, and when the ring is folded.

Instead of a state after every token, a slot keeps one checkpoint and, in a ring, what each token
since then added to it. The token at position `p` of its request lies in row `p % ring_rows`. The
last `ring_length` tokens before `num_computed` are not in the checkpoint yet. To accept drafts is
to count them in. What was rejected is not counted, hence never read, and later tokens overwrite it.

A ring keeps at most `window` tokens between steps. A step whose tokens might not fit into the
window folds first: it adds the ring's tokens to the checkpoint. Every row decides that for itself
on the device, so the host need not know. The window belongs to the ring and not to a step, because
programs of several widths share a ring. A ring has `window` rows, and one more for each token of
the widest step, so that no step writes a row that it reads. An example is a window of 5, in 8 rows,
and steps of 3 tokens or 1:

    num_computed  ring_length  tokens  folds       writes rows  kept
    10            0            3       no          2, 3, 4      2
    12            2            3       no          4, 5, 6      3
    15            5            3       10 .. 14    7, 0, 1      1
    16            1            3       no          0, 1, 2      3
    19            4            1       no          3            1
    20            5            1       15 .. 19    4            …

"ReplaySSM" (Dao AI Lab and NVIDIA, 2026) replays Mamba2 so, but its host knows the counts.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

from jaxspec.regions import DecodeRegion

_DEFAULT_WINDOWS = {4: 32, 2: 16}  # by bytes of a state's element
# Rows that fold start within the first 3/5 of a launch. An H200 takes as long with any share from
# .3 to .75, or up to 6% longer.
_FOLD_SHARE = 3, 5


def default_window(itemsize: int) -> int:
    """Tokens that a ring keeps between steps, for states whose elements have `itemsize` bytes.

    It balances what every step reads of the ring against how often a step writes the state.
    """
    return _DEFAULT_WINDOWS[itemsize]


def check_ring(width: int, window: int, rows: int) -> None:
    """Check that a ring of so many rows fits steps of `width` tokens.

    Raises:
        ValueError: the window is narrower than a step, or the rows behind it are too few.
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
    """Whether a step of `width` tokens folds: behind the ring's they might not fit its window."""
    return ring_length > window - width  # a sum could overflow: padding has any `ring_length`


def next_ring_length(
    ring_length: Int[Array, "..."], kept: Int[Array, "..."], width: int, window: int
) -> Int[Array, "..."]:
    """`ring_length` after a step of `width` tokens of which `kept` stand."""
    return jnp.where(must_fold(ring_length, width, window), 0, ring_length) + kept


class RowTable(NamedTuple):
    """What a block reads about its row. As an array, the table has these fields as its rows."""

    row: Any  # index in the decode rectangle
    slot: Any  # request slot; 0: the row is padding
    ring_start: Any  # row of the ring for the step's first token
    ring_length: Any  # tokens of the ring that count, 0 .. window
    num_tokens: Any  # real tokens of the step, 0 .. width
    conv_start: Any  # row of the convolution's ring for the step's first input

    @staticmethod
    def read(table: Any, block: Any) -> "RowTable":
        """The scalars of block `block`, from a table in memory."""
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
    """The `RowTable` of a launch as an array: every entry in bounds, a column for each block.

    Columns are in the order in which blocks start, or `in_one_wave`, where all start together, in
    the order of the rows. A convolution's ring has `conv_rows` rows. The layers of a step have the
    same table, and XLA makes it once.
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
    # This is a sum with one term, because XLA would make a gather of each field a kernel.
    chosen = order[None, :] == index[:, None]
    return jnp.sum(jnp.where(chosen[None], columns[:, None, :], 0), axis=2, dtype=jnp.int32)


def launch_order(live: Bool[Array, " rows"], folds: Bool[Array, " rows"]) -> Int[Array, " rows"]:
    """Each row's position in an order that keeps both a GPU's memory and its arithmetic busy.

    A fold is mostly arithmetic, any other row mostly memory. So live rows that fold are spaced
    evenly among the plain ones, but for a last part, where nothing would be left to run beside a
    fold. Rows that are not live come last.

    Fold `i` of `f` comes at `(2 i + 1) / (2 f)` of the first part, plain row `j` of `n` at
    `(2 j + 1) / (2 n)` of the whole. No row is sorted, which would take XLA many kernels: these
    fractions, compared as whole numbers, say how many rows of the other kind come before.
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
    # `2 j + 1 < x` for as many `j` as half of `x` rounded up, and `2 i + 1 <= x` for half of one
    # more than `x` rounded down.
    plain_before = ((2 * fold + 1) * fold_unit + plain_unit - 1) // plain_unit // 2
    folds_before = ((2 * plain + 1) * plain_unit // jnp.maximum(fold_unit, 1) + 1) // 2
    order = jnp.where(folds, fold + plain_before, plain + jnp.minimum(folds_before, num_folds))
    return jnp.where(live, order, num_live + index - row)


def rounded_to(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """`x` in float32, rounded to the `dtype` of a ring.

    A step must compute with the numbers that are replayed later. On a GPU XLA drops a cast there
    and back (`xla_allow_excess_precision`), unless a barrier stands between the two.
    """
    if x.dtype == dtype:
        return x.astype(jnp.float32)
    return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def sums_after(x: Float[Array, "rows tokens heads"]) -> Float[Array, "rows tokens heads"]:
    """For each token, the sum over the tokens after it.

    A difference of running sums would lose what follows a strong decay.
    """
    after = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return jnp.cumsum(after[:, ::-1], axis=1)[:, ::-1]
