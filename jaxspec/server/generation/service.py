"""Service: state shared by all routes, and submission of their requests to the engine."""

import contextlib
import functools
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any

from fastapi import Depends
from starlette.requests import Request

from jaxspec.api.async_calls import AsyncCalls
from jaxspec.engine.async_stream import AsyncStream
from jaxspec.engine.errors import (
    DrainingError,
    EngineDeadError,
    NoReplicaError,
    PausedError,
    QueueFullError,
)
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.server.generation.generation import Generation
from jaxspec.server.generation.response_store import ResponseStore
from jaxspec.server.http.errors import ApiError
from jaxspec.server.http.sse import EventStream
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.snapshot import Watch
from jaxspec.server.options import ServerOptions
from jaxspec.server.protocol import Sampling
from jaxspec.server.structure import named_error
from jaxspec.text.parsers import parser_for
from jaxspec.text.tokenizer import Tokenizer

MAX_CHOICES = 2048
"""Maximum number of samples per request, over all its prompts."""
_REJECTIONS = {
    QueueFullError: "queue_full",
    DrainingError: "draining",
    EngineDeadError: "engine_dead",
    NoReplicaError: "no_replica",
    PausedError: "paused",
}


def tokenizer_of(llm: AsyncCalls) -> Tokenizer:
    """Return the model's tokenizer.

    Raises:
        ValueError: the model has none.
    """
    if llm.tokenizer is None:
        raise ValueError(
            "A server needs the model's tokenizer, and this model has none. Copy its "
            "tokenizer.json into the model's folder, or name another by --tokenizer."
        )
    return llm.tokenizer


class Service:
    """State shared by all routes."""

    def __init__(
        self,
        llm: AsyncCalls,
        options: ServerOptions,
        metrics: ServerMetrics,
        watch: Watch,
        *,
        created: int | None = None,
    ):
        """Serve `llm`, count requests in `metrics` and read engine metrics from `watch`.

        `created`: start time of the server in seconds since 1970; None means now.

        Raises:
            ValueError: the model has no tokenizer.
        """
        self.llm, self.options, self.metrics, self.watch = llm, options, metrics, watch
        self.tokenizer = tokenizer_of(llm)
        dialect = parser_for(
            self.tokenizer.chat_template,
            self.tokenizer.has_token,
            tool_parser=options.tool_call_parser,
            reasoning_parser=options.reasoning_parser,
        )
        self.dialect = dialect if options.enable_auto_tool_choice else dialect._replace(readers={})
        self.tags_are_special = any(map(self._is_hidden, self.dialect.tags))
        self.names = options.served_model_name or (_name_of(llm.model_name),)
        self.created = int(time.time()) if created is None else created
        # A later turn may come to another process.
        num_stored = options.max_stored_responses if options.api_processes == 1 else 0
        self.responses = ResponseStore(num_stored, options.max_stored_mib * 2**20)
        self.weight_update: dict[str, dict[str, Any]] | None = None  # see `endpoints.rollouts`
        self.is_draining = False  # True during shutdown: new requests are refused

    def check_model(self, name: str | None) -> str:
        """Return the model name for the answer.

        Raises:
            ApiError: 404, the server has no model of this name.
        """
        if name is None or name in self.names:
            return name or self.names[0]
        known = ", ".join(map(repr, self.names))
        raise ApiError(
            404,
            f"model must be {known}, got {name[:80]!r}. GET /v1/models lists the names.",
            param="model",
        )

    def sampling_params(
        self, body: Sampling, max_tokens: int | None, logprobs: int | None
    ) -> SamplingParams:
        """Return a request's parameters, checked against the server's limits.

        Raises:
            ApiError: 400, a value is invalid.
        """
        with self.refusing(body):
            self._check("n", body.n or 1, self.options.max_n)
            stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
            if len(stops) > self.options.max_stop:
                raise ValueError(
                    f"stop must be at most {self.options.max_stop} strings, got {len(stops):,}. "
                    "Give fewer."
                )
            default = self.llm.get_default_sampling_params()
            params = body.sampling_params(default, max_tokens, logprobs)
        if not self.dialect.thinks:
            params.thinking_token_budget = None  # there is no reasoning to limit
        return params

    async def complete(
        self,
        body: Sampling,
        prompts: Sequence[Any],
        params: SamplingParams,
        request_id: str,
        encode: Callable[[Any], Sequence[int]] | None = None,
    ) -> Generation:
        """Submit prompts (texts or lists of token ids) to the engine, which validates them.

        `encode` returns the token ids of a prompt, in a worker thread; None leaves it to the
        engine.

        Raises:
            ApiError: 400, a prompt is invalid.
            Exception: errors of the engine, which `errors.ApiError.of` converts.
        """
        with self.refusing(body):
            if not prompts:
                raise ValueError("prompt must hold at least one prompt, got []. Give some text.")
            self._check("prompt x n", len(prompts) * params.n, MAX_CHOICES)

        async def submit(number: int, prompt: Any) -> AsyncStream:
            if encode is not None:
                prompt = await self.llm.prepare(functools.partial(encode, prompt))
            return await self.llm.submit(
                _salted(prompt, body.cache_salt),
                params,
                request_id=request_id if len(prompts) == 1 else f"{request_id}-{number}",
                priority=body.priority or 0,
            )

        submissions = (submit(*each) for each in enumerate(prompts))
        return await self._submit_each(body, params, submissions)

    async def chat(
        self,
        body: Sampling,
        messages: Any,
        params: SamplingParams,
        request_id: str,
        template: dict[str, Any],
    ) -> Generation:
        """Submit a conversation to the engine; raises as `complete`."""
        submission = self.llm.submit_chat(
            messages,
            params,
            request_id=request_id,
            priority=body.priority or 0,
            cache_salt=body.cache_salt,
            **template,
        )
        return await self._submit_each(body, params, [submission])

    def stream(self, events: Any) -> EventStream:
        options = self.options
        return EventStream(
            events, keep_alive=options.stream_keep_alive, stall_timeout=options.stream_stall_timeout
        )

    @contextlib.contextmanager
    def refusing(self, body: Any) -> Iterator[None]:
        """Convert the engine's ValueErrors and TypeErrors to 400s; count admission rejections."""
        try:
            yield
        except (*_REJECTIONS,) as error:
            kind = next(kind for kind in _REJECTIONS if isinstance(error, kind))
            self.metrics.rejections[_REJECTIONS[kind]] += 1
            raise
        except (ValueError, TypeError) as error:
            is_sampling = isinstance(body, Sampling)
            fields = (body.form_field, body.extra_args_field) if is_sampling else (None, None)
            known = named_error(error, *fields)
            raise known or ApiError.of_value(error, type(body).model_fields) from error

    async def _submit_each(
        self,
        body: Sampling,
        params: SamplingParams,
        submissions: Iterable[Awaitable[AsyncStream]],
    ) -> Generation:
        """Await submissions one by one; if one is refused, abort those before it."""
        streams = list[AsyncStream]()
        try:
            with self.refusing(body):
                for submission in submissions:
                    streams.append(await submission)
        except BaseException:
            for stream in streams:
                await stream.aclose()
            raise
        for stream in streams:
            self.metrics.note_request(len(stream.prompt_token_ids), params)
        return Generation(streams, params.n, self.metrics)

    def _is_hidden(self, tag: str) -> bool:
        """Return whether decoding drops a tag that parsers look for, as a special token."""
        tokens = self.tokenizer.encode(tag, add_special_tokens=False)
        return tag not in self.tokenizer.decode(tokens)

    @staticmethod
    def _check(name: str, value: int, most: int) -> None:
        if value > most:
            raise ValueError(f"{name} must be at most {most:,}, got {value:,}. Ask for fewer.")


def _name_of(model: str) -> str:
    """Return a hub id, or the last part of a local path, which keeps the rest private."""
    path = Path(model)
    return path.name if path.exists() else model


def _salted(prompt: Any, salt: str | None) -> Any:
    if salt is None:
        return prompt
    name = "prompt" if isinstance(prompt, str) else "prompt_token_ids"
    return {name: prompt, "cache_salt": salt}


async def _service(request: Request) -> Service:
    return request.app.state.service


ServiceOf = Annotated[Service, Depends(_service)]
"""The app's service, as a parameter of a route (FastAPI dependency)."""
