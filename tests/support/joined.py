"""A RemoteLLM and the engine server in one process, joined by a channel as two would be."""

import asyncio
import contextlib
import socket

from jaxspec.api.processes.channel import Channel
from jaxspec.api.processes.engine_server import RemoteEngineServer
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.snapshot import LocalWatch
from jaxspec.server.processes.remote_llm import RemoteLLM


class Joined(RemoteLLM):
    """A RemoteLLM that brings the other side along; `close` ends both, but not the engine."""

    engine_server: RemoteEngineServer
    hearing: list[asyncio.Task]

    async def close(self):
        self._channel.close()
        await asyncio.wait(self.hearing)


async def join(llm) -> Joined:
    """A RemoteLLM of an AsyncLLM, in the event loop that runs."""
    near, far = map(Channel.of, socket.socketpair())
    near, far = await near, await far
    watch = LocalWatch(llm, ServerMetrics())
    handlers = {"snapshot": watch.snapshot, "last_steps": watch.last_steps}
    engine_server = RemoteEngineServer(llm, far, handlers)
    remote = Joined(llm.worker_spec(1), near)
    remote.engine_server = engine_server
    remote.hearing = [asyncio.create_task(each.run()) for each in (engine_server, near)]
    return remote


@contextlib.asynccontextmanager
async def joined(llm):
    """`join`, and its end."""
    remote = await join(llm)
    try:
        yield remote
    finally:
        await remote.close()
