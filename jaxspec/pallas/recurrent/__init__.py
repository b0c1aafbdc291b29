"""Parts shared by all recurrent layers: state selection, replay ring, convolution, chunk walk."""

from jaxspec.pallas.recurrent.conv_update import conv_prefill, conv_update
from jaxspec.pallas.recurrent.state_select import state_select

__all__ = [
    "conv_prefill",
    "conv_update",
    "state_select",
]
