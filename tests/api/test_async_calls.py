"""The calls by which tasks queue requests, whoever makes the samples and runs them."""

import asyncio
from types import SimpleNamespace

import pytest

from jaxspec.api.async_calls import AsyncCalls
from jaxspec.plan.step_shapes import SchedulerLimits
from jaxspec.requests.prompts import TokenizedPrompt
from jaxspec.requests.sampling_params import SamplingParams


class Inputs:
    """An `InputProcessor` whose samples say what they were made of."""

    tokenizer, default_params = "tokenizer", SamplingParams(max_tokens=5)

    def process_one(self, prompt, params, name, priority):
        return [(prompt, params, name, priority)]

    def chat(self, messages, template):
        return TokenizedPrompt((1,), f"{messages} {template}")


class Stream:
    """What a request gave; `is_left` once nobody reads it any more."""

    def __init__(self, samples):
        self.samples, self.is_left = samples, False

    async def __aenter__(self):
        return self

    async def __aexit__(self, *error):
        self.is_left = True

    async def outputs(self):
        for text in "abc":
            yield text


class Calls(AsyncCalls):
    """Queues nowhere, and keeps the streams."""

    def __init__(self):
        super().__init__(Inputs(), "name", SimpleNamespace(max_model_len=64), SchedulerLimits())
        self.streams = []

    is_healthy = True

    async def _control(self, call):
        return call

    async def _submit(self, prepare, *, is_long=False):
        self.streams.append(Stream(prepare()))
        return self.streams[-1]


PARAMS = SamplingParams(max_tokens=3)


def test_what_is_asked_for_comes_to_the_inputs():
    calls = Calls()

    async def run():
        await calls.submit("text", PARAMS, request_id="a", priority=2)
        await calls.submit({"prompt_token_ids": [3], "prompt": "p"})
        await calls.submit_chat(["hi"], PARAMS, request_id="b", cache_salt="s", tools=[])
        await calls.submit_chat(["hi"])
        with pytest.raises(ValueError, match="cache_salt must be a text"):
            await calls.submit_chat(["hi"], cache_salt="")

    asyncio.run(run())
    ((text,), (ids,), (salted,), (chat,)) = [stream.samples for stream in calls.streams]
    assert text == ("text", PARAMS, "a", 2)
    assert ids == ({"prompt_token_ids": [3], "prompt": "p"}, None, None, 0)
    assert salted == (TokenizedPrompt((1,), "['hi'] {'tools': []}", "s"), PARAMS, "b", 0)
    assert chat == (TokenizedPrompt((1,), "['hi'] {}"), None, None, 0)
    assert (calls.tokenizer, calls.model_name, calls.max_model_len) == ("tokenizer", "name", 64)
    assert calls.get_default_sampling_params() == Inputs.default_params


def test_generate_reads_the_stream_and_leaves_it():
    calls = Calls()

    async def run():
        assert [output async for output in calls.generate("text")] == ["a", "b", "c"]
        with pytest.raises(TypeError, match="no argument 'lora'"):
            await anext(calls.generate("text", lora=None))
        with pytest.raises(ValueError, match="lora_request must be None"):
            await anext(calls.generate("text", lora_request="mine"))
        early = calls.generate("text", None, "b", lora_request=None)
        await anext(early)
        await early.aclose()

    asyncio.run(run())
    assert [stream.is_left for stream in calls.streams] == [True, True]
