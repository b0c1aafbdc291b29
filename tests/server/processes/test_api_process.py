"""One API process, its end of the channel in the test's hands."""

import asyncio
import os
import pathlib
import socket
import subprocess
import sys

import httpx
from fake_llm_engine import FakeLLMEngine

from jaxspec.api.async_calls import WorkerSpec
from jaxspec.api.inputs import InputProcessor
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.api.processes.channel import Channel
from jaxspec.engine.errors import DrainingError, EngineDeadError
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.api_process import WorkerConfig
from jaxspec.text.tokenizer import Tokenizer

PROGRAM = "jaxspec.server.processes.api_process"


def worker_config():
    inputs = InputProcessor(
        Tokenizer(EMBEDDED_MODEL),
        vocab_size=2048,
        max_model_len=64,
        eos_ids=(0,),
        seed=0,
    )
    fake = FakeLLMEngine()
    engine = WorkerSpec(inputs.twin(1), "some/model", fake.shapes, fake.limits)
    return WorkerConfig(ServerOptions(), engine, 1_700_000_000)


def with_process(test):
    """Run `test(channel, root, process)`; the process is ready."""

    async def within():
        own, other = socket.socketpair()
        with other, socket.socket() as port:
            port.bind(("127.0.0.1", 0))
            root = f"http://127.0.0.1:{port.getsockname()[1]}"
            process = subprocess.Popen(
                [sys.executable, "-m", PROGRAM, str(other.fileno()), str(port.fileno())],
                pass_fds=(other.fileno(), port.fileno()),
                env={**os.environ, "PYTHONPATH": str(pathlib.Path.cwd())},
                stderr=subprocess.DEVNULL,
            )
        channel, ready = await Channel.of(own), asyncio.Event()
        channel.handlers = {"ready": ready.set}
        channel.notify("config", worker_config())
        hearing = asyncio.create_task(channel.run())
        try:
            async with asyncio.timeout(60):
                await ready.wait()
                async with httpx.AsyncClient(base_url=root, timeout=30) as client:
                    await test(channel, client, process)
                assert await asyncio.to_thread(process.wait, 20) == 0
        finally:
            process.kill()
            process.wait()
            await hearing

    asyncio.run(within())


def test_it_answers_by_what_the_engine_s_process_says_and_ends_when_told():
    async def test(channel, client, process):
        async def refuse(number):
            raise DrainingError

        channel.handlers = {**channel.handlers, "expect": refuse, "abort": print}
        (model,) = (await client.get("/v1/models")).json()["data"]
        assert (model["id"], model["created"]) == ("some/model", 1_700_000_000)
        assert (await client.get("/ready")).status_code == 200
        asked = {"prompt": "a", "max_tokens": 3}
        refused = await client.post("/v1/completions", json=asked)
        assert refused.status_code == 503 and "drains" in refused.text
        bad = await client.post("/v1/completions", json={**asked, "top_p": 7})
        assert bad.status_code == 400
        metrics, lag = await channel.call("metrics")
        assert lag >= 0
        assert metrics.rejections == {"draining": 1}
        channel.notify("drain")
        await channel.call("metrics")  # behind it
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        channel.notify("engine_failed", EngineDeadError(OSError("planted")))
        await channel.call("metrics")
        assert (await client.get("/health")).status_code == 503
        channel.notify("end", False)

    with_process(test)


def test_signals_are_the_engine_s_process_s_and_without_it_nothing_goes_on():
    async def test(channel, client, process):
        process.terminate()
        assert (await client.get("/health")).status_code == 200
        channel.close()

    with_process(test)


def test_one_that_nobody_speaks_to_ends_without_a_word():
    own, other = socket.socketpair()
    with socket.socket() as port, other:
        port.bind(("127.0.0.1", 0))
        own.close()
        ends = other.fileno(), port.fileno()
        found = subprocess.run(
            [sys.executable, "-m", PROGRAM, *map(str, ends)],
            pass_fds=ends,
            env={**os.environ, "PYTHONPATH": str(pathlib.Path.cwd())},
            capture_output=True,
            timeout=60,
        )
    assert (found.returncode, found.stderr) == (1, b"")
