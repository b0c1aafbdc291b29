"""API process: the server's app around a `RemoteLLM`, started and ended by the engine's process.

`python -m jaxspec.server.processes.api_process CHANNEL PORT`: file descriptors of a socket to the
engine's process and of a socket bound to the port.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence
from typing import NamedTuple

import jax

from jaxspec.api.async_calls import WorkerSpec
from jaxspec.api.processes.channel import Channel
from jaxspec.engine.errors import EngineGoneError
from jaxspec.server.app import app_of
from jaxspec.server.generation.service import Service
from jaxspec.server.http.http_server import HttpServer, event_loop
from jaxspec.server.metrics.server_metrics import ServerMetrics
from jaxspec.server.metrics.snapshot import loop_lag
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.remote_llm import RemoteLLM


class WorkerConfig(NamedTuple):
    """Configuration of an API process; picklable."""

    options: ServerOptions
    engine: WorkerSpec
    created: int  # `Service.created`, the same in all processes


def main(words: Sequence[str]) -> int:
    """Serve until the engine's process sends `end` or exits; return the exit status."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # the engine's process handles signals
    jax.config.update("jax_platforms", "cpu")  # only the engine's process uses the device
    end, port = (socket.socket(fileno=int(word)) for word in words)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(serve(end, port))


async def serve(end: socket.socket, port: socket.socket) -> int:
    """Serve at the bound socket `port`; `end` is the socket to the engine's process.

    Returns:
        The exit status: 0; 1 if the engine's process exited before it sent the configuration.
    """
    channel = await Channel.of(end)
    try:
        worker_config: WorkerConfig = await channel.receive_first()
    except (EOFError, ConnectionError):
        return 1
    llm, metrics = RemoteLLM(worker_config.engine, channel), ServerMetrics()
    service = Service(llm, worker_config.options, metrics, llm, created=worker_config.created)
    server = HttpServer(app_of(service), worker_config.options)

    async def count() -> tuple[ServerMetrics, float]:
        return metrics, await loop_lag()

    def drain() -> None:
        service.is_draining = True

    channel.handlers = {
        **channel.handlers,
        "metrics": count,
        "drain": drain,
        "engine_failed": llm.end,
        "engine_ready": llm.note_ready,
        "end": lambda now: server.end(now=now),
    }

    def gone(hearing: asyncio.Task[None]) -> None:
        """Shut down: the engine's process has exited, or the channel failed."""
        if not hearing.cancelled():
            hearing.exception()
        llm.end(EngineGoneError())
        server.end(now=True)

    hearing = asyncio.create_task(channel.run())
    hearing.add_done_callback(gone)
    await server.serve_at(port, lambda: channel.notify("ready"))
    hearing.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
