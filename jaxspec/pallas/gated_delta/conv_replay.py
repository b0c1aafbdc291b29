"""Gated DeltaNet's convolution, gates and replay at once: a verify step from its projection on."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta import replay as replay_ops
from jaxspec.pallas.gated_delta.gates import Decay
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams
from jaxspec.pallas.gated_delta.inputs import check_columns, gdn_inputs, gdn_inputs_reference
from jaxspec.pallas.gated_delta.replay import (
    GdnRing,
    Outputs,
    States,
    gdn_replay,
    gdn_replay_reference,
)
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent import conv_update
from jaxspec.regions import DecodeRegion


def gdn_conv_replay(
    x: Float[Array, "rows width columns"],
    weight: Float[Array, "channels kernel"],
    decay: Decay,
    conv: Float[Array, "layers slots window channels"],
    states: States,
    ring: GdnRing,
    layer: int,
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    ring_length: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    heads: GdnHeads,
    norm: GatedNorm | None = None,
) -> tuple[Outputs, Float[Array, "layers slots window channels"], States, GdnRing]:
    """`gdn_replay` of what `gdn_inputs` makes of `x`: outputs, and the new pools.

    Operands, dtypes, padding and errors are those of the two; like the state's, the convolution's
    ring lies by position. One kernel where `gdn_replay` has one, if heads and channels are as the
    pools' axes say, and `x` and the length of `weight` what `conv_update` takes; otherwise the two.
    """
    params = GdnParams(weight.T, decay, heads)
    conv_update.check_window(x, params.conv, conv)
    check_columns(x, params)
    replay_ops.check(x.shape[:2], states, ring, norm)
    index = slots, num_computed, ring_length, query_len
    why = _unsupported(x, weight, conv, states, ring, heads)
    if dispatch.runs_kernel("gdn_conv_replay", why, by_choice=True):
        from jaxspec.pallas.gated_delta.replay_kernel import gdn_conv_replay_kernel

        on_device = dispatch.layer_index(states, layer)
        pools = conv, states, ring
        return gdn_conv_replay_kernel(x, weight.T, decay, *pools, on_device, *index, heads, norm)
    rows = DecodeRegion(slots, num_computed, query_len, jnp.zeros_like(slots), ring_length)
    tokens, conv = gdn_inputs(x, params, conv, layer, rows)
    out, states, ring = gdn_replay(*tokens, states, ring, layer, *index, norm)
    return out, conv, states, ring


def gdn_conv_replay_reference(
    x, weight, decay, conv, states, ring, layer, slots, num_computed, ring_length, query_len, heads
):
    """The specification of `gdn_conv_replay`."""
    params = GdnParams(weight.T, decay, heads)
    rows = DecodeRegion(slots, num_computed, query_len, jnp.zeros_like(slots), ring_length)
    tokens, conv = gdn_inputs_reference(x, params, conv, layer, rows)
    index = slots, num_computed, ring_length, query_len
    out, states, ring = gdn_replay_reference(*tokens, states, ring, layer, *index)
    return out, conv, states, ring


def _unsupported(x, weight, conv, states, ring, heads):
    """Why the kernel does not take these operands, or None."""
    value_dim, key_dim = states.shape[4:]
    kept = GdnHeads(ring.k.shape[3], key_dim, states.shape[3])
    channels = 2 * kept.key_heads * key_dim + kept.value_heads * value_dim
    if heads != kept or channels != weight.shape[0]:
        return f"{heads} of {weight.shape[0]} channels on states of {kept}"
    why = conv_update.why_not_kernel(x, weight.T, conv)
    return why or replay_ops.unsupported(x.shape[1], states, ring)
