"""The server's life in a process of its own: signals, the port, exit statuses."""

import asyncio
import signal
import sys
import threading
import time

import httpx
import pytest
from pairwise import soak
from scripted_llm import ScriptedLLM
from server_process import Process

from jaxspec.server.options import ServerOptions
from jaxspec.server.run import serve

SCRIPTED = """
import asyncio, sys
from scripted_llm import ScriptedLLM
from jaxspec.server.options import ServerOptions
from jaxspec.server.run import serve

class Slow(ScriptedLLM):
    async def drain(self, timeout):
        await asyncio.sleep(600)

sys.exit(asyncio.run(serve(lambda: Slow(["a"] * 10, "x"), ServerOptions(port=0))))
"""


FAILING = """
import asyncio, sys
from scripted_llm import ScriptedLLM
from jaxspec.engine.errors import EngineDeadError, ReplicasDeadError
from jaxspec.server.options import ServerOptions
from jaxspec.server.run import serve

class Failing(ScriptedLLM):
    async def submit_chat(self, *given, **options):
        self.is_healthy, self.error = False, ERROR
        raise EngineDeadError(self.error)

ERROR, is_asked = OPTIONS
options = ServerOptions(port=0, exit_on_failure=is_asked)
sys.exit(asyncio.run(serve(lambda: Failing(["a"], "x"), options)))
"""


@pytest.mark.soak
@pytest.mark.parametrize("processes", [1, soak(2)])
def test_after_sigterm_streams_end_well_new_requests_get_503_and_the_status_is_0(
    short_model, processes
):
    options = (
        f"--api-processes {processes} "
        "--port 0 --no-warm-up --dtype float32 --max-num-seqs 4 --decode-buckets 4 "
        "--prefill-buckets 64 --max-model-len 256 --num-speculative-tokens 0"
    )
    body = {"prompt": "x = [", "max_tokens": 120, "stream": True, "ignore_eos": True}
    with Process("-m", "jaxspec", "serve", str(short_model), *options.split()) as server:
        texts, refused = [""] * 4, []

        def read(number):
            with httpx.stream(
                "POST", f"{server.root}/v1/completions", json=body, timeout=240
            ) as stream:
                for line in stream.iter_lines():
                    texts[number] += line

        readers = [threading.Thread(target=read, args=(number,)) for number in range(4)]
        for reader in readers:
            reader.start()
        while not all(texts):
            assert any(reader.is_alive() for reader in readers), server.lines
            time.sleep(0.01)
        assert httpx.get(f"{server.root}/ready").status_code == 200
        server.process.send_signal(signal.SIGTERM)
        server.wait_for("(Ending)")
        try:
            refused = [
                httpx.post(f"{server.root}/v1/completions", json={"prompt": "a"}, timeout=30),
                httpx.get(f"{server.root}/ready"),
            ]
        except httpx.ConnectError:
            assert not any(reader.is_alive() for reader in readers)  # all had ended meanwhile
        for reader in readers:
            reader.join(120)
        assert server.process.wait(60) == 0
        assert all(text.endswith("data: [DONE]") and '"length"' in text for text in texts)
        assert [each.status_code for each in refused] in ([503, 503], [])
        if refused:
            assert refused[0].headers["retry-after"] and "drains" in refused[0].text


def test_a_second_signal_ends_at_once():
    with Process("-c", SCRIPTED) as server:
        server.process.send_signal(signal.SIGINT)
        server.wait_for("(Ending)")
        assert server.process.poll() is None
        server.process.send_signal(signal.SIGTERM)
        assert server.process.wait(20) == 0


def test_a_port_that_is_taken_is_told_before_a_model_is_loaded():
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]

        def never():
            raise AssertionError("a model was loaded")

        with pytest.raises(OSError, match=f"can't listen at 127.0.0.1:{port}"):
            asyncio.run(serve(never, ServerOptions(port=port)))


def test_threads_take_turns_more_often_while_it_serves():
    """So the engine's thread does not wait for all texts of a step."""
    before, seen = sys.getswitchinterval(), []

    def look():
        seen.append(sys.getswitchinterval())
        raise KeyError

    with pytest.raises(KeyError):
        asyncio.run(serve(look, ServerOptions(port=0)))
    assert seen == [pytest.approx(0.0005)] and sys.getswitchinterval() == before


@pytest.mark.soak
@pytest.mark.parametrize(
    "error, is_asked",
    [('OSError("planted")', True), ("ReplicasDeadError(1, 2, 3, 'ended')", False)],
)
def test_after_a_failed_step_the_process_ends_with_status_1_if_that_is_asked_for(error, is_asked):
    """With replicas always: one has ended repeatedly, and nothing would start it again."""
    with Process("-c", FAILING.replace("OPTIONS", f"{error}, {is_asked}")) as server:
        assert httpx.get(f"{server.root}/health", timeout=30).status_code == 200
        body = {"messages": [{"role": "user", "content": "a"}]}
        found = httpx.post(f"{server.root}/v1/chat/completions", json=body, timeout=30)
        assert found.status_code == 503
        assert server.process.wait(20) == 1
        server.wait_for("(The engine failed)")


def test_a_model_without_a_tokenizer_is_refused_before_it_is_compiled():
    class Mute(ScriptedLLM):
        def __init__(self):
            self.tokenizer = None

        async def get_ready(self):
            raise AssertionError("it was compiled")

    with pytest.raises(ValueError, match="A server needs the model's tokenizer"):
        asyncio.run(serve(Mute, ServerOptions(port=0, api_processes=2)))
