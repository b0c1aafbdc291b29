"""One verify step of Mamba2 that keeps no state a token, but what replays it."""

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.step import advance, why_not_kernel
from jaxspec.pallas.recurrent.replay import as_kept, check_ring, must_fold, sums_after
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.regions import DecodeRegion

_States = Float[Array, "layers slots 1 heads head_dim state_dim"]


@flax.struct.dataclass
class Mamba2Ring:
    """What each token added to its slot's state: `dt x B^T` after a decay of `A dt`.

    `recurrent.replay` says which row is whose. `x` and `b` have the checkpoint's dtype.
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
    check_ring(x.shape[1], ring.x.shape[2])
    tokens, index = (x, dt, a, b, c, d), (slots, num_computed, ring_length, query_len)
    if dispatch.runs_kernel("mamba2_replay", _unsupported(x, states, ring)):
        # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
        from jaxspec.pallas.mamba2.replay_kernel import replay

        on_device = dispatch.layer_index(states, layer)
        return replay(*tokens, states, ring, on_device, *index)
    return mamba2_replay_reference(*tokens, states, ring, layer, *index)


def mamba2_replay_reference(
    x, dt, a, b, c, d, states, ring, layer, slots, num_computed, ring_length, query_len
):
    """The specification of `mamba2_replay`: fold for itself, then one token after the other."""
    width, num_slots, rows_in_ring = x.shape[1], states.shape[1], ring.x.shape[2]
    live = (slots > 0) & (slots < num_slots) & (query_len > 0)
    token = jnp.arange(width, dtype=jnp.int32)[None, :]
    place = (num_computed[:, None] + token) % rows_in_ring
    target = jnp.where(live[:, None] & (token < query_len[:, None]), slots[:, None], num_slots)

    def append(pool, new):
        return pool.at[layer, target, place].set(new.astype(pool.dtype), mode="drop")

    # Before the ring is read, which only this step's rows do not matter to: XLA would copy it.
    ring = Mamba2Ring(append(ring.x, x), append(ring.b, b), append(ring.dt, dt))
    start = _replayed(states, ring, a, layer, slots, num_computed, ring_length)

    state, outputs, stored = start, [], (as_kept(x, ring.x.dtype), as_kept(b, ring.b.dtype))
    for t in range(width):
        x_t, b_t = (y[:, t] for y in stored)
        state, y = advance(state, x_t, dt[:, t], a, b_t, c[:, t])
        outputs.append(y + d[None, :, None] * x[:, t].astype(jnp.float32))

    folds = live & must_fold(ring_length, width, rows_in_ring)
    target_slot = jnp.where(folds, slots, num_slots)
    states = states.at[layer, target_slot, 0].set(start.astype(states.dtype), mode="drop")
    return jnp.stack(outputs, axis=1), states, ring


def _replayed(
    states: _States,
    ring: Mamba2Ring,
    a: Float[Array, " heads"],
    layer: int,
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    ring_length: Int[Array, " rows"],
) -> Float[Array, "rows heads head_dim state_dim"]:
    """Each row's state: its checkpoint, and the ring's tokens added, in float32."""
    group, rows_in_ring = ring.x.shape[3] // ring.b.shape[3], ring.x.shape[2]
    slot = jnp.clip(slots, 0, states.shape[1] - 1)
    # By age, the newest last; what lies beyond `ring_length` may hold anything.
    age = jnp.arange(rows_in_ring, 0, -1, dtype=jnp.int32)[None, :]
    place = (num_computed[:, None] - age) % rows_in_ring
    counts = age <= ring_length[:, None]

    def take(pool):
        taken = pool[layer, slot[:, None], place].astype(jnp.float32)
        return jnp.where(counts.reshape(*counts.shape, *(1,) * (taken.ndim - 2)), taken, 0.0)

    x, b, dt = take(ring.x), jnp.repeat(take(ring.b), group, axis=2), take(ring.dt)
    after = sums_after(dt)
    whole = jnp.exp(a[None] * jnp.sum(dt, axis=1))[..., None, None]
    weight = jnp.exp(a[None, None] * after) * dt
    checkpoint = state_select_reference(states, layer, DecodeRegion(*[slots] * 5))
    added = jnp.einsum("rwh,rwhp,rwhn->rhpn", weight, x, b, precision="highest")
    return whole * checkpoint.astype(jnp.float32) + added


def _unsupported(x, states, ring):
    """Why the kernel does not take these operands, or None."""
    window = ring.x.shape[2] - x.shape[1]
    if window > 64:
        return f"a ring that holds {window} tokens, more than 64"
    return why_not_kernel(x, states)
