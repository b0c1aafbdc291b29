"""Replay of recurrent states: where a token's factors lie in the ring, and when the ring is folded.

Instead of a state after every token, a slot keeps one checkpoint and, in a ring, what each token
since then added to it. The token at position `p` of its request lies in row `p % ring_rows`. Of the
tokens before `num_computed` the last `ring_length` are not in the checkpoint yet. Accepting drafts
is counting them in; what was rejected is not counted, hence never read, and overwritten by whatever
comes to stand at its position.

A step whose tokens might not fit into the ring's window folds first: it adds the ring's tokens to
the checkpoint. Every row decides that for itself on the device, so the host need not know. With 8
rows and 3 tokens a step:

    num_computed  ring_length  folds       writes rows  kept
    10            0            no          2, 3, 4      2
    12            2            no          4, 5, 6      3
    15            5            10 .. 14    7, 0, 1      1
    16            1            no          0, 1, 2      …

"ReplaySSM" (Dao AI Lab and NVIDIA, 2026) does so for Mamba2, with a host that knows the counts.
"""

import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float, Int

_WINDOWS = {4: 32, 2: 16}  # the usual ones, by bytes of a state's element
_FOLDING = 3, 5  # of a kernel's time 3/5; .3 to .75 took an H200 as long or up to 6% longer


def ring_rows(width: int, itemsize: int, window: int | None = None) -> int:
    """Rows of a ring for steps of `width` tokens that keep `window` between them.

    The usual window balances what every step reads of the ring against how often it writes the
    state. Behind it, `width` rows that a step can write while other blocks still read the window.
    """
    return (_WINDOWS[itemsize] if window is None else window) + width


def check_ring(width: int, rows: int) -> None:
    """Refuse a ring too small for steps of `width` tokens.

    Raises:
        ValueError: fewer than 2 rows a token.
    """
    if rows < 2 * width:
        raise ValueError(
            f"A ring must have 2 rows for each of the {width} tokens of a step, but the cache's "
            f"has {rows}. Build the cache with ring_rows >= {2 * width}."
        )


def must_fold(ring_length: Int[Array, "..."], width: int, rows: int) -> Bool[Array, "..."]:
    """Whether a step of `width` tokens folds: behind the ring's they might not fit its window."""
    return ring_length > rows - 2 * width


def places(live: Bool[Array, " rows"], folds: Bool[Array, " rows"]) -> Int[Array, " rows"]:
    """Each row's place in an order that keeps both a GPU's memory and its arithmetic busy.

    A fold is mostly arithmetic, any other row mostly memory: live rows that fold come at equal
    distances among the others, but none in the last part, where others would have nothing left to
    do. Those that are not live come last.

    Fold `i` of `f` comes at `(2 i + 1) / (2 f)` of that part, other row `j` of `n` at
    `(2 j + 1) / (2 n)` of all. Nothing is sorted, which would take XLA many kernels: how many of
    the others come before follows from these fractions, compared as whole numbers.
    """
    index = jnp.arange(live.shape[0], dtype=jnp.int32)
    folds = live & folds

    def before(some):
        return jnp.sum(some[None, :] & (index[None, :] < index[:, None]), axis=1, dtype=jnp.int32)

    part, whole = _FOLDING
    fold, row = before(folds), before(live)
    num_folds = fold[-1] + folds[-1].astype(jnp.int32)
    num_live = row[-1] + live[-1].astype(jnp.int32)
    other = row - fold
    fold_unit, other_unit = part * (num_live - num_folds), jnp.maximum(whole * num_folds, 1)
    # `2 j + 1 < x` for as many `j` as half of `x` rounded up, and `2 i + 1 <= x` for half of one
    # more than `x` rounded down.
    others_before = ((2 * fold + 1) * fold_unit + other_unit - 1) // other_unit // 2
    folds_before = ((2 * other + 1) * other_unit // jnp.maximum(fold_unit, 1) + 1) // 2
    place = jnp.where(folds, fold + others_before, other + jnp.minimum(folds_before, num_folds))
    return jnp.where(live, place, num_live + index - row)


def asked_rows(
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    ring_length: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    num_slots: int,
    width: int,
    rows: int,
    *,
    at_once: bool,
    conv_rows: int = 1,
) -> Int[Array, "6 rows"]:
    """What a kernel's block asks of its row, in bounds and in the order of the blocks.

    Its index, its slot or 0, where its ring begins, how many of the ring and of its tokens count,
    and where its convolution's ring of `conv_rows` begins. All layers of a step ask the same, and
    XLA answers once. `at_once`: all blocks begin together.
    """
    live = (slots > 0) & (slots < num_slots) & (query_len > 0)
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)
    columns = (
        index,
        jnp.where(live, slots, 0),
        lax.rem(jnp.maximum(num_computed, 0), rows),
        jnp.clip(ring_length, 0, rows - width),
        jnp.clip(query_len, 0, width),
        lax.rem(jnp.maximum(num_computed, 0), conv_rows),
    )
    asked = jnp.stack(columns)
    if at_once:
        return asked
    place = places(live, must_fold(columns[3], width, rows))
    # A sum of one: XLA makes a gather of each column a kernel.
    chosen = place[None, :] == index[:, None]
    return jnp.sum(jnp.where(chosen[None], asked[:, None, :], 0), axis=2, dtype=jnp.int32)


def next_ring_length(
    ring_length: Int[Array, "..."], kept: Int[Array, "..."], width: int, window: int
) -> Int[Array, "..."]:
    """`ring_length` after a step of `width` tokens of which `kept` stand."""
    return jnp.where(must_fold(ring_length, width, window + width), 0, ring_length) + kept


def as_kept(x: Float[Array, "..."], dtype: jnp.dtype) -> Float[Array, "..."]:
    """`x` in float32, rounded to the `dtype` of a ring.

    On a GPU XLA takes a cast there and back for nothing (`xla_allow_excess_precision`), and a step
    would compute with other numbers than those that are replayed later.
    """
    if x.dtype == dtype:
        return x.astype(jnp.float32)
    return lax.optimization_barrier(x.astype(dtype)).astype(jnp.float32)


def sums_after(x: Float[Array, "rows tokens heads"]) -> Float[Array, "rows tokens heads"]:
    """Of each token, the sum of those after it.

    Sums, not differences of sums: those lose what follows a strong decay.
    """
    after = jnp.pad(x[:, 1:], ((0, 0), (0, 1), (0, 0)))
    return jnp.cumsum(after[:, ::-1], axis=1)[:, ::-1]
