"""Clients that come, go and read slowly, 256 at once."""

import asyncio
import collections
import json
import random

import httpx

from jaxspec import SamplingParams

PROMPTS = ["def fibonacci(n):", "import os\n", "class Stack:\n    def push(self, item):", "x = ["]
MOST = 24


def texts(reference):
    """The text of each prompt for each number of tokens."""
    params = SamplingParams(temperature=0.0, max_tokens=MOST, ignore_eos=True)
    outputs = reference.generate(PROMPTS, params)
    tokens = [output.outputs[0].token_ids for output in outputs]
    return [[reference.tokenizer.decode(ids[:n]) for n in range(MOST + 1)] for ids in tokens]


async def one(client, draw, want, happened, overflowed):
    """One request: read whole, left in the middle, or left before its first token."""
    prompt, most = draw.randrange(len(PROMPTS)), draw.randint(1, MOST)
    streams, fate = draw.random() < 0.7, draw.random()
    body = {"prompt": PROMPTS[prompt], "max_tokens": most, "ignore_eos": True, "stream": streams}
    await asyncio.sleep(draw.random() * 0.2)
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
        overflowed.set()
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


async def storm(root, seed, want, overflowed):
    """Count what happened to 256 clients; `overflowed` is set when the first is refused."""
    draw, happened = random.Random(seed), collections.Counter()
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=root, timeout=120, limits=limits) as client:
        draws = [random.Random(draw.random()) for _ in range(256)]
        await asyncio.gather(*(one(client, each, want, happened, overflowed) for each in draws))
    return happened
