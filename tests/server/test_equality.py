"""The server's text, streamed or not, is the library's: for many generated requests at once."""

import asyncio
import json
import random

import httpx
import pytest
from pairwise import soak

from jaxspec import SamplingParams
from jaxspec.text.parsers.dialects import HERMES

PROMPTS = [
    "def fibonacci(n):",
    "import os\n",
    '"""Überschrift: 語\n',
    "# naïve café ☕\nx = '",
    "for i in range(",
]
STOPS = ["\n\n", "):", "self", "é", " = ", "语"]

# The model calls none: looking for calls in its text must change nothing.
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


def asked(number):
    """A request: greedy or drawn, with stops or without, one sample or several."""
    draw = random.Random(number)
    fields = {"max_tokens": draw.randint(1, 24), "seed": number, "n": draw.choice([1, 1, 1, 2])}
    fields["temperature"] = draw.choice([0.0, 0.7, 1.3])
    if draw.random() < 0.5:
        fields["stop"] = draw.sample(STOPS, draw.randint(1, 3))
        fields["include_stop_str_in_output"] = draw.random() < 0.3
    if draw.random() < 0.3:
        fields["ignore_eos"] = True
    return draw.choice(PROMPTS), fields


async def answered(client, number, *, is_chat, streams):
    prompt, fields = asked(number)
    path, body = "/v1/completions", {"prompt": prompt}
    if is_chat:
        path, body = "/v1/chat/completions", {"messages": [{"role": "user", "content": prompt}]}
        body |= {"tools": TOOLS} if number % 2 else {}
    response = await client.post(path, json={**body, **fields, "stream": streams})
    assert response.status_code == 200, response.text
    found = [["", None] for _ in range(fields["n"])]
    if streams:
        parts = response.text.strip().split("\n\n")
        events = [part for part in parts if part != ": keep-alive"][:-1]
        choices = [
            choice
            for event in events
            for choice in json.loads(event.removeprefix("data: "))["choices"]
        ]
    else:
        choices = response.json()["choices"]
    for choice in choices:
        told = choice.get("delta") or choice.get("message") or choice
        found[choice["index"]][0] += told.get("content") or told.get("text") or ""
        found[choice["index"]][1] = choice["finish_reason"]
    return found


async def all_answers(root, count, is_chat):
    limits = httpx.Limits(max_connections=16)
    async with httpx.AsyncClient(base_url=root, timeout=300, limits=limits) as client:
        ways = [(number, True) for number in range(count)]
        ways += [(number, False) for number in range(0, count, 2)]
        work = [
            answered(client, number, is_chat=is_chat(number), streams=streams)
            for number, streams in ways
        ]
        return zip(ways, await asyncio.gather(*work), strict=True)


def wanted(reference, numbers, *, is_chat):
    """Texts and reasons of these requests, by the library in one call."""
    prompts, fields = zip(*map(asked, numbers), strict=True)
    params = [SamplingParams(**each) for each in fields]
    if is_chat:
        chats = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = reference.chat(chats, params, use_tqdm=False)
    else:
        outputs = reference.generate(list(prompts), params, use_tqdm=False)
    told = [[[each.text, each.finish_reason] for each in output.outputs] for output in outputs]
    return dict(zip(numbers, told, strict=True))


@pytest.mark.parametrize("count", [24, soak(200)])
def test_text_from_the_server_is_the_library_s(count, served, reference, monkeypatch):
    """Each request is streamed, and every other one is sent whole, too."""
    monkeypatch.setattr(served.service, "dialect", HERMES)
    chats = range(0, count, 3)
    texts = [number for number in range(count) if number not in chats]
    found = asyncio.run(all_answers(served.root, count, lambda number: number in chats))
    want = wanted(reference, chats, is_chat=True) | wanted(reference, texts, is_chat=False)
    for (number, streams), text in found:
        assert text == want[number], (streams, asked(number))
