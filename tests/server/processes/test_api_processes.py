"""ApiProcesses: what is asked of one process is known to all, and one that is gone ends the server.

How they end with a signal: test_run.py.
"""

import asyncio
import collections
import contextlib
import socket

import httpx
import pytest
from storms import storm, texts

from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.api_processes import ApiProcesses


def ports(count):
    found = [socket.socket() for _ in range(count)]
    for each in found:
        each.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        each.bind(("127.0.0.1", found[0].getsockname()[1]))
    return found


@contextlib.asynccontextmanager
async def fronted(llm, count):
    """So many processes before `llm`: they, the task that waits for their end, and where they are.

    The task must have ended, or the processes are told to end, before the block is left.
    """
    with contextlib.ExitStack() as kept:
        bound, opened = ports(count), asyncio.Event()
        for each in bound:
            kept.enter_context(each)
        front = ApiProcesses(llm, ServerOptions(), bound)
        serving = asyncio.create_task(front.serve(opened.set))
        async with asyncio.timeout(180):
            await opened.wait()
            yield front, serving, f"http://127.0.0.1:{bound[0].getsockname()[1]}"
            await serving


def test_processes_share_a_port_and_their_figures_and_the_server_ends_when_one_is_gone(served):
    async def counted(client, name):
        lines = (await client.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    async def run():
        async with fronted(served.llm, 2) as (front, serving, root):
            texts = set()
            for _ in range(20):  # each by a connection of its own
                async with httpx.AsyncClient(base_url=root, timeout=60) as client:
                    body = {"prompt": "def f(", "max_tokens": 4, "temperature": 0}
                    found = await client.post("/v1/completions", json=body)
                    texts.add(found.json()["choices"][0]["text"])
                    assert await counted(client, "vllm:num_requests_running") == 0
            assert len(texts) == 1
            async with httpx.AsyncClient(base_url=root, timeout=60) as client:
                assert await counted(client, "vllm:request_success_total") == 20
                assert await counted(client, "vllm:prompt_tokens_total") > 20
            served_by = [await desk.channel.ask("figures") for desk in front._desks]
            assert all(sum(each.ends.values()) for each in served_by), "one process did nothing"
            front._processes[0].kill()
            assert await serving is False
        assert [process.poll() is not None for process in front._processes] == [True, True]

    asyncio.run(run())


@pytest.mark.soak
def test_a_storm_over_three_processes_leaves_nothing_and_every_text_is_right(served, reference):
    want, happened = texts(reference), collections.Counter()

    async def run():
        nonlocal happened
        async with fronted(served.llm, 3) as (front, serving, root):
            for seed in range(2):
                happened += await storm(root, seed, want)
            while served.llm.num_running or served.llm.num_waiting:
                await asyncio.sleep(0.02)
            async with asyncio.timeout(30):
                while any(desk._outboxes for desk in front._desks):
                    await asyncio.sleep(0.02)
            front.end()
            assert await serving is True

    asyncio.run(run())
    assert happened["read"] > 60 and happened["left"] > 60 and happened["refused"] > 0, happened
    assert served.llm.kv_cache_usage == 0
