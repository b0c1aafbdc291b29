"""The calls by which tasks queue requests, whoever makes the samples and runs them."""

import asyncio

import pytest

from jaxspec.engine.async_calls import AsyncCalls
from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.sampling_params import SamplingParams


class Maker:
    """Makes a sample that says what it was made of."""

    def one_prompt(self, prompt):
        if isinstance(prompt, list):
            raise ValueError("one prompt alone")
        return prompt

    def prepare_one(self, prompt, params, name, priority):
        return [(prompt, params, name, priority)]

    def chat_prompt(self, messages, template):
        return {"prompt": f"{messages} {template}", "prompt_token_ids": [1]}


class Stream:
    """What a request gave; `is_left` once nobody reads it any more."""

    def __init__(self, prompt, samples):
        self.prompt, self.samples, self.is_left = prompt, samples, False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self.is_left = True

    async def __aiter__(self):
        for text in "abc":
            yield TextDelta(text, [1])


class Calls(AsyncCalls):
    """Queues nowhere, and keeps the streams."""

    def __init__(self):
        self._begin_calls(Maker())
        self.streams = []

    async def _submit(self, prepare):
        self.streams.append(Stream(*prepare()))
        return self.streams[-1]


PARAMS = SamplingParams(max_tokens=3)


def test_what_is_asked_for_comes_to_the_maker():
    calls = Calls()

    async def run():
        await calls.submit("text", PARAMS, request_id="a", priority=2)
        await calls.submit({"prompt_token_ids": [3], "prompt": "p"})
        await calls.submit_chat(["hi"], PARAMS, request_id="b", cache_salt="s", tools=[])
        await calls.submit_chat(["hi"])
        with pytest.raises(ValueError, match="one prompt alone"):
            await calls.submit(["text"])

    asyncio.run(run())
    text, ids, salted, chat = calls.streams
    assert (text.prompt, text.samples) == ("text", [("text", PARAMS, "a", 2)])
    assert (ids.prompt, ids.samples[0][1:]) == ("p", (None, None, 0))
    assert salted.prompt == "['hi'] {'tools': []}" and salted.samples[0][1:] == (PARAMS, "b", 0)
    assert salted.samples[0][0]["cache_salt"] == "s" and "cache_salt" not in chat.samples[0][0]


def test_generate_reads_the_stream_and_leaves_it():
    calls = Calls()

    async def run():
        assert [delta.text async for delta in calls.generate("text")] == ["a", "b", "c"]
        early = calls.generate("text")
        await anext(early)
        await early.aclose()

    asyncio.run(run())
    assert [stream.is_left for stream in calls.streams] == [True, True]
