"""Replica process: an `AsyncLLM` that serves the process that started it.

`python -m jaxspec.api.processes.replica_process CHANNEL`: file descriptor of a socket to it.
"""

import asyncio
import contextlib
import os
import signal
import socket
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.processes.channel import Channel, portable
from jaxspec.api.processes.engine_server import RemoteEngineServer

_LOOK = 0.2  # seconds between checks for a failed step


def main(words: Sequence[str]) -> int:
    """Serve until the starting process sends `end` or exits; return the exit status."""
    for each in (signal.SIGTERM, signal.SIGINT):
        signal.signal(each, signal.SIG_IGN)  # the starting process handles signals
    return asyncio.run(serve(socket.socket(fileno=int(words[0]))))


async def serve(end: socket.socket) -> int:
    """Load the engine and serve it at the socket `end`.

    Returns:
        The exit status: 0; 1 if a step or the start failed. If the starting process is gone, the
        process exits at once, even while it loads or compiles.
    """
    channel, ending = await Channel.of(end), asyncio.Event()

    def gone(hearing: asyncio.Task[None]) -> None:
        if not ending.is_set():
            if (error := hearing.exception()) is not None:
                traceback.print_exception(error)
            os._exit(1)

    try:
        options: dict[str, Any] = await channel.receive_first()
        channel.handlers = {"end": ending.set}
        hearing = asyncio.create_task(channel.run())
        hearing.add_done_callback(gone)
        llm = await asyncio.to_thread(lambda: AsyncLLM(**options))
    except Exception as error:  # also of a pickle, for a class that this process can't import
        ending.set()
        channel.notify("start_failed", portable(error))
        await channel.finish()
        return 1
    calls = {"snapshot": llm.snapshot, "warm_up": llm.warm_up, "get_ready": llm.get_ready}
    RemoteEngineServer(llm, channel, calls)
    channel.notify("ready", llm.worker_spec())
    await _until_end(llm, ending)
    ending.set()
    await llm.close()
    await channel.finish()
    return 0 if llm.error is None else 1


async def _until_end(llm: AsyncLLM, ending: asyncio.Event) -> None:
    """Wait for the end, or for a failed step, which is printed."""
    while llm.error is None:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_LOOK):
                await ending.wait()
                return
    traceback.print_exception(llm.error)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
