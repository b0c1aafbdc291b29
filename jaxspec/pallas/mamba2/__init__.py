"""Mamba2: a verify step of its recurrence, and prompt chunks."""

from jaxspec.pallas.mamba2.prefill import mamba2_prefill
from jaxspec.pallas.mamba2.replay import mamba2_replay
from jaxspec.pallas.mamba2.step import mamba2_step

__all__ = [
    "mamba2_prefill",
    "mamba2_replay",
    "mamba2_step",
]
