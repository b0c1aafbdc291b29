"""What all recurrent layers share: choosing a state, replaying tokens, convolution, chunks."""

from jaxspec.pallas.recurrent.conv_update import conv_prefill, conv_update
from jaxspec.pallas.recurrent.state_select import state_select

__all__ = [
    "conv_prefill",
    "conv_update",
    "state_select",
]
