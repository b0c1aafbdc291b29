"""Clients that come, go and read slowly: nothing of them is left, and others notice nothing.

Three rounds of 256 requests; a third of the clients goes early, and the queue overflows, because
the engine does not step until a request has been refused.
"""

import asyncio
import collections
import functools
import json
import socket
import threading
import time

import httpx
import psutil
import pytest
from storms import PROMPTS, storm, texts


def settle(served):
    """Wait until nothing runs, and see that nothing is left."""
    llm, end = served.llm, time.monotonic() + 30
    session, scheduler = llm._engine.session, llm._engine.session.scheduler
    while llm.num_running or llm.num_waiting or session.has_work or served.tasks() > 4:
        assert time.monotonic() < end, (llm.num_running, llm.num_waiting, served.tasks())
        time.sleep(0.02)
    llm._engine.reset_prefix_cache()
    assert llm.kv_cache_usage == 0 and scheduler.pages.num_free == scheduler.shapes.num_pages - 1
    assert not scheduler.running and not scheduler.waiting


@pytest.mark.soak
def test_a_storm_leaves_nothing_and_every_text_that_was_read_is_right(served, reference):
    want, happened, sizes = texts(reference), collections.Counter(), []
    for seed in range(3):
        overflowed = threading.Event()
        occupy = functools.partial(overflowed.wait, 60)
        threading.Thread(target=served.llm._engine.session.in_turn, args=(occupy,)).start()
        happened += asyncio.run(storm(served.root, seed, want, overflowed))
        settle(served)
        sizes.append(psutil.Process().memory_info().rss)
    assert happened["read"] > 100 and happened["left"] > 100 and happened["refused"] > 2, happened
    assert sizes[2] - sizes[1] < 30e6, "memory grows"
    assert served.get("/health").status_code == 200


def test_a_reader_that_reads_nothing_slows_nobody(served, reference):
    """Its 400 tokens wait in the socket; the others' texts come meanwhile."""
    want = texts(reference)
    body = json.dumps(
        {"prompt": PROMPTS[0], "max_tokens": 400, "ignore_eos": True, "stream": True, "n": 4}
    ).encode()
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection(("127.0.0.1", served.port)) as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        while not served.llm.num_running:
            time.sleep(0.01)
        for number, prompt in enumerate(PROMPTS):
            found = served.post("/v1/completions", prompt=prompt, max_tokens=8, ignore_eos=True)
            assert found.json()["choices"][0]["text"] == want[number][8]
    settle(served)


def test_an_answer_that_is_not_streamed_ends_when_its_client_goes(served):
    body = {"prompt": PROMPTS[0], "max_tokens": 480, "ignore_eos": True, "n": 8}
    try:
        httpx.post(f"{served.url}/completions", json=body, timeout=0.3)
        raise AssertionError("it was quick")
    except httpx.ReadTimeout:
        pass
    started = time.monotonic()
    settle(served)
    assert time.monotonic() - started < 5
