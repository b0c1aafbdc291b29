"""Several streams read as one: choices by number, usage added up, all ended together."""

import asyncio
import dataclasses

import pytest

from jaxspec.engine.errors import QueueTimeoutError
from jaxspec.requests.outputs import TextDelta
from jaxspec.requests.request import RequestMetrics
from jaxspec.server.generation.generation import Generation, Usage
from jaxspec.server.http.errors import ApiError
from jaxspec.server.metrics.server_metrics import ServerMetrics


class Stream:
    """Gives deltas, one at each turn of the loop; it may fail instead of the last."""

    def __init__(self, deltas, error=None, cached=0):
        self.deltas, self.error, self.num_cached_tokens = list(deltas), error, cached
        self.prompt_token_ids, self.num_closed = [1, 2, 3], 0

    def __aiter__(self):
        return self

    async def __anext__(self):
        await asyncio.sleep(0)
        if self.deltas:
            return self.deltas.pop(0)
        if self.error:
            raise self.error
        raise StopAsyncIteration

    async def aclose(self):
        self.num_closed += 1


def delta(text, index=0, reason=None):
    metrics = RequestMetrics() if reason else None
    if metrics:
        metrics.record([2], [1])
    return TextDelta(text=text, token_ids=[7], index=index, finish_reason=reason, metrics=metrics)


def read(*streams, n=1):
    async def run():
        generation = Generation(streams, n, ServerMetrics())
        found = [(number, each.text) async for number, each in generation.deltas()]
        assert len(asyncio.all_tasks()) == 1
        return generation, found

    return asyncio.run(run())


def test_choices_are_numbered_by_prompt_and_sample():
    streams = [Stream([delta(f"{p}{i}", i, "stop") for i in range(2)], cached=p) for p in range(3)]
    generation, found = read(*streams, n=2)
    assert sorted(found) == [(2 * p + i, f"{p}{i}") for p in range(3) for i in range(2)]
    assert generation.num_choices == 6 and all(stream.num_closed for stream in streams)
    used = generation.usage
    assert (used.prompt_tokens, used.cached_tokens, used.completion_tokens) == (9, 3, 6)
    assert (used.accepted_tokens, used.rejected_tokens) == (6, 6)


def test_of_each_prompt_the_longest_sample_is_counted():
    streams = [Stream([delta("a", i, "stop") for i in range(2)]) for _ in range(3)]
    for prompt, stream in enumerate(streams):
        for each in stream.deltas:
            each.metrics.num_tokens = 10 * prompt + each.index
    streams[2].deltas.pop()  # one that was given up
    generation, _ = read(*streams, n=2)
    found = generation._metrics.sizes["request_max_num_generation_tokens"]
    assert (found.count, found.total) == (2, 1 + 11)


def test_an_error_of_one_ends_all():
    whole, broken = Stream([delta("a")] * 50), Stream([delta("b")], RuntimeError("x"))
    with pytest.raises(RuntimeError):
        read(whole, broken)
    assert whole.num_closed and broken.num_closed and whole.deltas


@pytest.mark.parametrize("reason, status, wait", [("error", 500, None), ("abort", 503, "8")])
def test_a_sample_that_failed_is_an_error(reason, status, wait):
    with pytest.raises(ApiError) as caught:
        read(Stream([delta("a"), delta("", 0, reason)]))
    assert caught.value.status == status and caught.value.headers.get("retry-after") == wait


def test_leaving_early_ends_what_runs():
    async def run():
        streams = [Stream([delta("a")] * 9), Stream([delta("b")] * 9)]
        deltas = Generation(streams, 1, ServerMetrics()).deltas()
        await anext(deltas)
        await deltas.aclose()
        assert all(stream.num_closed for stream in streams) and len(asyncio.all_tasks()) == 1

    asyncio.run(run())


def test_usage_is_openai_s_object():
    told = Usage(prompt_tokens=3, completion_tokens=2, cached_tokens=1).as_object()
    assert told["total_tokens"] == 5 and told["prompt_tokens_details"] == {"cached_tokens": 1}
    assert len(dataclasses.fields(Usage)) == 6


def test_a_timeout_in_the_queue_is_counted():
    async def run():
        metrics = ServerMetrics()
        generation = Generation([Stream([], QueueTimeoutError(2.0))], 1, metrics)
        with pytest.raises(QueueTimeoutError):
            async for _ in generation.deltas():
                pass
        assert metrics.rejections == {"queue_timeout": 1}

    asyncio.run(run())
