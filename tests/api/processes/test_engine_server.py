"""RemoteEngineServer: what the engine's process does for another, over a device in NumPy."""

import asyncio
import contextlib
import time

import pytest
from callers import Ask, expected
from fake_llm_engine import FakeLLMEngine

from jaxspec.api import async_llm
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.processes.engine_server import RemoteEngineServer
from jaxspec.engine.errors import EngineDeadError, QueueFullError, QueueTimeoutError

LONG = Ask(prompt=0, max_tokens=12)


class Recorded:
    """A channel whose other side says nothing; `told` has what it heard."""

    def __init__(self):
        self.handlers, self.told, self.gone = {}, [], asyncio.Event()

    def notify(self, name, *args):
        self.told.append((name, *args))

    async def run(self):
        await self.gone.wait()


class At:
    """A RemoteEngineServer, and the handlers that its process would call."""

    def __init__(self, llm, **options):
        self.llm, self.channel = llm(max_num_seqs=5, decode_rows=(5,), **options), Recorded()
        self.engine_server = RemoteEngineServer(self.llm, self.channel, None)
        self.running = asyncio.create_task(self.engine_server.run())

    async def call(self, name, *args):
        return await self.channel.handlers[name](*args)

    async def take_over(self, number, requests):
        """As a process does that makes requests."""
        await self.call("expect", number)
        for request in requests:
            request.is_streamed, request.tokens = True, []
        await self.call("take_over", number, requests)

    def notify(self, name, *args):
        self.channel.handlers[name](*args)

    def tokens(self, number):
        """Tokens of each sample that were sent, and whether it ended."""
        found = {}
        for name, *args in self.channel.told:
            if name == "deltas":
                for asked, index, token_delta in args[0]:
                    if asked == number:
                        tokens, _ = found.get(index, ([], None))
                        found[index] = (tokens + token_delta.tokens, token_delta.finish.reason)
        return found

    async def until(self, is_so):
        end = time.monotonic() + 30
        while not is_so():
            assert time.monotonic() < end, self.channel.told
            await asyncio.sleep(0.001)

    async def idle(self):
        await self.until(lambda: not (self.llm.num_running or self.llm.num_waiting))


@pytest.fixture
def over(monkeypatch):
    """Run a test at a RemoteEngineServer."""
    monkeypatch.setattr(async_llm, "LLMEngine", FakeLLMEngine)

    @contextlib.asynccontextmanager
    async def opened(**options):
        at = At(AsyncLLM, **options)
        try:
            yield at
        finally:
            at.channel.gone.set()
            await at.running
            await at.llm.close()

    def run(test, **options):
        async def within():
            async with asyncio.timeout(60), opened(**options) as at:
                await test(at)

        asyncio.run(within())

    return run


def test_what_a_step_brings_is_sent_at_once_for_all_requests(over):
    async def test(at):
        asks = [LONG, Ask(prompt=1, max_tokens=9, n=2), Ask(prompt=2, max_tokens=5)]
        requests = [ask.requests(first_key=0) for ask in asks]
        for group in requests:
            for index, request in enumerate(group):
                request.index = index
        for number, group in enumerate(requests):
            await at.take_over(number, group)
        await at.idle()
        await at.until(lambda: all(all(r for _, r in at.tokens(n).values()) for n in range(3)))
        for number, ask in enumerate(asks):
            want = [list(expected(each)[0]) for each in ask.requests(first_key=0)]
            assert [tokens for tokens, _ in at.tokens(number).values()] == want
        assert any(len(args[0]) > 1 for name, *args in at.channel.told if name == "deltas")
        for number in range(3):
            at.notify("release", number)
        assert not at.engine_server._output_senders

    over(test)


def test_a_request_that_is_aborted_or_whose_process_is_gone_frees_its_row(over):
    async def test(at):
        at.llm._engine.schedule.runner.at["result"] = lambda: time.sleep(0.05)
        requests = [LONG.requests(first_key=0) for _ in range(2)]
        for number in range(2):
            await at.take_over(number, requests[number])
        await at.call("expect", 2)
        await at.call("expect", 3)
        at.notify("abort", 0)
        at.notify("abort", 3)
        at.notify("abort", 7)  # nobody knows it
        assert at.llm.num_waiting >= 1
        at.channel.gone.set()
        await at.running
        await at.idle()
        assert not at.engine_server._output_senders and not at.engine_server._expected
        assert [group[0].finish.reason for group in requests] == ["abort", "abort"]

    over(test)


def test_a_stop_string_that_the_other_side_found_ends_the_sample(over):
    async def test(at):
        (request,) = Ask(prompt=0, max_tokens=12, ends_at=3, letters=1).requests(first_key=0)
        want, _, _ = expected(request)
        await at.take_over(0, [request])
        await at.until(lambda: at.tokens(0) and len(at.tokens(0)[0][0]) >= len(want))
        at.notify("settle", 0, 0, len(want))
        at.notify("settle", 9, 0, 1)  # nobody knows it
        await at.idle()
        await at.until(lambda: request.finish.reason == "stop")
        assert request.output == list(want)

    over(test)


def test_what_there_is_no_room_for_is_refused_and_forgotten(over):
    async def test(at):
        at.llm._engine.schedule.runner.at["result"] = lambda: time.sleep(0.2)
        await at.call("expect", 0)  # it is tokenized there
        with pytest.raises(QueueFullError):
            await at.call("expect", 1)
        at.notify("abort", 0)
        with pytest.raises(QueueFullError):
            for number in range(2, 11):
                await at.take_over(number, LONG.requests(first_key=0))
        assert number not in at.engine_server._output_senders and not at.engine_server._expected

    over(test, max_num_queued_reqs=1)


def test_a_process_that_goes_while_its_request_is_checked_leaves_none(over):
    async def test(at):
        (request,) = LONG.requests(first_key=0)
        at.llm._engine.schedule.runner.at["result"] = lambda: time.sleep(0.05)
        admit = at.llm._engine.admit

        def slowly(samples):
            time.sleep(0.1)
            admit(samples)

        at.llm._engine.admit = slowly
        taking = asyncio.create_task(at.take_over(0, [request]))
        await asyncio.sleep(0.02)
        at.channel.gone.set()
        await at.running
        await taking
        await at.idle()
        await at.until(lambda: request.finish.reason == "abort")
        assert not at.engine_server._output_senders

    over(test)


def test_a_request_that_waits_too_long_is_given_up_here(over):
    async def test(at):
        at.llm._engine.schedule.runner.at["result"] = lambda: time.sleep(0.3)
        for number in range(8):
            await at.take_over(number, LONG.requests(first_key=0))
        await at.until(lambda: any(name == "failed" for name, *_ in at.channel.told))
        failed = {args[0]: args[1] for name, *args in at.channel.told if name == "failed"}
        assert failed and all(isinstance(error, QueueTimeoutError) for error in failed.values())
        assert not failed.keys() & at.engine_server._output_senders.keys()

    over(test, queue_timeout=0.05)


def test_a_step_that_fails_is_told_behind_what_came_before(over):
    async def test(at):
        await at.take_over(0, LONG.requests(first_key=0))

        def fail():
            raise OSError("planted")

        at.llm._engine.schedule.runner.at["result"] = fail
        await at.until(lambda: at.channel.told and at.channel.told[-1][0] == "failed")
        name, number, error = at.channel.told[-1]
        assert (
            number == 0
            and isinstance(error, EngineDeadError)
            and not at.engine_server._output_senders
        )
        with pytest.raises(EngineDeadError):
            await at.call("expect", 1)

    over(test)
