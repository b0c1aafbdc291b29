"""Ingress: checks keys and bodies, sends requests to replicas and repeats unanswered ones."""

# pyright: reportMissingImports=false

import asyncio
from collections.abc import AsyncGenerator

from ray.exceptions import RayActorError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.routing import Mount
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxspec.api.fair_pool import LONG_BYTES
from jaxspec.ray.call import Call
from jaxspec.ray.replica import EngineFailedError
from jaxspec.server.app import guards
from jaxspec.server.http.errors import ApiError
from jaxspec.server.http.http_server import set_up_log
from jaxspec.server.http.request_ids import LOG, named
from jaxspec.server.http.sse import DONE, event
from jaxspec.server.options import ServerOptions
from jaxspec.server.translate import anthropic

_DELAYS = (0.1, 0.5, 1.0, 2.0, 4.0)  # seconds before each repetition
_LOST = (RayActorError, EngineFailedError)


class Ingress:
    """Deployment that Ray's HTTP proxies call."""

    def __init__(self, replicas: DeploymentHandle, options: ServerOptions):
        set_up_log()
        self._replicas, self._options = replicas, options

    def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the app, which Ray calls; the file of keys is read here, on the ingress' node."""
        forward = Mount("/", app=Forward(self._replicas))
        return Starlette(routes=[forward], middleware=guards(self._options))


class Forward:
    """ASGI app whose responses are those of a replica.

    A request whose replica dies is sent to another one if nothing of the response was sent to the
    client. Otherwise the stream ends with an error as its last event.
    """

    def __init__(self, replicas: DeploymentHandle, delays: tuple[float, ...] = _DELAYS):
        """`delays`: seconds before each repetition of a request."""
        self._respond = replicas.options(method_name="respond", stream=True)
        self._delays = delays

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = (await receive())["body"]  # ClientConnection has the whole body
        is_long = len(body) > LONG_BYTES
        call = await asyncio.to_thread(Call.of, scope, body) if is_long else Call.of(scope, body)
        for delay in (*self._delays, None):
            response = _Response(send)
            try:
                async for message in self._messages(call):
                    await response.add(message)
                return
            except _LOST as error:
                LOG.warning("%s: lost its replica: %s", named(scope), type(error).__name__)
                if isinstance(error, EngineFailedError):  # Ray drops dead replicas itself
                    call = call._replace(avoid=call.avoid | {error.replica_id})
            except (BackPressureError, DeploymentUnavailableError) as error:
                LOG.warning("%s: no replica takes it: %s", named(scope), error)
            if response.is_done:
                return
            if response.is_begun or delay is None:
                break
            await asyncio.sleep(delay)
        await response.fail(scope, receive)

    async def _messages(self, call: Call) -> AsyncGenerator[Message, None]:
        messages = self._respond.remote(call)
        try:
            async for message in messages:
                yield message
        except (asyncio.CancelledError, GeneratorExit):
            messages.cancel()  # the client disconnected
            raise


class _Response:
    """Response to a client, which begins with the first bytes of its body."""

    def __init__(self, send: Send):
        self._send, self._start = send, None
        self.is_begun, self.is_done = False, False

    async def add(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            # Ray's proxy adds the request id.
            kept = [pair for pair in message["headers"] if pair[0] != b"x-request-id"]
            self._start = {**message, "headers": kept}
            return
        if self._start is not None:
            self.is_begun = True
            await self._send(self._start)
            self._start = None
        await self._send(message)
        self.is_done = not message.get("more_body", False)

    async def fail(self, scope: Scope, receive: Receive) -> None:
        """End the response, a stream if it has begun, with an error."""
        error = ApiError(
            503,
            "The server lost the replica that ran this request. Send the request again.",
            headers={"retry-after": "8"},
        )
        if self.is_begun:
            body = _last_events(scope["path"], error)
            await self._send({"type": "http.response.body", "body": body})
        else:
            await error.response(scope["path"])(scope, receive, self._send)


def _last_events(path: str, error: ApiError) -> bytes:
    """Return the end of a stream after an error, in the format of the API of `path`."""
    if path.startswith("/v1/messages"):
        return event(anthropic.error(error.status, error.message), "error")
    if path.startswith("/v1/responses"):
        content = {"type": "error", "code": "server_error", "message": error.message, "param": None}
        return event(content, "error")
    return event(error.as_object()) + DONE
