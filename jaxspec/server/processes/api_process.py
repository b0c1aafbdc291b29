"""An API process: the server's app around a `RemoteLLM`; the engine's process starts and ends it.

`python -m jaxspec.server.processes.api_process CHANNEL PORT`: the file descriptors of a socket to
the engine's process, and of one that is bound to the port.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence

import jax

from jaxspec.async_errors import EngineGoneError
from jaxspec.server.app import app_of
from jaxspec.server.figures import Figures
from jaxspec.server.http_server import HttpServer, event_loop
from jaxspec.server.processes.brief import Brief
from jaxspec.server.processes.channel import Channel
from jaxspec.server.processes.remote_llm import RemoteLLM
from jaxspec.server.service import Service
from jaxspec.server.snapshot import loop_lag


def main(words: Sequence[str]) -> int:
    """Serve until the engine's process says that it ends, or is gone; the exit status."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # they are the engine's process's to hear
    jax.config.update("jax_platforms", "cpu")  # the device is the engine's alone
    end, port = (socket.socket(fileno=int(word)) for word in words)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        return runner.run(serve(end, port))


async def serve(end: socket.socket, port: socket.socket) -> int:
    """Serve at the bound socket `port`; `end` leads to the engine's process.

    Returns:
        The exit status: 0; 1 if the engine's process was gone before it said anything.
    """
    channel = await Channel.of(end)
    try:
        brief: Brief = await channel.hear_first()
    except (EOFError, ConnectionError):
        return 1
    llm, figures = RemoteLLM(brief.engine, channel), Figures()
    service = Service(llm, brief.options, figures, llm, created=brief.created)
    server = HttpServer(app_of(service), brief.options)

    async def count() -> tuple[Figures, float]:
        return figures, await loop_lag()

    def drain() -> None:
        service.is_draining = True

    def stop(now: bool) -> None:
        server.end(now=now)

    channel.handlers = {
        **channel.handlers,
        "figures": count,
        "drain": drain,
        "engine_failed": llm.end,
        "end": stop,
    }

    def gone(hearing: asyncio.Task[None]) -> None:
        """The engine's process ended, however that came."""
        if not hearing.cancelled():
            hearing.exception()
        llm.end(EngineGoneError())
        server.end(now=True)

    hearing = asyncio.create_task(channel.run())
    hearing.add_done_callback(gone)
    await server.serve_at(port, lambda: channel.tell("ready"))
    hearing.cancel()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
