"""State select: the recurrent state as of the last accepted token."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def state_select(
    states: Float[Array, "layers slots candidates ..."],
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
) -> Float[Array, "rows ..."]:
    """Each row's true recurrent state of one layer, in the pool's dtype.

    A verify step writes the state after its token `t` as candidate `t`; `state_offset` says which
    is true. Slots and offsets out of range are clamped (a padding row reads some other state, and
    must not use it).
    """
    return state_select_reference(states, layer, slots, state_offset)


def state_select_reference(
    states: Float[Array, "layers slots candidates ..."],
    layer: int,
    slots: Int[Array, " rows"],
    state_offset: Int[Array, " rows"],
) -> Float[Array, "rows ..."]:
    """The specification of `state_select`, in plain JAX.

    Candidate 0 is the state after the token that was already certain; candidate `i` is the state
    after draft `i`. So three drafts with two accepted picks candidate 2:

        token      t0   d1   d2   d3
        accepted   .    yes  yes  no
        candidate  0    1   [2]   3
    """
    _, num_slots, candidates = states.shape[:3]
    # One row more than there are, the null slot's: a gather of a single row becomes a slice that
    # XLA's CPU backend fuses into every use, and then it copies the whole pool before the write.
    row = jnp.pad(jnp.clip(slots, 0, num_slots - 1), (0, 1))
    candidate = jnp.pad(jnp.clip(state_offset, 0, candidates - 1), (0, 1))
    return states[layer, row, candidate][:-1]
