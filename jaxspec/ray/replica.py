"""Replica: one engine and the server's app around it, called by the ingress."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from typing import Any

from ray import serve
from starlette.types import Message

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.ray.call import Call
from jaxspec.server.app import make_app
from jaxspec.server.http.http_server import set_up_log
from jaxspec.server.http.request_ids import LOG
from jaxspec.server.metrics.throughput_log import logging_throughput
from jaxspec.server.options import ServerOptions


class EngineFailedError(RuntimeError):
    """The engine of a replica has failed; another replica may answer the request."""

    def __init__(self, replica_id: str):
        super().__init__(replica_id)
        self.replica_id = replica_id


class Replica:
    """Deployment of an engine.

    A failed engine refuses requests by `EngineFailedError` and fails its health checks, so that Ray
    replaces the replica.
    """

    async def __init__(self, options: ServerOptions, engine: dict[str, Any]):
        """Load the model and compile; Ray sends requests afterwards.

        Raises:
            ValueError: the model has no tokenizer, or as in `AsyncLLM`.
        """
        set_up_log()
        self._llm = AsyncLLM(**engine)
        self._app = make_app(self._llm, options)
        if options.warm_up:
            await self._llm.get_ready()
        self._open = contextlib.ExitStack()
        self._open.enter_context(logging_throughput(self._llm, options, LOG.info))

    async def respond(self, call: Call) -> AsyncGenerator[Message, None]:
        """Yield the ASGI messages of the response; closing the generator aborts the request.

        Raises:
            EngineFailedError: the engine failed before the response began.
        """
        self._require_engine()
        messages = asyncio.Queue[Message | None]()

        async def receive() -> Message:
            if not body:
                await asyncio.Event().wait()  # the ingress cancels after a disconnect
            return {"type": "http.request", "body": body.pop(), "more_body": False}

        body = [call.body]
        work = asyncio.create_task(self._app(dict(call.scope), receive, messages.put))
        work.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            while (message := await messages.get()) is not None:
                if message["type"] == "http.response.start" and message["status"] >= 500:
                    self._require_engine()
                yield message
        finally:
            work.cancel()
            await asyncio.wait({work})
            if not work.cancelled() and (error := work.exception()) is not None:
                LOG.error("A request failed.", exc_info=error)

    async def check_health(self) -> None:
        """Raise EngineFailedError after a failed step; Ray calls this periodically."""
        self._require_engine()

    def _require_engine(self) -> None:
        if not self._llm.is_healthy:
            name = serve.get_replica_context().replica_id.unique_id
            raise EngineFailedError(name) from self._llm.error
