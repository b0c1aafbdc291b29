"""Hybrid LLMs in JAX with zero-bubble asynchronous speculative decoding."""

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.beam_search import BeamSearchParams
from jaxspec.api.llm import LLM, generate
from jaxspec.engine.async_stream import AsyncStream
from jaxspec.engine.errors import (
    DrainingError,
    EngineDeadError,
    QueueFullError,
    QueueTimeoutError,
    ServiceError,
)
from jaxspec.inspection import Inspection, inspect
from jaxspec.options import SpeculativeConfig
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import CompletionOutput, RequestOutput, Stream, TextDelta
from jaxspec.requests.prompts import TextPrompt, TokensPrompt
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams

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
