"""POST /v1/completions: completions of one prompt or several."""

import contextlib
import dataclasses
import functools
import time
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import orjson
from starlette.responses import Response

from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.generation.completion_pieces import (
    CompletionPiece,
    CompletionPieces,
    is_for_prompt_alone,
    joined,
)
from jaxspec.server.generation.generation import Generation
from jaxspec.server.generation.service import Service, ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.http.sse import DONE, Chunks, event
from jaxspec.server.protocol import CompletionRequest
from jaxspec.server.translate.fields import new_id

router = make_router()


@router.post("/v1/completions")
async def create_completion(body: CompletionRequest, service: ServiceOf) -> Response:
    """Complete one or several prompts."""
    model = service.check_model(body.model)
    body.refuse_absent()
    params = _params(service, body)
    shared = {
        "id": new_id("cmpl-"),
        "object": "text_completion",
        "created": int(time.time()),
        "model": model,
    }
    encode = functools.partial(_encoded, service, body) if _is_encoded_here(body) else None
    generation = await service.complete(body, body.prompts, params, shared["id"], encode)
    pieces = _pieces(generation, CompletionPieces(body, params, service.tokenizer))
    if body.stream:
        return service.stream(_events(body, shared, generation, pieces))
    return json_response(await _whole(body, shared, generation, pieces))


def _is_encoded_here(body: CompletionRequest) -> bool:
    """Return whether the engine, which adds special tokens and keeps last ones, would be wrong."""
    return body.add_special_tokens is False or body.truncation_side == "right"


def _encoded(service: Service, body: CompletionRequest, prompt: Any) -> Sequence[int]:
    """Return the token ids of a prompt, cut at the right if the request says so."""
    kept, most = body.truncate_prompt_tokens, service.llm.max_model_len
    if kept == -1:
        wanted = body.max_tokens or most
        kept = most - (wanted if wanted < most else 1)
    is_right, special = body.truncation_side == "right", body.add_special_tokens is not False
    if not isinstance(prompt, str):
        return prompt[:kept] if is_right else prompt
    if kept is None:
        return service.tokenizer.encode(prompt, special, most)
    encode = service.tokenizer.encode_first if is_right else service.tokenizer.encode_last
    return encode(prompt, min(kept, most), special)


_Numbered = AsyncGenerator[tuple[int, CompletionPiece], None]


def _params(service: Service, body: CompletionRequest) -> SamplingParams:
    most = 1 if is_for_prompt_alone(body) else body.max_tokens
    params = service.sampling_params(body, most, body.logprobs)
    if body.echo and body.logprobs is not None:
        params.prompt_logprobs = params.logprobs
    return params


async def _pieces(generation: Generation, pieces: CompletionPieces) -> _Numbered:
    """Yield `(choice, piece)` for all choices."""
    async with contextlib.aclosing(generation.deltas()) as deltas:
        async for number, delta in deltas:
            yield number, pieces.of(number, delta, generation.stream_of(number))


def _usage(body: CompletionRequest, generation: Generation) -> dict[str, Any]:
    usage = generation.usage
    if is_for_prompt_alone(body):
        usage = dataclasses.replace(usage, completion_tokens=0)
    return usage.as_object()


async def _whole(
    body: CompletionRequest, shared: dict[str, Any], generation: Generation, pieces: _Numbered
) -> dict[str, Any]:
    """Return the complete answer."""
    found: list[list[CompletionPiece]] = [[] for _ in range(generation.num_choices)]
    async with contextlib.aclosing(pieces):
        async for number, piece in pieces:
            found[number].append(piece)
    choices = [orjson.Fragment(joined(each).as_bytes(n)) for n, each in enumerate(found)]
    return {**shared, "choices": choices, "usage": _usage(body, generation)}


async def _events(
    body: CompletionRequest, shared: dict[str, Any], generation: Generation, pieces: _Numbered
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of the answer; an error is sent as the last event before [DONE]."""
    chunks, options = Chunks(**shared), body.usage_options
    try:
        async with contextlib.aclosing(pieces):
            async for number, piece in pieces:
                if not piece.is_empty:
                    usage = _usage(body, generation) if options.continuous_usage_stats else None
                    yield chunks.chunk(piece.as_bytes(number), usage)
        if options.include_usage:
            yield chunks.chunk(b"", _usage(body, generation))
    except Exception as error:
        yield event(ApiError.of(error).as_object())
    yield DONE
