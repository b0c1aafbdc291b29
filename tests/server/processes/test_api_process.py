"""One API process, its end of the channel in the test's hands."""

import asyncio
import os
import pathlib
import socket
import subprocess
import sys

import httpx
from fake_llm_engine import FakeLLMEngine

from jaxspec.async_errors import DrainingError, EngineDeadError
from jaxspec.async_llm import Elsewhere
from jaxspec.inputs import InputProcessor
from jaxspec.loading import EMBEDDED_MODEL
from jaxspec.sampling_params import SamplingParams
from jaxspec.server.options import ServerOptions
from jaxspec.server.processes.channel import Channel
from jaxspec.server.processes.remote_llm import Brief
from jaxspec.tokenizer import Tokenizer

PROGRAM = "jaxspec.server.processes.api_process"


def brief():
    inputs = InputProcessor(
        Tokenizer(EMBEDDED_MODEL),
        vocab_size=2048,
        max_model_len=64,
        eos_ids=(0,),
        request_key=lambda prompt, seed: 0,
        seed=0,
    )
    shapes = FakeLLMEngine().shapes
    return Brief(ServerOptions(), Elsewhere(inputs.twin(1), "some/model", shapes, SamplingParams()))


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
        told = brief()

        async def tell_brief():
            return told

        channel.handlers = {"brief": tell_brief, "ready": ready.set}
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
        async def refuse(number, requests):
            raise DrainingError

        channel.handlers = {**channel.handlers, "take_over": refuse}
        assert (await client.get("/v1/models")).json()["data"][0]["id"] == "some/model"
        assert (await client.get("/ready")).status_code == 200
        asked = {"prompt": "a", "max_tokens": 3}
        refused = await client.post("/v1/completions", json=asked)
        assert refused.status_code == 503 and "drains" in refused.text
        bad = await client.post("/v1/completions", json={**asked, "top_p": 7})
        assert bad.status_code == 400  # which the engine's process never hears of
        figures = await channel.ask("figures")
        assert figures.rejections == {"draining": 1}
        channel.tell("drain")
        await channel.ask("figures")  # behind it
        assert (await client.get("/ready")).status_code == 503
        assert (await client.get("/health")).status_code == 200
        channel.tell("engine_failed", EngineDeadError(OSError("planted")))
        await channel.ask("figures")
        assert (await client.get("/health")).status_code == 503
        channel.tell("end", False)

    with_process(test)


def test_signals_are_the_engine_s_process_s_and_without_it_nothing_goes_on():
    async def test(channel, client, process):
        process.terminate()
        assert (await client.get("/health")).status_code == 200
        channel.hang_up()

    with_process(test)
