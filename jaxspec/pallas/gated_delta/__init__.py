"""Gated DeltaNet: inputs of the recurrence, verify steps and prefill."""

from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay
from jaxspec.pallas.gated_delta.inputs import gdn_inputs, gdn_inputs_by_channel
from jaxspec.pallas.gated_delta.prefill import gdn_prefill
from jaxspec.pallas.gated_delta.replay import gdn_replay
from jaxspec.pallas.gated_delta.step import gdn_scan, gdn_step

__all__ = [
    "gdn_conv_replay",
    "gdn_inputs",
    "gdn_inputs_by_channel",
    "gdn_prefill",
    "gdn_replay",
    "gdn_scan",
    "gdn_step",
]
