"""State selection: the recurrent state after the last accepted token."""

import math

import jax.numpy as jnp
from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.regions import DecodeRegion, PrefillRegion

_States = Float[Array, "layers slots candidates ..."]


def state_select(
    states: _States, layer: int, rows: DecodeRegion | PrefillRegion
) -> Float[Array, "rows ..."]:
    """Return each row's current recurrent state of one layer, in the pool's dtype.

    A verify step writes the state after its token `t` as candidate `t`; `state_offset` is the
    candidate after the last accepted token. Slots and offsets out of range are clamped: a padding
    row reads another slot's state, and must not use it.
    """
    why, num_rows = _why_not_kernel(states), rows.slots.shape[0]
    by_choice = states.dtype == jnp.float32
    if dispatch.runs_kernel("state_select", why, rows=num_rows, by_choice=by_choice):
        from jaxspec.pallas.recurrent.state_select_kernel import state_select_kernel

        return state_select_kernel(states, dispatch.layer_index(states, layer), rows)
    return state_select_reference(states, layer, rows)


def state_select_reference(states, layer, rows):
    """Reference for `state_select`.

    Candidate 0 is the state after the token that was already certain; candidate `i` is the state
    after draft `i`. With two of three drafts accepted, candidate 2 is selected:

        token      t0   d1   d2   d3
        accepted   .    yes  yes  no
        candidate  0    1   [2]   3
    """
    _, num_slots, candidates = states.shape[:3]
    # Gather one extra row, of the null slot: XLA turns a gather of a single row into a slice, which
    # its CPU backend fuses into every use, and then copies the whole pool.
    slot = jnp.pad(jnp.clip(rows.slots, 0, num_slots - 1), (0, 1))
    candidate = jnp.pad(jnp.clip(rows.state_offset, 0, candidates - 1), (0, 1))
    return states[layer, slot, candidate][:-1]


def state_write_reference(
    states: _States, layer: int, rows: DecodeRegion, after: Float[Array, "rows width ..."]
) -> _States:
    """Return the pool with `after[row, t]` as candidate `t` of live rows, for `t < query_len`."""
    _, num_slots = states.shape[:2]
    token = jnp.arange(after.shape[1], dtype=jnp.int32)[None, :]
    is_stored = rows.is_live(num_slots)[:, None] & (token < rows.query_len[:, None])
    target = jnp.where(is_stored, rows.slots[:, None], num_slots)
    return states.at[layer, target, token].set(after.astype(states.dtype), mode="drop")


def check_candidates(states: _States, width: int) -> None:
    """Check that a slot has a state for each of the `width` tokens of a row.

    Raises:
        ValueError: It has fewer.
    """
    if states.shape[2] < width:
        raise ValueError(
            f"A slot must hold one state for each of the {width} tokens of a row, but the pool "
            f"has {states.shape[2]} a slot. Allocate the pool with num_drafts >= {width - 1}."
        )


def why_not_states(states: _States) -> str | None:
    """Return why the kernels of recurrent layers do not support these states, or None."""
    if states.dtype not in (jnp.float32, jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype}"
    rows, keys = states.shape[4:]
    if rows not in (64, 128) or keys not in (64, 128):
        return f"heads of {rows} x {keys}, not 64 or 128"
    return None


def _why_not_kernel(states):
    if states.dtype == jnp.float32:
        return "its gather is as fast in float32"
    if states.dtype not in (jnp.bfloat16, jnp.float16):
        return f"states in {states.dtype}"
    size = math.prod(states.shape[3:])
    return f"states of {size} elements, no multiple of 2048" if size % 2048 else None
