"""Parts shared by all recurrent layers: state selection, replay ring, convolution, chunk walk."""

from jaxspec.pallas.recurrent.conv_update import conv_prefill, conv_update
from jaxspec.pallas.recurrent.state_select import state_select
from jaxspec.pallas.recurrent.token_scan import conv_scan

__all__ = [
    "conv_prefill",
    "conv_scan",
    "conv_update",
    "state_select",
]
