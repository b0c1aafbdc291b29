"""Mamba2 ops: inputs of the recurrence, verify steps, and prefill of prompt chunks."""

from jaxspec.pallas.mamba2.conv_replay import mamba2_conv_replay
from jaxspec.pallas.mamba2.inputs import mamba2_inputs
from jaxspec.pallas.mamba2.prefill import mamba2_prefill
from jaxspec.pallas.mamba2.replay import mamba2_replay
from jaxspec.pallas.mamba2.step import mamba2_scan, mamba2_step

__all__ = [
    "mamba2_conv_replay",
    "mamba2_inputs",
    "mamba2_prefill",
    "mamba2_replay",
    "mamba2_scan",
    "mamba2_step",
]
