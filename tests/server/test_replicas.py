"""A server with two replicas: texts, metrics, a replica that dies, and a signal."""

import json
import os
import signal
import threading
import time

import httpx
import psutil
import pytest
from server_process import Process

pytestmark = pytest.mark.soak
WORDS = (
    "--port 0 --dtype float32 --max-num-seqs 4 --decode-buckets 4 --prefill-buckets 64 "
    "--max-model-len 512"
)
ASKED = {"max_tokens": 12, "seed": 3, "temperature": 1.0}
LONG = {"max_tokens": 450, "temperature": 0, "ignore_eos": True, "stream": True}


def engines_of(process):
    """The processes of the replicas."""
    children = psutil.Process(process.pid).children(recursive=True)
    return [each for each in children if any("replica_process" in w for w in each.cmdline())]


def until(is_so, seconds=300):
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.05)


class Stream(threading.Thread):
    """Reads one stream: its events, and `begun`, which is set at the first."""

    def __init__(self, root, prompt):
        super().__init__(daemon=True)
        self.url, self.body = f"{root}/v1/completions", LONG | {"prompt": prompt}
        self.begun, self.events = threading.Event(), []
        self.start()

    def run(self):
        with httpx.stream("POST", self.url, json=self.body, timeout=240) as stream:
            for line in stream.iter_lines():
                if line.startswith("data: "):
                    self.events.append(line.removeprefix("data: "))
                    self.begun.set()


def counted(root, name):
    lines = httpx.get(f"{root}/metrics", timeout=60).text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith(f"{name}{{"))


@pytest.mark.parametrize("processes", [1, 2])
def test_texts_are_those_of_one_engine_and_a_dead_replica_ends_its_own_alone(
    short_model, reference, processes
):
    words = f"{WORDS} --data-parallel-size 2 --api-processes {processes}"
    with Process("-m", "jaxspec", "serve", str(short_model), *words.split()) as server:
        root = server.root
        engines = engines_of(server.process)
        assert len(engines) == 2

        for prompt in ("def f(", "import os", "x = ["):
            answer = httpx.post(f"{root}/v1/completions", json=ASKED | {"prompt": prompt})
            (output,) = reference.generate(prompt, params(reference))
            assert answer.json()["choices"][0]["text"] == output.outputs[0].text
        assert counted(root, "vllm:generation_tokens_total") >= 3
        assert counted(root, "vllm:request_success_total") == 3
        assert httpx.get(f"{root}/stats?steps=4").status_code == 200
        assert httpx.post(f"{root}/reset_prefix_cache").status_code == 200

        streams = [Stream(root, prompt) for prompt in ("def f(", "class A")]
        for stream in streams:
            assert stream.begun.wait(120)
        os.kill(engines[0].pid, signal.SIGKILL)
        for stream in streams:
            stream.join(240)
            assert not stream.is_alive()
        errors = [found for s in streams if (found := [e for e in s.events if '"error"' in e])]
        assert len(errors) == 1 and "Replica" in json.loads(errors[0][-1])["error"]["message"]
        assert sorted(stream.events[-1] == "[DONE]" for stream in streams)[1]
        assert httpx.get(f"{root}/health").status_code == 200
        assert httpx.get(f"{root}/ready").status_code == 200
        answer = httpx.post(f"{root}/v1/completions", json=ASKED | {"prompt": "a"}, timeout=240)
        assert answer.status_code == 200
        server.wait_for("is started again")
        until(lambda: len(engines_of(server.process)) == 2)

        family = psutil.Process(server.process.pid).children(recursive=True)
        server.process.send_signal(signal.SIGINT)
        assert server.process.wait(60) == 0
        _, alive = psutil.wait_procs(family, 30)
        assert not alive


def params(reference):
    found = reference.get_default_sampling_params()
    for name, value in ASKED.items():
        setattr(found, name, value)
    return found


def test_a_server_that_is_killed_leaves_no_replica(short_model):
    words = f"{WORDS} --no-warm-up -dp 2"
    with Process("-m", "jaxspec", "serve", str(short_model), *words.split()) as server:
        engines = engines_of(server.process)
        assert len(engines) == 2
        server.process.kill()
        _, alive = psutil.wait_procs(engines, 60)
        assert not alive
