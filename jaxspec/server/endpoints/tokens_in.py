"""POST /inference/v1/generate, from token ids to token ids, and the routes that render its bodies.

A proxy renders a chat or a prompt once, and sends the ids to any server with the same model.
"""

import base64
import contextlib
import dataclasses
import io
import time
from collections.abc import AsyncGenerator
from typing import Any

import numpy as np
import orjson
from pydantic import Field
from starlette.responses import Response

from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.generation.conversation import chat_params, chat_prompt
from jaxspec.server.generation.generation import Generation
from jaxspec.server.generation.logprobs import chat_logprobs, prompt_logprobs
from jaxspec.server.generation.service import Service, ServiceOf
from jaxspec.server.http.errors import ApiError, json_response
from jaxspec.server.http.routing import make_router
from jaxspec.server.http.sse import DONE, Chunks, event
from jaxspec.server.protocol import (
    Body,
    ChatCompletionRequest,
    CompletionRequest,
    Each,
    Json,
    Sampling,
    StreamOptions,
    refused,
)
from jaxspec.server.translate.fields import new_id

router = make_router()


class GenerateRequest(Body):
    """Token ids to continue, and vLLM's `SamplingParams` as an object."""

    token_ids: Each[int]
    sampling_params: Json = {}
    request_id: str | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int | None = None
    features: Any = None
    kv_transfer_params: Any = None

    def sampling(self) -> "TokenSampling":
        """Return the parameters as the body of another route.

        Raises:
            ApiError: 400, a value is not supported.
            ValueError: a value is invalid.
        """
        for name, why in (("features", "prompts are text alone"), ("kv_transfer_params", "no KV")):
            if getattr(self, name):
                raise refused(name, getattr(self, name), f"{why}. Leave it out.")
        if not self.token_ids:
            raise ValueError("token_ids must hold at least one token id, got [].")
        own = {name: getattr(self, name) for name in ("stream", "cache_salt", "priority")}
        options = self.stream_options and self.stream_options.model_dump()
        body = TokenSampling.model_validate(
            {**self.sampling_params, **own, "stream_options": options}
        )
        body.refuse_absent()
        return body


class TokenSampling(Sampling):
    """Fields of `GenerateRequest.sampling_params`."""

    logprobs: int | None = None
    routed_experts_prompt_start: int | None = None
    vllm_xargs: Json | None = Field(None, alias="extra_args")


@router.post("/inference/v1/generate")
async def generate(body: GenerateRequest, service: ServiceOf) -> Response:
    """Continue token ids; the answer has token ids alone."""
    model = service.check_model(body.model)
    with service.refusing(body):
        sampling = body.sampling()
    params = service.sampling_params(sampling, sampling.max_tokens, sampling.logprobs)
    params.detokenize = bool(params.stop)
    params.routed_experts_prompt_start = sampling.routed_experts_prompt_start or 0
    request_id = new_id("generate-tokens-")
    generation = await service.complete(sampling, [body.token_ids], params, request_id)
    shared: Json = {
        "request_id": body.request_id or request_id,
        "model": model,
        "created": int(time.time()),
    }
    if body.stream:
        return service.stream(_events(sampling, shared, params, generation, service))
    return json_response(await _whole(shared, params, generation, service))


async def _whole(
    shared: Json, params: SamplingParams, generation: Generation, service: Service
) -> Json:
    choices = list[Json]()
    async with contextlib.aclosing(generation.deltas()) as deltas:
        async for number, delta in deltas:  # one of each sample
            choices.append(_choice(number, delta, params, service))
    (stream,) = generation.streams
    found = stream.prompt_logprobs
    return shared | {
        "choices": sorted(choices, key=lambda choice: choice["index"]),
        "prompt_logprobs": None if found is None else prompt_logprobs(found),
        "kv_transfer_params": None,
        "usage": generation.usage.as_object(),
    }


async def _events(
    body: Sampling,
    shared: Json,
    params: SamplingParams,
    generation: Generation,
    service: Service,
) -> AsyncGenerator[bytes, None]:
    """Yield the chunks of the answer; an error is sent as the last event before [DONE]."""
    chunks, options = Chunks(**shared), body.usage_options
    try:
        async with contextlib.aclosing(generation.deltas()) as deltas:
            async for number, delta in deltas:
                usage = generation.usage.as_object() if options.continuous_usage_stats else None
                choice = orjson.dumps(_choice(number, delta, params, service))
                yield chunks.chunk(choice, usage)
        if options.include_usage:
            yield chunks.chunk(b"", generation.usage.as_object())
    except Exception as error:
        yield event(ApiError.of(error).as_object())
    yield DONE


def _choice(number: int, delta: TextDelta, params: SamplingParams, service: Service) -> Json:
    logprobs = None
    if params.logprobs is not None:
        content = chat_logprobs(delta.logprobs or (), params.logprobs, service.tokenizer)
        logprobs = {"content": content}
    choice: Json = {
        "index": number,
        "logprobs": logprobs,
        "finish_reason": delta.finish_reason,
        "token_ids": delta.token_ids,
        "weight_versions": delta.weight_versions,
    }
    if delta.routed_experts is not None:
        choice["routed_experts"] = _npy(delta.routed_experts)
    return choice


def _npy(array: np.ndarray) -> str:
    """Return the array as a .npy file in base64; it has the shape and the dtype."""
    file = io.BytesIO()
    np.save(file, array, allow_pickle=False)
    return base64.b64encode(file.getvalue()).decode()


@router.post("/v1/chat/completions/render")
async def render_chat(body: ChatCompletionRequest, service: ServiceOf) -> Response:
    """Return the prompt of a chat, as text and as a body of /inference/v1/generate."""
    model = service.check_model(body.model)
    body.refuse_absent(trusts_template=service.options.trust_request_chat_template)
    params = chat_params(service, body)
    with service.refusing(body):
        prompt = await chat_prompt(service, body)
    return json_response(_request(body, model, prompt.text, prompt.ids, params))


@router.post("/v1/completions/render")
async def render_completion(body: CompletionRequest, service: ServiceOf) -> Response:
    """Return the prompts of a completion, as bodies of /inference/v1/generate."""
    model = service.check_model(body.model)
    body.refuse_absent()
    params = service.sampling_params(body, body.max_tokens, body.logprobs)

    def tokenized() -> list[list[int]]:
        encode = service.tokenizer.encode
        return [encode(each) if isinstance(each, str) else each for each in body.prompts]

    with service.refusing(body):
        ids = await service.llm.prepare(tokenized)
    texts = [each if isinstance(each, str) else None for each in body.prompts]
    pairs = zip(texts, ids, strict=True)
    return json_response([_request(body, model, *pair, params) for pair in pairs])


def _request(
    body: Sampling, model: str, text: str | None, ids: list[int], params: SamplingParams
) -> Json:
    given = dataclasses.asdict(params)
    del given["output_kind"]
    return {
        "request_id": new_id("generate-tokens-"),
        "prompt": text,
        "token_ids": ids,
        "sampling_params": given,
        "model": model,
        "stream": bool(body.stream),
        "stream_options": body.stream_options and body.stream_options.model_dump(),
        "cache_salt": body.cache_salt,
        "priority": body.priority or 0,
        "features": None,
        "kv_transfer_params": None,
    }
