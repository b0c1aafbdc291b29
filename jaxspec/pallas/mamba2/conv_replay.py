"""Mamba2 verify step from its projection on: convolution, step sizes and replay in one op."""

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2 import replay as replay_op
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params, Mamba2Ring, Outputs, ReplayBases
from jaxspec.pallas.mamba2.inputs import check_columns, mamba2_inputs, mamba2_inputs_reference
from jaxspec.pallas.mamba2.replay import mamba2_replay, mamba2_replay_reference
from jaxspec.pallas.recurrent.conv_ring import ConvPool
from jaxspec.pallas.recurrent.conv_update import check_window, why_not_convolve
from jaxspec.pallas.recurrent.replay import check_ring
from jaxspec.regions import DecodeRegion


def mamba2_conv_replay(
    projected: Float[Array, "rows width columns"],
    params: Mamba2Params,
    conv: ConvPool,
    states: ReplayBases,
    ring: Mamba2Ring,
    layer: int,
    rows: DecodeRegion,
) -> tuple[Outputs, ConvPool, ReplayBases, Mamba2Ring]:
    """Run `mamba2_inputs` and `mamba2_replay` on a projection: outputs, and the new pools.

    Operands, dtypes, padding and errors are those of the two ops. The convolution's ring, like the
    replay ring, holds the input of each token in the row of its position.

    One kernel runs both if `mamba2_replay` has a kernel, the heads match the pools, and
    `conv_update` has a kernel for the projection and the taps. Otherwise the two ops run.
    """
    check_window(projected, params.conv, conv)
    check_columns(projected, params)
    check_ring(projected.shape[1], ring.window, ring.num_rows)
    why = _why_not_kernel(projected, params, conv, states, ring)
    if dispatch.runs_kernel("mamba2_conv_replay", why, rows=projected.shape[0], by_choice=True):
        from jaxspec.pallas.mamba2.replay_kernel import mamba2_conv_replay_kernel

        on_device = dispatch.layer_index(states, layer)
        return mamba2_conv_replay_kernel(projected, params, conv, states, ring, on_device, rows)
    tokens, conv = mamba2_inputs(projected, params, conv, layer, rows)
    out, states, ring = mamba2_replay(tokens, states, ring, layer, rows)
    return out, conv, states, ring


def mamba2_conv_replay_reference(projected, params, conv, states, ring, layer, rows):
    tokens, conv = mamba2_inputs_reference(projected, params, conv, layer, rows)
    out, states, ring = mamba2_replay_reference(tokens, states, ring, layer, rows)
    return out, conv, states, ring


def _why_not_kernel(projected, params, conv, states, ring):
    heads, head_dim, state_dim = states.shape[3:]
    kept = Mamba2Heads(heads, head_dim, ring.b.shape[3], state_dim)
    if params.heads != kept:
        return f"{params.heads} on states of {kept}"
    why = why_not_convolve(projected, params.conv, conv)
    return why or replay_op.why_not_kernel(projected, states, ring)
