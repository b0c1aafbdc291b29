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
_FOLDING = 0.6  # of a kernel's time; on an H200 from .45 to .75 are as good


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


def folds_spread(
    slots: Int[Array, " rows"],
    ring_length: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    width: int,
    rows: int,
) -> Int[Array, " rows"]:
    """The rows' indices in an order that keeps both a GPU's memory and its arithmetic busy.

    A fold is mostly arithmetic, any other row mostly memory: rows that fold come at equal distances
    among the others, but none in the last part, where others would have nothing left to do. Padding
    comes last. All layers of a step ask the same, and XLA answers once.
    """
    live = (slots > 0) & (query_len > 0)
    folds = live & must_fold(ring_length, width, rows)
    index = jnp.arange(slots.shape[0], dtype=jnp.int32)

    def before(some):
        return jnp.sum(some[None, :] & (index[None, :] < index[:, None]), axis=1)

    def times(some):
        """Of `some`, which share the time from 0 to 1."""
        count = jnp.maximum(jnp.sum(some), 1).astype(jnp.float32)
        return (before(some).astype(jnp.float32) + 0.5) / count

    when = jnp.where(folds, _FOLDING * times(folds), times(live & ~folds))
    when = jnp.where(live, when, 2.0)
    earlier = when[None, :] < when[:, None]
    earlier |= (when[None, :] == when[:, None]) & (index[None, :] < index[:, None])
    place = jnp.sum(earlier, axis=1)
    return jnp.sum(jnp.where(place[None, :] == index[:, None], index, 0), axis=1, dtype=jnp.int32)


def next_ring_length(
    ring_length: Int[Array, "..."], kept: Int[Array, "..."], width: int, rows: int
) -> Int[Array, "..."]:
    """`ring_length` after a step of `width` tokens of which `kept` stand."""
    return jnp.where(must_fold(ring_length, width, rows), 0, ring_length) + kept


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
