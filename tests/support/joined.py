"""A RemoteLLM and the desk that serves it in one process, joined by a channel as two would be."""

import asyncio
import contextlib
import socket

from jaxspec.server.figures import Figures
from jaxspec.server.processes.channel import Channel
from jaxspec.server.processes.desk import Desk
from jaxspec.server.processes.remote_llm import RemoteLLM
from jaxspec.server.snapshot import LocalWatch


class Joined(RemoteLLM):
    """A RemoteLLM that brings the other side along; `close` ends both, but not the engine."""

    desk: Desk
    hearing: list[asyncio.Task]

    async def close(self):
        self._channel.hang_up()
        await asyncio.wait(self.hearing)


async def join(llm) -> Joined:
    """A RemoteLLM of an AsyncLLM, in the event loop that runs."""
    near, far = map(Channel.of, socket.socketpair())
    near, far = await near, await far
    watch = LocalWatch(llm, Figures())
    desk = Desk(llm, far, watch.snapshot, watch.last_steps)
    remote = Joined(llm.elsewhere(1), near)
    remote.desk = desk
    remote.hearing = [asyncio.create_task(each.run()) for each in (desk, near)]
    return remote


@contextlib.asynccontextmanager
async def joined(llm):
    """`join`, and its end."""
    remote = await join(llm)
    try:
        yield remote
    finally:
        await remote.close()
