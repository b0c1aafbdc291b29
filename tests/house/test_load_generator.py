"""The load generator: what requests are, when they are sent, and how their outputs are timed."""

import asyncio
import contextlib
import json
import socketserver
import threading
import time
import types

import numpy as np
import pytest
from stepped_llm import SteppedLLM

from benchmarks.engine import load_generator, workload
from benchmarks.engine.http_client import HTTPClient
from benchmarks.engine.load_generator import AsyncLLMClient, Request, run, serve
from jaxspec import SamplingParams
from jaxspec.requests.request import Finish


def test_the_trace_is_the_one_that_other_engines_served():
    requests = workload.lengths("trace")
    assert len(requests) == 256 and requests[:2] == [(289, 224), (1429, 479)]
    assert sum(prompt for prompt, _ in requests) == 154_950
    assert workload.lengths("trace", 3) == requests[:3]
    assert workload.lengths("1024x32", 2) == [(1024, 32)] * 2


@pytest.mark.parametrize("name", ["traces", "1024", "0x32", "8x-1", "x"])
def test_lengths_that_mean_nothing_are_refused(name):
    with pytest.raises(ValueError, match='as "8192x1024", got'):
        workload.lengths(name)


def test_a_longer_trace_than_there_is_is_refused():
    with pytest.raises(ValueError, match="has 256 requests, and 257 were asked for"):
        workload.lengths("trace", 257)


def test_requests_are_the_same_each_time():
    first, again = (workload.prompts([(3, 1), (5, 1)], 100) for _ in range(2))
    assert first == again and [len(ids) for ids in first] == [3, 5]
    assert {id for ids in first for id in ids} <= set(range(100))


def test_arrivals_are_poisson():
    """The gaps are exponential: their mean is that asked for, and as large as their deviation."""
    arrivals = workload.poisson(4000, 50.0)
    assert arrivals[0] == 0 and arrivals == workload.poisson(4000, 50.0)
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05)
    assert gaps.std() == pytest.approx(1 / 50, rel=0.1)


def requests(*tokens):
    return [Request([1] * 10, count) for count in tokens]


def stepped(monkeypatch, **options):
    llm = SteppedLLM(**options)
    llm.set_clock(monkeypatch, load_generator)
    return llm


def test_a_closed_loop_has_so_many_requests_at_a_time(monkeypatch):
    """Two places and one row: 3 tokens, then 2, then 1. The third comes when the first ends."""
    llm = stepped(monkeypatch, rows=1)
    served = serve(llm, requests(3, 2, 1), at_once=2)
    assert llm.num_there == [2, 2, 2, 2, 2, 1]
    assert [metrics.ttft for metrics in served.metrics] == [1, 4, 3]
    assert served.seconds == 6 and sorted(served.gaps) == [1, 1, 1]
    assert served.ttft == [1, 4, 3] and served.tokens == 6
    assert [answer.tpot for answer in served.answers.values()] == [1, 1, None]


def test_time_to_the_first_token_counts_from_when_a_request_was_due(monkeypatch):
    """The second comes within a step and waits for its end; the third finds nobody there."""
    llm = stepped(monkeypatch, rows=2)
    served = serve(llm, requests(1, 1, 1), arrivals=[0, 0.25, 5])
    assert [metrics.ttft for metrics in served.metrics] == [1, 1.75, 1]
    assert served.seconds == 6 and served.gaps == []


def test_a_request_that_ends_early_is_no_measurement(monkeypatch):
    with pytest.raises(RuntimeError, match="ended early"):
        serve(stepped(monkeypatch, end=Finish.ABORT), requests(3), at_once=1)


def test_an_async_llm_has_a_task_per_request_and_raises_its_error():
    """Portions of two tokens, of all requests at once."""

    async def deltas(params):
        for _ in range(params.max_tokens // 2):
            await asyncio.sleep(0.001)
            yield types.SimpleNamespace(token_ids=[7, 8])
        if params.max_tokens > 9:
            raise ValueError("no")

    async def submit(prompt, params):
        return deltas(params)

    llm = types.SimpleNamespace(submit=submit)
    with asyncio.Runner() as runner:
        asked = [([1], SamplingParams(max_tokens=n)) for n in (4, 8, 10)]
        served = run(AsyncLLMClient(llm, runner, asked[:2]), 2)
        assert served.tokens == 12 and len(served.gaps) == 4 and min(served.ttft) > 0
        later = run(AsyncLLMClient(llm, runner, asked[:2]), 2, arrivals=[0, 0.05])
        assert later.seconds > 0.05
        with pytest.raises(ValueError, match="no"):
            run(AsyncLLMClient(llm, runner, asked), 3)


HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(content):
    data = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(finish=None):
    return chunk({"choices": [{"index": 0, "text": " ab", "finish_reason": finish}]})


USAGE = chunk({"choices": [], "usage": {"completion_tokens": 5}})


@contextlib.contextmanager
def server_of(answer):
    """A server that answers every request with the same pieces; its port and what was asked."""
    seen = []

    class Handler(socketserver.StreamRequestHandler):
        def head(self):
            lines = []
            while (line := self.rfile.readline()) not in (b"", b"\r\n"):
                lines.append(line)
            return b"".join(lines)

        def handle(self):
            while head := self.head():
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                seen.append(json.loads(self.rfile.read(length)))
                for piece in answer:
                    self.wfile.write(piece)
                    time.sleep(0.005)
                if not b"".join(answer).endswith(END):
                    break

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server.server_address[1], seen
        finally:
            server.shutdown()
            thread.join()


def asked_of(answer, count, at_once):
    bodies = [{"prompt": [number]} for number in range(count)]
    with server_of(answer) as (port, seen), HTTPClient(port, bodies, at_once) as client:
        return run(client, count, at_once=at_once), seen


def test_all_requests_are_asked_and_portions_are_chunks_with_text():
    """Neither the head nor the usage is one. An end comes in two pieces; connections are kept."""
    pieces = [HEAD, text(), text() + text("length"), USAGE + END[:2], END[2:]]
    served, seen = asked_of(pieces, 5, at_once=2)
    assert sorted(body["prompt"] for body in seen) == [[number] for number in range(5)]
    assert served.tokens == 25
    assert all(1 <= len(answer.times) <= 2 for answer in served.answers.values())
    assert min(served.ttft) > 0 and sum(served.gaps) / 2 < served.seconds


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + END], "refuses: .*503"),
        ([HEAD, text()], "connection ended"),
        ([HEAD, text("stop") + USAGE + END], "ended early"),
        ([HEAD, text("length") + END], "ended early"),
    ],
)
def test_an_answer_that_is_not_whole_is_no_measurement(answer, message):
    with pytest.raises(RuntimeError, match=message):
        asked_of(answer, 1, at_once=1)
