"""Clients that come, go and read slowly: nothing of them is left, and others notice nothing.

Three rounds of 256 requests; a third of the clients goes early, and the queue overflows.
"""

import asyncio
import collections
import json
import random
import socket
import time

import httpx
import psutil

from jaxspec import SamplingParams

PROMPTS = ["def fibonacci(n):", "import os\n", "class Stack:\n    def push(self, item):", "x = ["]
MOST = 24


def texts(reference):
    """The text of each prompt for each number of tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
    outputs = reference.generate(PROMPTS, params)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return [[reference.tokenizer.decode(ids[:n]) for n in range(MOST + 1)] for ids in tokens]


async def one(client, draw, want, happened):
    """One request: read whole, left in the middle, or left before its first token."""
    prompt, most = draw.randrange(len(PROMPTS)), draw.randint(1, MOST)
    streams, fate = draw.random() < 0.7, draw.random()
    body = {"prompt": PROMPTS[prompt], "max_tokens": most, "ignore_eos": True, "stream": streams}
    await asyncio.sleep(draw.random() * 0.5)
    if fate < 0.4:
        # 10 % go before the first token, 30 % at a random time.
        seconds = draw.random() * (0.005 if fate < 0.1 else 1.0)
        try:
            async with asyncio.timeout(seconds):
                await client.post("/v1/completions", json=body)
                happened["was quick"] += 1
        except TimeoutError:
            happened["left"] += 1
        return
    response = await client.post("/v1/completions", json=body)
    if response.status_code == 503:
        assert response.headers["retry-after"] and "queue is full" in response.text
        happened["refused"] += 1
        return
    assert response.status_code == 200, response.text
    if streams:
        parts = response.text.strip().split("\n\n")
        *events, done = [part for part in parts if part != ": keep-alive"]
        assert done == "data: [DONE]"
        told = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]
        text, reason = "".join(choice["text"] for choice in told), told[-1]["finish_reason"]
    else:
        (choice,) = response.json()["choices"]
        text, reason = choice["text"], choice["finish_reason"]
    assert (text, reason) == (want[prompt][most], "length")
    happened["read"] += 1


async def storm(root, seed, want):
    draw, happened = random.Random(seed), collections.Counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=root, timeout=120, limits=limits) as client:
        draws = [random.Random(draw.random()) for _ in range(256)]
        await asyncio.gather(*(one(client, each, want, happened) for each in draws))
    return happened


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


def test_a_storm_leaves_nothing_and_every_text_that_was_read_is_right(served, reference):
    want, happened, sizes = texts(reference), collections.Counter(), []
    for seed in range(3):
        happened += asyncio.run(storm(served.root, seed, want))
        settle(served)
        sizes.append(psutil.Process().memory_info().rss)
    assert happened["read"] > 100 and happened["left"] > 100 and happened["refused"] > 0, happened
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
