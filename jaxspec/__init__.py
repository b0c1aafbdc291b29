"""Hybrid LLMs in JAX with zero-bubble asynchronous speculative decoding."""

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.beam_search import BeamSearchParams
from jaxspec.api.differentiable import Differentiable, differentiable
from jaxspec.api.engine_args import AsyncEngineArgs, EngineArgs
from jaxspec.api.follow import follow
from jaxspec.api.llm import LLM, generate
from jaxspec.api.llm_engine import LLMEngine
from jaxspec.api.weight_updates import WeightUpdate
from jaxspec.engine.async_stream import AsyncStream
from jaxspec.engine.errors import (
    AsleepError,
    DrainingError,
    EngineDeadError,
    PausedError,
    QueueFullError,
    QueueTimeoutError,
    ServiceError,
)
from jaxspec.flight.about import VERSION as __version__
from jaxspec.inspection import Inspection, inspect
from jaxspec.models import register_model
from jaxspec.models.base import Model
from jaxspec.options import SpeculativeConfig
from jaxspec.requests.logits_processors import HostLogitsProcessor, LogitsProcessor, Prefix
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import (
    CompletionOutput,
    RequestOutput,
    Stream,
    TextDelta,
    WeightVersionSpan,
)
from jaxspec.requests.prompts import TextPrompt, TokensPrompt
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.requests.structured_outputs import StructuredOutputsParams

AsyncLLMEngine = AsyncLLM
"""vLLM's other name of `AsyncLLM`."""

__all__ = [
    "LLM",
    "AsleepError",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "AsyncStream",
    "BeamSearchParams",
    "CompletionOutput",
    "Differentiable",
    "DrainingError",
    "EngineArgs",
    "EngineDeadError",
    "HostLogitsProcessor",
    "Inspection",
    "LLMEngine",
    "LogitsProcessor",
    "Logprob",
    "Model",
    "PausedError",
    "Prefix",
    "QueueFullError",
    "QueueTimeoutError",
    "RequestMetrics",
    "RequestOutput",
    "RequestOutputKind",
    "SamplingParams",
    "ServiceError",
    "SpeculativeConfig",
    "Stream",
    "StructuredOutputsParams",
    "TextDelta",
    "TextPrompt",
    "TokensPrompt",
    "WeightUpdate",
    "WeightVersionSpan",
    "__version__",
    "differentiable",
    "follow",
    "generate",
    "inspect",
    "register_model",
]
