"""One verify step of Mamba2 that keeps no state a token, but what replays it."""

import flax.struct
import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2_step import advance, unsupported
from jaxspec.pallas.replay import must_fold
from jaxspec.pallas.state_select import state_select_reference

_LONGEST_RING = 48  # that a block of the kernel keeps in shared memory while it folds
_States = Float[Array, "layers slots 1 heads head_dim state_dim"]


@flax.struct.dataclass
class Mamba2Ring:
    """What each token added to its slot's state: `dt x B^T` after a decay of `A dt`.

    `jaxspec.pallas.replay` says which row is whose. `x` and `b` have the checkpoint's dtype.
    """

    x: Float[Array, "layers slots ring heads head_dim"]
    b: Float[Array, "layers slots ring groups state_dim"]
    dt: Float[Array, "layers slots ring heads"]  # float32


def mamba2_replay(
    x: Float[Array, "rows width heads head_dim"],
    dt: Float[Array, "rows width heads"],
    a: Float[Array, " heads"],
    b: Float[Array, "rows width groups state_dim"],
    c: Float[Array, "rows width groups state_dim"],
    d: Float[Array, " heads"],
    states: _States,
    ring: Mamba2Ring,
    layer: int,
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    ring_length: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
) -> tuple[Float[Array, "rows width heads head_dim"], _States, Mamba2Ring]:
    """The selective state space over each row's tokens: float32 outputs, new pool, new ring.

    The rule and its operands are `mamba2_step`'s, but for what is kept. A slot's state is its
    checkpoint and the ring's tokens at `num_computed - ring_length .. num_computed - 1`; with the
    running sum `T` of their `dt`:

        S = exp(A T_P) S_0 + sum_j exp(A (T_P - T_j)) dt_j x_j B_j^T

    A row that `must_fold` writes this as its checkpoint. Its tokens `t < query_len` go to the ring
    at `num_computed + t`; the caller counts those that stand, by `next_ring_length`. `x` and `B`
    are rounded to the ring's dtype before they change a state, so that what is replayed later is
    what this step computed with. Needs `ring >= 2 * width` (ValueError). Padding rows and tokens
    write nothing, and what they put out means nothing.
    """
    width, rows_in_ring = x.shape[1], ring.x.shape[2]
    if rows_in_ring < 2 * width:
        raise ValueError(
            f"A ring must have 2 rows for each of the {width} tokens of a step, but the cache's "
            f"has {rows_in_ring}. Build the cache with ring_rows >= {2 * width}."
        )
    tokens, index = (x, dt, a, b, c, d), (slots, num_computed, ring_length, query_len)
    if dispatch.runs_kernel("mamba2_replay", _unsupported(x, states, ring)):
        # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
        from jaxspec.pallas.mamba2_replay_kernel import replay

        # On the device, so that all layers share one kernel.
        on_device = jnp.asarray(range(states.shape[0])[layer], jnp.int32)
        return replay(*tokens, states, ring, on_device, *index)
    return mamba2_replay_reference(*tokens, states, ring, layer, *index)


def mamba2_replay_reference(
    x, dt, a, b, c, d, states, ring, layer, slots, num_computed, ring_length, query_len
):
    """The specification of `mamba2_replay`: fold for itself, then one token after the other."""
    width, num_slots, rows_in_ring = x.shape[1], states.shape[1], ring.x.shape[2]
    slot = jnp.clip(slots, 0, num_slots - 1)
    # By age, the newest last: first come the rows that this step's tokens will take.
    age = jnp.arange(rows_in_ring, 0, -1, dtype=jnp.int32)[None, :]
    place = (num_computed[:, None] - age) % rows_in_ring
    old = jax.tree.map(lambda pool: pool[layer, slot[:, None], place], ring)
    checkpoint = state_select_reference(states, layer, slots, jnp.zeros_like(slots))
    start = _replayed(checkpoint, old, a, age <= ring_length[:, None])

    state, outputs, stored = start, [], (x.astype(ring.x.dtype), b.astype(ring.b.dtype))
    for t in range(width):
        x_t, b_t = (y[:, t] for y in stored)
        state, y = advance(state, x_t, dt[:, t], a, b_t, c[:, t])
        outputs.append(y + d[None, :, None] * x[:, t].astype(jnp.float32))

    live = (slots > 0) & (slots < num_slots) & (query_len > 0)
    folds = live & must_fold(ring_length, width, rows_in_ring)
    target = jnp.where(folds, slots, num_slots)
    states = states.at[layer, target, 0].set(start.astype(states.dtype), mode="drop")
    real = jnp.arange(width, dtype=jnp.int32)[None, :] < query_len[:, None]
    target = jnp.where(live, slots, num_slots)[:, None]

    def append(pool, new, old):
        # Padding tokens write what was there: what is written hangs on what was read, so that it
        # is read before and XLA need not copy the ring.
        new = jnp.where(_like(real, new), new.astype(pool.dtype), old[:, :width])
        return pool.at[layer, target, place[:, :width]].set(new, mode="drop")

    ring = jax.tree.map(append, ring, Mamba2Ring(x, b, dt), old)
    return jnp.stack(outputs, axis=1), states, ring


def _replayed(
    checkpoint: Float[Array, "rows heads head_dim state_dim"],
    tokens: Mamba2Ring,
    a: Float[Array, " heads"],
    counts: Bool[Array, "rows tokens"],
) -> Float[Array, "rows heads head_dim state_dim"]:
    """Each row's checkpoint with the tokens that count added, in float32."""

    def take(y):
        return jnp.where(_like(counts, y), y.astype(jnp.float32), 0.0)

    x, b, dt = take(tokens.x), take(tokens.b), take(tokens.dt)
    b = jnp.repeat(b, x.shape[2] // b.shape[2], axis=2)
    # Sums of what comes after each token, not differences: those lose what follows a strong decay.
    after = jnp.pad(dt[:, 1:], ((0, 0), (0, 1), (0, 0)))
    after = jnp.cumsum(after[:, ::-1], axis=1)[:, ::-1]
    whole = jnp.exp(a[None] * jnp.sum(dt, axis=1))[..., None, None]
    weight = jnp.exp(a[None, None] * after) * dt
    added = jnp.einsum("rwh,rwhp,rwhn->rhpn", weight, x, b, precision="highest")
    return whole * checkpoint.astype(jnp.float32) + added


def _like(mask, y):
    """`mask` with as many dimensions as `y`."""
    return mask.reshape(*mask.shape, *(1,) * (y.ndim - mask.ndim))


def _unsupported(x, states, ring):
    """Why the kernel does not take these operands, or None."""
    if ring.x.shape[2] > _LONGEST_RING:
        return f"a ring of {ring.x.shape[2]} rows, more than {_LONGEST_RING}"
    return unsupported(x, states)
