"""Inbox and AsyncStream by themselves: joins, stop strings, ends; without an engine."""

import asyncio
import functools
import gc

import pytest
from callers import Ask, expected
from fake_llm_engine import sample_of

from jaxspec.engine.async_stream import AsyncStream, OutputQueue
from jaxspec.engine.errors import QueueTimeoutError
from jaxspec.engine.sample_stream import SampleStream
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_params import RequestOutputKind


class Source:
    """A request whose tokens come when the test says so."""

    def __init__(self, ask, kind=RequestOutputKind.DELTA):
        requests = ask.requests(first_key=0)
        for index, request in enumerate(requests):
            request.index, request.params.output_kind = index, kind
        self.want = [expected(request) for request in requests]
        self.settled, self.aborted = [], []
        loop = asyncio.get_running_loop()
        samples = [sample_of(request) for request in requests]
        self.output_queue = OutputQueue(
            loop,
            samples,
            functools.partial(SampleStream, hand_on=self.hand_on),
            lambda *given: self.settled.append(given),
        )
        self.stream = AsyncStream(self.output_queue, self.aborted.append)
        self.plain = [expected(plain)[0] for plain in Ask(ask.prompt, 12, ask.n).requests(0)]

    def hand_on(self, sample_stream, token_delta):
        self.output_queue.receive(sample_stream, token_delta)

    def emit(self, count, index=0, finish=Finish.RUNNING):
        sample_stream = self.output_queue.sample_streams[index]
        first = sample_stream.request.num_output
        sample_stream.request.tokens += self.plain[index][first : first + count]
        sample_stream.request.draft_positions += [0] * count
        sample_stream.request.metrics.record_tokens(count, 1.0)
        sample_stream.request.finish = finish
        sample_stream.read()


def test_pieces_that_came_meanwhile_are_joined():
    async def read():
        source = Source(Ask(prompt=1, max_tokens=12))
        source.emit(2)
        source.emit(3)
        first = await anext(source.stream)
        assert len(first.token_ids) == 5 and source.stream.metrics is None
        source.emit(7, finish=Finish.LENGTH)
        second = await anext(source.stream)
        assert first.text + second.text == source.want[0][2]
        assert (second.finish_reason, source.stream.metrics.num_tokens) == ("length", 12)
        assert [delta async for delta in source.stream] == []
        await source.stream.aclose()
        assert not source.aborted  # it had ended

    asyncio.run(read())


def test_samples_take_turns():
    async def read():
        source = Source(Ask(prompt=1, max_tokens=12, n=2))
        for index in (1, 0, 1):
            source.emit(1, index)
        deltas = [await anext(source.stream) for _ in range(2)]
        assert [(delta.index, len(delta.token_ids)) for delta in deltas] == [(1, 2), (0, 1)]
        for index in range(2):
            source.emit(5, index, Finish.LENGTH)
        rest = [delta async for delta in source.stream]
        assert [delta.finish_reason for delta in rest] == ["length"] * 2

    asyncio.run(read())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_stop_string_is_told_at_once_and_what_comes_behind_it_is_nothing(kind):
    async def read():
        source = Source(Ask(prompt=1, max_tokens=12, ends_at=5, letters=2), kind)
        tokens, finish, text = source.want[0]
        assert finish is Finish.STOP and len(tokens) < 12
        for _ in range(11):
            source.emit(1)
        source.emit(1, finish=Finish.LENGTH)
        assert source.settled == [(source.output_queue.sample_streams[0], len(tokens))]
        deltas = [delta async for delta in source.stream]
        assert (deltas[-1].finish_reason, deltas[-1].metrics.num_tokens) == ("stop", len(tokens))
        assert (deltas[-1].text, deltas[-1].token_ids, len(deltas)) == (text, tokens, 1)

    asyncio.run(read())


@pytest.mark.parametrize("kind", RequestOutputKind)
def test_a_sample_that_waits_for_its_routes_is_read_before_an_error(kind):
    async def read():
        source = Source(Ask(prompt=1, max_tokens=12, ends_at=5, letters=2), kind)
        source.output_queue.sample_streams[0].reader.request.returns_routes = True
        tokens, _, text = source.want[0]
        for _ in range(11):
            source.emit(1)
        assert source.output_queue.take() is None  # the engine will send the routes
        source.output_queue.fail(QueueTimeoutError(1))
        delta = await anext(source.stream)
        assert (delta.text, delta.token_ids, delta.finish_reason) == (text, tokens, "stop")
        assert delta.routed_experts is None

    asyncio.run(read())


def test_one_that_ends_without_its_stop_string_is_settled_too():
    async def read():
        source = Source(Ask(prompt=1, max_tokens=12, ends_at=9, letters=2))
        source.emit(2, finish=Finish.LENGTH)
        assert source.settled == [(source.output_queue.sample_streams[0], None)]

    asyncio.run(read())


def test_an_abort_shows_nothing_that_was_held_back():
    async def read():
        for count in range(1, 12):
            source = Source(Ask(prompt=1, max_tokens=12, ends_at=9, letters=3))
            source.emit(count)
            source.emit(0, finish=Finish.ABORT)
            text = "".join([delta.text async for delta in source.stream])
            assert source.want[0][2].startswith(text)

    asyncio.run(read())


@pytest.mark.few(2)
@pytest.mark.parametrize("way", ["aclose", "with", "cancel", "drop", "error"])
def test_whoever_leaves_ends_the_request_once(way):
    async def read():
        source = Source(Ask(prompt=1, max_tokens=12))
        source.emit(1)
        await anext(source.stream)
        if way == "aclose":
            await source.stream.aclose()
            await source.stream.aclose()
        elif way == "with":
            async with source.stream as stream:
                assert stream is source.stream
        elif way == "cancel":
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(anext(source.stream), 0.01)
        elif way == "error":
            source.emit(1)
            source.output_queue.fail(QueueTimeoutError(1))
            assert len((await anext(source.stream)).token_ids) == 1  # what came before
            with pytest.raises(QueueTimeoutError):
                await anext(source.stream)
        stream, source.stream = source.stream, None
        if way != "drop":
            assert [delta async for delta in stream] == []
        del stream
        gc.collect()
        assert source.aborted == [source.output_queue]
        source.emit(1)  # on its way when the reader left
        assert source.output_queue.take() is None

    asyncio.run(read())


def test_a_reader_who_waits_for_the_whole_is_woken_once():
    async def read():
        source = Source(Ask(prompt=1, max_tokens=12), RequestOutputKind.FINAL_ONLY)
        waiting = asyncio.create_task(anext(source.stream))
        await asyncio.sleep(0)
        for _ in range(5):
            source.emit(1)
        await asyncio.sleep(0)
        assert not source.output_queue._waiter.done()
        source.emit(7, finish=Finish.LENGTH)
        assert (await waiting).text == source.want[0][2]

    asyncio.run(read())
