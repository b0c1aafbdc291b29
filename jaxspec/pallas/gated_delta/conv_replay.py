"""Verify step of Gated DeltaNet from its projection: convolution, gates and replay in one op."""

from jaxtyping import Array, Float

from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta import replay as replay_op
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams, GdnRing, ReplayBases
from jaxspec.pallas.gated_delta.inputs import check_columns, gdn_inputs, gdn_inputs_reference
from jaxspec.pallas.gated_delta.replay import Outputs, gdn_replay, gdn_replay_reference
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.conv_ring import ConvPool
from jaxspec.pallas.recurrent.conv_update import check_window, why_not_convolve
from jaxspec.regions import DecodeRegion


def gdn_conv_replay(
    projected: Float[Array, "rows width columns"],
    params: GdnParams,
    conv: ConvPool,
    states: ReplayBases,
    ring: GdnRing,
    layer: int,
    rows: DecodeRegion,
    norm: GatedNorm | None = None,
) -> tuple[Outputs, ConvPool, ReplayBases, GdnRing]:
    """Run `gdn_inputs` on a projection, then `gdn_replay`; return the outputs and the new pools.

    Operands, dtypes, padding and errors are those of the two ops. The convolution's ring, like the
    state's, holds the input of each token in the row of its position.

    One kernel computes both if `gdn_replay` has a kernel, heads and channels match the pools, and
    `conv_update` has a kernel for the projection and the taps. Otherwise the two ops run.
    """
    check_window(projected, params.conv, conv)
    check_columns(projected, params)
    num_rows, width = projected.shape[:2]
    replay_op.check(num_rows, width, states, ring, norm)
    why = _why_not_kernel(projected, params, conv, states, ring)
    if dispatch.runs_kernel("gdn_conv_replay", why, rows=num_rows, by_choice=True):
        from jaxspec.pallas.gated_delta.replay_kernel import Projection, gdn_conv_replay_kernel

        tokens = Projection(projected, params.conv, params.decay)
        on_device = dispatch.layer_index(states, layer)
        return gdn_conv_replay_kernel(tokens, conv, states, ring, on_device, rows, norm)
    inputs, conv = gdn_inputs(projected, params, conv, layer, rows)
    out, states, ring = gdn_replay(inputs, states, ring, layer, rows, norm)
    return out, conv, states, ring


def gdn_conv_replay_reference(projected, params, conv, states, ring, layer, rows):
    tokens, conv = gdn_inputs_reference(projected, params, conv, layer, rows)
    out, states, ring = gdn_replay_reference(tokens, states, ring, layer, rows)
    return out, conv, states, ring


def _why_not_kernel(projected, params, conv, states, ring):
    value_dim, key_dim = states.shape[4:]
    kept = GdnHeads(ring.k.shape[3], key_dim, states.shape[3])
    channels = 2 * kept.key_heads * key_dim + kept.value_heads * value_dim
    if params.heads != kept or channels != params.conv.shape[1]:
        return f"{params.heads} of {params.conv.shape[1]} channels on states of {kept}"
    why = why_not_convolve(projected, params.conv, conv)
    return why or replay_op.why_not_kernel(projected.shape[1], states, ring)
