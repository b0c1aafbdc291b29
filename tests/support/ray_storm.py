"""A program: 200 requests to two replicas on Ray, of which one is killed while they run.

`python ray_storm.py MODEL RESULT` writes what its clients got, beside what `LLM` gives, as JSON. It
runs in a process of its own, because Ray starts others and sets signal handlers.
"""

import asyncio
import collections
import contextlib
import json
import random
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path

import httpx
import psutil
import ray
from ray import serve

from jaxspec import LLM, SamplingParams
from jaxspec.ray import app

OPTIONS = {
    "dtype": "float32",
    "max_num_seqs": 8,
    "decode_buckets": [8],
    "prefill_buckets": [64],
    "max_model_len": 256,
    "num_speculative_tokens": 2,
}
NUM_REQUESTS, NUM_BEFORE = 200, 40  # all, and those answered before a replica is killed
KEY = "a key"
PROMPTS = ["def fibonacci(n):", "import os\n", "for i in range(", "class Stack:\n", "x = '"]


def body_of(number):
    draw = random.Random(number)
    return {
        "prompt": f"# {draw.randrange(20)}\n{draw.choice(PROMPTS)}",
        "max_tokens": draw.randint(8, 40),
        "temperature": draw.choice([0.0, 0.8]),
        "seed": number,
        "ignore_eos": True,
    }


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def replicas():
    """Processes of this cluster's replicas, by the names that Ray gives to them."""
    found = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            if "ServeReplica:default:Replica" in " ".join(process.cmdline()):
                found.append(process)
    return found


class Clients:
    """All clients of the storm, and the death of a replica in its middle."""

    def __init__(self, root):
        headers = {"authorization": f"Bearer {KEY}"}
        limits = httpx.Limits(max_connections=32)
        self.http = httpx.AsyncClient(
            base_url=root, headers=headers, timeout=900, limits=limits, trust_env=False
        )
        self.num_answered, self.errors = 0, collections.Counter()
        self.killed = None

    async def run(self):
        async with self.http:
            work = [self.answer(number) for number in range(NUM_REQUESTS)]
            return await asyncio.gather(*work)

    async def answer(self, number):
        """The text, asked for again after an error that says that the replica was lost."""
        ask = self.streamed if number % 2 else self.whole
        while (text := await ask(body_of(number))) is None:
            await asyncio.sleep(1)
        self.num_answered += 1
        if self.num_answered == NUM_BEFORE:
            victim = random.Random(0).choice(replicas())
            self.killed = victim.pid
            victim.send_signal(signal.SIGKILL)
        return text

    async def whole(self, body):
        response = await self.http.post("/v1/completions", json=body)
        if response.status_code == 200:
            return response.json()["choices"][0]["text"]
        return self.note(response.json(), response.status_code)

    async def streamed(self, body):
        text, is_done = "", False
        request = self.http.stream("POST", "/v1/completions", json=body | {"stream": True})
        async with request as response:
            if response.status_code != 200:
                return self.note(json.loads(await response.aread()), response.status_code)
            async for line in response.aiter_lines():
                if line == "data: [DONE]":
                    is_done = True
                elif line.startswith("data: "):
                    event = json.loads(line.removeprefix("data: "))
                    if "error" in event:
                        return self.note(event, "in a stream")
                    text += "".join(choice["text"] for choice in event["choices"])
        assert is_done, "a stream ended without [DONE]"
        return text

    def note(self, answer, place):
        self.errors[f"{place}: {answer['error']['message']}"] += 1
        return None


def refused_before_its_body(port):
    """Status line of a request with a wrong key, of whose body nothing is sent."""
    with socket.create_connection(("127.0.0.1", port), timeout=120) as link:
        link.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: a\r\nauthorization: Bearer wrong\r\n"
            b"content-type: application/json\r\ncontent-length: 1000000\r\n\r\n"
        )
        return link.makefile("rb").readline().decode()


def main(model, result):
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="ray-", dir="/tmp") as folder:  # sockets: a short path
        ray.init(
            num_cpus=2,
            include_dashboard=False,
            object_store_memory=200 * 2**20,
            _node_ip_address="127.0.0.1",
            _temp_dir=folder,
        )
        try:
            with contextlib.suppress(TimeoutError):  # after 60 s; `serve.run` waits longer
                serve.start(http_options={"host": "127.0.0.1", "port": port})
            mine = {"num_replicas": 2, "num_gpus": 0, "num_cpus": 0.5, "api_key": KEY}
            serve.run(app({"model": model, **OPTIONS, **mine}))
            before = {process.pid for process in replicas()}
            clients = Clients(f"http://127.0.0.1:{port}")
            found = {
                "unauthorized": refused_before_its_body(port),
                "health": httpx.get(f"http://127.0.0.1:{port}/health", timeout=300).status_code,
                "texts": asyncio.run(clients.run()),
                "errors": clients.errors,
            }
            while len(after := {process.pid for process in replicas()} - {clients.killed}) < 2:
                time.sleep(1)
            found["replicas"] = [len(before), len(after), len(after - before)]
        finally:
            serve.shutdown()
            ray.shutdown()
    options = {name: OPTIONS[name] for name in OPTIONS if name != "num_speculative_tokens"}
    bodies = [body_of(number) for number in range(NUM_REQUESTS)]
    prompts = [body.pop("prompt") for body in bodies]
    params = [SamplingParams(**body) for body in bodies]
    with LLM(model, speculative_config={"num_speculative_tokens": 2}, **options) as llm:
        outputs = llm.generate(prompts, params, use_tqdm=False)
    found["wanted"] = [output.outputs[0].text for output in outputs]
    Path(result).write_text(json.dumps(found))


if __name__ == "__main__":
    main(*sys.argv[1:])
