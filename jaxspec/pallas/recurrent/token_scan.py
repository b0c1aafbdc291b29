"""Recurrence and convolution over a `TokenRegion`, one token of a slot after the other.

Every token is an iteration of one loop, so its sums have the same order in a prompt, in a verify
and by itself. Chunks of prompts and steps of several tokens have other orders.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas.recurrent.conv_ring import Activation, ConvPool, ring_place
from jaxspec.pallas.recurrent.conv_update import Bias, Taps, activated
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.regions import TokenRegion

State = Float[Array, "1 ..."]  # of one token, float32
Outputs = Float[Array, "tokens ..."]
States = Float[Array, "layers slots candidates ..."]


def scan_in_order(
    advance: Callable[[State, Int[Array, ""]], tuple[State, Outputs]],
    states: States,
    layer: int,
    rows: TokenRegion,
) -> tuple[Outputs, States]:
    """Return each token's outputs, and the pool with the state after each live token.

    `advance(state, index)` returns the state after token `index`, and its outputs, each with a
    leading axis of 1. A token starts from its `state_offset`; a prompt's first one from zeros.
    """
    num_slots = states.shape[1]
    live = rows.is_live(num_slots)
    indices = jnp.arange(len(live), dtype=jnp.int32)
    target = jnp.where(live, rows.slots, num_slots)

    def one(index, carried):
        outputs, states = carried
        own, at = jax.tree.map(lambda x: lax.dynamic_slice_in_dim(x, index, 1), (rows, target))
        state = state_select_reference(states, layer, own).astype(jnp.float32)
        state = jnp.where(own.num_computed.reshape(1, *(1,) * (state.ndim - 1)) > 0, state, 0.0)
        state, output = advance(state, index)
        states = states.at[layer, at, own.candidate].set(state.astype(states.dtype), mode="drop")
        return lax.dynamic_update_slice_in_dim(outputs, output, index, 0), states

    state = jax.ShapeDtypeStruct((1, *states.shape[3:]), jnp.float32)
    _, output = jax.eval_shape(advance, state, jnp.int32(0))
    outputs = jnp.zeros((len(live), *output.shape[1:]), output.dtype)
    count = jnp.max(jnp.where(live, indices + 1, 0))
    return lax.fori_loop(0, count, one, (outputs, states))


def conv_scan(
    x: Float[Array, "tokens channels"],
    weight: Taps,
    conv: ConvPool,
    layer: int,
    rows: TokenRegion,
    *,
    bias: Bias = None,
    activation: Activation = "silu",
) -> tuple[Float[Array, "tokens channels"], ConvPool]:
    """`conv_update` for a `TokenRegion`; runs in XLA on every device.

    A token reads earlier ones of its slot in the region, or else in the ring; zeros precede a
    prompt. The ring gets the last inputs of each slot, as many as it holds.
    """
    _, num_slots, window, _ = conv.shape
    history = weight.shape[0] - 1
    ago = jnp.arange(history, -1, -1, dtype=jnp.int32)[None, :]
    token = jnp.arange(x.shape[0], dtype=jnp.int32)[:, None]
    position = rows.num_computed[:, None] - ago
    slot = jnp.clip(rows.slots, 0, num_slots - 1)
    held = conv[layer, slot[:, None], ring_place(position, window)]
    new = x.astype(conv.dtype)
    is_new = token - ago >= rows.first[:, None]
    inputs = jnp.where(is_new[..., None], new[jnp.maximum(token - ago, 0)], held)
    inputs = jnp.where((position >= 0)[..., None], inputs, 0).astype(x.dtype)

    y = jnp.zeros(x.shape, jnp.float32)
    for tap in range(history + 1):
        y = y + inputs[:, tap].astype(jnp.float32) * weight[None, tap].astype(jnp.float32)

    left = rows.end - token[:, 0]  # tokens of the slot from this one on
    is_stored = rows.is_live(num_slots) & (left <= window)
    target = jnp.where(is_stored, rows.slots, num_slots)
    # Values to write depend on values that were read: without this order XLA copies the pool.
    stored = jnp.where(is_stored[:, None], new, held[:, -1])
    place = ring_place(rows.num_computed, window)
    conv = conv.at[layer, target, place].set(stored, mode="drop")
    return activated(y, bias, activation).astype(x.dtype), conv
