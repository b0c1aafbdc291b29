"""An API process: the server's app around a `RemoteLLM`; the engine's process starts and ends it.

`python -m jaxspec.server.processes.api_process CHANNEL PORT`: the file descriptors of a socket to
the engine's process, and of one that is bound to the port.
"""

import asyncio
import signal
import socket
import sys
from collections.abc import Sequence

from jaxspec.async_errors import EngineDeadError
from jaxspec.server.app import make_app
from jaxspec.server.figures import Figures
from jaxspec.server.http_server import HttpServer, event_loop
from jaxspec.server.processes.channel import Channel
from jaxspec.server.processes.remote_llm import Brief, RemoteLLM


def main(words: Sequence[str]) -> None:
    """Serve until the engine's process says that it ends, or is gone."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # they are the engine's process's to hear
    end, port = (socket.socket(fileno=int(word)) for word in words)
    with asyncio.Runner(loop_factory=event_loop) as runner:
        runner.run(serve(end, port))


async def serve(end: socket.socket, port: socket.socket) -> None:
    """Serve at the bound socket `port`; `end` leads to the engine's process."""
    channel = await Channel.of(end)
    hearing = asyncio.create_task(channel.run())
    brief: Brief = await channel.ask("brief")
    llm = RemoteLLM(brief.engine, channel)
    app = make_app(llm, brief.options)
    service = app.state.service
    server = HttpServer(app, brief.options)

    async def figures() -> Figures:
        return service.figures

    def drain() -> None:
        service.is_draining = True

    def stop(now: bool) -> None:
        server.end(now=now)

    channel.handlers = {
        **channel.handlers,
        "figures": figures,
        "drain": drain,
        "engine_failed": llm.end,
        "end": stop,
    }

    def gone(hearing: asyncio.Task[None]) -> None:
        """The engine's process ended, however that came."""
        llm.end(EngineDeadError(hearing.exception() or ConnectionResetError("it is gone")))
        server.end(now=True)

    hearing.add_done_callback(gone)
    await server.serve_at(port, lambda: channel.tell("ready"))
    hearing.remove_done_callback(gone)
    hearing.cancel()


if __name__ == "__main__":
    main(sys.argv[1:])
