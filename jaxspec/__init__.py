"""Hybrid LLMs in JAX with zero-bubble asynchronous speculative decoding."""

from jaxspec.async_errors import (
    DrainingError,
    EngineDeadError,
    QueueFullError,
    QueueTimeoutError,
    ServiceError,
)
from jaxspec.async_llm import AsyncLLM
from jaxspec.async_stream import AsyncStream
from jaxspec.beam_search import BeamSearchParams
from jaxspec.inspection import Inspection, inspect
from jaxspec.kept_llm import generate
from jaxspec.llm import LLM
from jaxspec.logprobs import Logprob
from jaxspec.outputs import CompletionOutput, RequestOutput, Stream, TextDelta
from jaxspec.prompts import TextPrompt, TokensPrompt
from jaxspec.request import RequestMetrics
from jaxspec.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.speculation import SpeculativeConfig

__all__ = [
    "LLM",
    "AsyncLLM",
    "AsyncStream",
    "BeamSearchParams",
    "CompletionOutput",
    "DrainingError",
    "EngineDeadError",
    "Inspection",
    "Logprob",
    "QueueFullError",
    "QueueTimeoutError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ServiceError",
    "SpeculativeConfig",
    "Stream",
    "TextDelta",
    "TextPrompt",
    "TokensPrompt",
    "generate",
    "inspect",
]
