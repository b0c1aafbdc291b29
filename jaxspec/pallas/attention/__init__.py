"""Attention over paged keys and values, for verify steps and prompt chunks."""

from jaxspec.pallas.attention.inputs import attention_inputs
from jaxspec.pallas.attention.latent import latent_attention, latent_prefill_attention
from jaxspec.pallas.attention.paged import paged_attention
from jaxspec.pallas.attention.prefill import prefill_attention
from jaxspec.pallas.attention.window import window_attention, window_prefill, window_scan

__all__ = [
    "attention_inputs",
    "latent_attention",
    "latent_prefill_attention",
    "paged_attention",
    "prefill_attention",
    "window_attention",
    "window_prefill",
    "window_scan",
]
