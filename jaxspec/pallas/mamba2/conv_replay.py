"""Mamba2's convolution, step sizes and replay at once: a verify step from its projection on."""

from jaxtyping import Array, Float

from jaxspec.pallas.mamba2.heads import Mamba2Params
from jaxspec.pallas.mamba2.inputs import mamba2_inputs, mamba2_inputs_reference
from jaxspec.pallas.mamba2.replay import mamba2_replay, mamba2_replay_reference
from jaxspec.pallas.mamba2.ring import Mamba2Ring
from jaxspec.regions import DecodeRegion

_Conv = Float[Array, "layers slots conv_ring channels"]
_States = Float[Array, "layers slots 1 heads head_dim state_dim"]
_Outputs = Float[Array, "rows width heads head_dim"]


def mamba2_conv_replay(
    projected: Float[Array, "rows width columns"],
    params: Mamba2Params,
    conv: _Conv,
    states: _States,
    ring: Mamba2Ring,
    layer: int,
    rows: DecodeRegion,
) -> tuple[_Outputs, _Conv, _States, Mamba2Ring]:
    """`mamba2_replay` of what `mamba2_inputs` makes of a projection: outputs, and the new pools.

    Operands, dtypes, padding and errors are those of the two. The convolution's ring, like the
    state's, holds the input of each token in the row of its position.
    """
    tokens, conv = mamba2_inputs(projected, params, conv, layer, rows)
    out, states, ring = mamba2_replay(tokens, states, ring, layer, rows)
    return out, conv, states, ring


def mamba2_conv_replay_reference(
    projected: Float[Array, "rows width columns"],
    params: Mamba2Params,
    conv: _Conv,
    states: _States,
    ring: Mamba2Ring,
    layer: int,
    rows: DecodeRegion,
) -> tuple[_Outputs, _Conv, _States, Mamba2Ring]:
    """The specification of `mamba2_conv_replay`."""
    tokens, conv = mamba2_inputs_reference(projected, params, conv, layer, rows)
    out, states, ring = mamba2_replay_reference(tokens, states, ring, layer, rows)
    return out, conv, states, ring
