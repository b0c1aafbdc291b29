"""ApiProcesses: what is asked of one process is known to all, and one that is gone ends the server.

How they end with a signal: test_run.py.
"""

import asyncio
import collections
import contextlib
import os
import signal
import socket
import time

import httpx
import pytest
from storms import storm, texts

from jaxspec.server.http.request_ids import LOG
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.api_processes import ApiProcesses


@contextlib.asynccontextmanager
async def fronted(llm, count):
    """So many processes before `llm`: they, the task that waits for their end, and where they are.

    The task must have ended, or the processes are told to end, before the block is left.
    """
    port, opened = socket.socket(), asyncio.Event()
    with port:
        port.bind(("127.0.0.1", 0))
        root = f"http://127.0.0.1:{port.getsockname()[1]}"
        front = ApiProcesses(llm, ServerOptions(api_processes=count), port)
        serving = asyncio.create_task(front.serve(opened.set))
        async with asyncio.timeout(180):
            await opened.wait()
            yield front, serving, root
            await serving


@pytest.mark.soak
def test_processes_share_a_port_and_their_stats_and_the_server_ends_when_one_is_gone(
    served, caplog
):
    async def counted(client, name):
        lines = (await client.get("/metrics")).text.splitlines()
        return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))

    async def run():
        async with fronted(served.llm, 2) as (front, serving, root):
            LOG.addHandler(caplog.handler)
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
            front._processes[0].kill()
            assert await serving is False
        assert "API process 1 of 2 ended by itself with status -9" in caplog.text
        assert [process.poll() is not None for process in front._processes] == [True, True]
        async with httpx.AsyncClient() as client:
            with pytest.raises(httpx.ConnectError):
                await client.get(root)

    try:
        asyncio.run(run())
    finally:
        LOG.removeHandler(caplog.handler)


@pytest.mark.soak
def test_a_process_that_hangs_holds_up_neither_stats_nor_an_end_at_once(served):
    async def run():
        async with fronted(served.llm, 2) as (front, serving, _):
            os.kill(front._processes[0].pid, signal.SIGSTOP)
            asked = time.monotonic()
            snapshot = await front._snapshot()
            assert snapshot.is_healthy and time.monotonic() - asked < 5
            front.end()
            front.end(now=True)
            assert await serving is True
            assert time.monotonic() - asked < 10
        assert all(process.returncode is not None for process in front._processes)

    asyncio.run(run())


@pytest.mark.soak
def test_a_start_that_is_given_up_leaves_no_process(served):
    async def run():
        with socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            front = ApiProcesses(served.llm, ServerOptions(api_processes=2), port)
            serving = asyncio.create_task(front.serve(lambda: None))
            while len(front._processes) < 2:
                await asyncio.sleep(0.001)
            serving.cancel()
            await asyncio.wait([serving])
        assert all(process.returncode is not None for process in front._processes)

    began = time.monotonic()
    asyncio.run(run())
    assert time.monotonic() - began < 12


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
                while any(engine_server._output_senders for engine_server in front._engine_servers):
                    await asyncio.sleep(0.02)
            front.end()
            assert await serving is True

    asyncio.run(run())
    assert happened["read"] > 60 and happened["left"] > 60 and happened["refused"] > 0, happened
    assert served.llm.kv_cache_usage == 0
