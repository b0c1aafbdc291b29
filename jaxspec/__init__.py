"""Hybrid LLMs in JAX with zero-bubble asynchronous speculative decoding."""

from jaxspec.config import SpeculativeConfig
from jaxspec.llm import LLM, generate
from jaxspec.outputs import CompletionOutput, Delta, RequestOutput
from jaxspec.request import RequestMetrics, SamplingParams

__all__ = [
    "LLM",
    "CompletionOutput",
    "Delta",
    "RequestMetrics",
    "RequestOutput",
    "SamplingParams",
    "SpeculativeConfig",
    "generate",
]
