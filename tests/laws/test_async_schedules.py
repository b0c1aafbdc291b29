"""Storms of streams: whoever comes, leaves and fails, others notice nothing, and nothing is left.

The host is whole: `AsyncLLM` over `EngineThread` over `Session`. Its device is `FakeDevice`, which
checks each plan. Events take their time in real threads, so no storm is quite like another one.
"""

import asyncio
import collections
import contextlib
import functools
import gc
import threading
import time
import tracemalloc
import weakref

import numpy as np
import pytest
from callers import PROMPTS, Ask, expected
from fake_llm_engine import FakeLLMEngine
from fake_weights import TREE
from pairwise import soak
from threads import in_threads

from jaxspec.api import async_llm
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.engine.async_stream import AsyncStream, OutputQueue
from jaxspec.engine.engine_thread import EngineThread
from jaxspec.engine.errors import (
    DrainingError,
    EngineDeadError,
    PausedError,
    QueueFullError,
    QueueTimeoutError,
)
from jaxspec.engine.sample_stream import SampleStream
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams

SIZES = {
    "max_num_seqs": 5,
    "decode_rows": (1, 5),
    "num_drafts": 2,
    "page_size": 4,
    "num_pages": 25,
}
WAYS = (
    *("read", "read", "read", "late"),  # to the end; the last one reads when all has come
    *("leave", "generator", "drop", "cancel", "id"),  # in the middle
    *("at once", "cancelled submit", "silent"),  # without a piece
)


LATE = QueueFullError, DrainingError, EngineDeadError, QueueTimeoutError

before = weakref.WeakSet()  # streams of other tests, which pytest may keep with their errors


@pytest.fixture(scope="module", autouse=True)
def older_objects_are_passed_over():
    """To look at all of them takes seconds in a process with many programs."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def make(monkeypatch):
    """AsyncLLMs over fake devices; they are closed by who makes them."""
    before.update(objects())
    monkeypatch.setattr(async_llm, "LLMEngine", FakeLLMEngine)
    return lambda **changes: AsyncLLM(**(SIZES | changes))


def random_ask(random):
    ends_at = int(random.integers(0, 9)) if random.random() < 0.5 else None
    return Ask(
        prompt=int(random.integers(len(PROMPTS))),
        max_tokens=int(random.integers(1, 13)),
        n=int(random.choice((1, 1, 2, 4))),
        seed=int(random.integers(1, 4)),
        min_tokens=int(random.integers(0, 2)),
        ends_at=ends_at,
        letters=int(random.integers(0, 4)),
    )


def check(ask, deltas, kind=RequestOutputKind.DELTA):
    """Each sample got what it gets alone, or the beginning of that; the ends by their reasons."""
    ends = collections.Counter()
    for index, request in enumerate(ask.requests(first_key=0)):
        tokens, finish, text = expected(request)
        mine = [delta for delta in deltas if delta.index == index]
        assert kind is not RequestOutputKind.FINAL_ONLY or len(mine) < 2
        reasons = [delta.finish_reason for delta in mine]
        assert not any(reasons[:-1])
        got = [token for delta in mine for token in delta.token_ids]
        seen = "".join(delta.text for delta in mine)
        reason = reasons[-1] if mine else None
        ends[reason] += 1
        if reason in ("stop", "length"):
            assert (got, seen, reason) == (tokens, text, finish.reason)
            assert mine[-1].metrics.num_tokens == len(tokens)
            assert len([p for delta in mine for p in delta.draft_positions]) == len(tokens)
        else:
            assert got == tokens[: len(got)] and text.startswith(seen)
    return ends


async def visit(llm, ask, way, random, *, may_abort=False):
    """One caller: what its samples ended with."""
    kind = random.choice(list(RequestOutputKind))
    params = SamplingParams(output_kind=kind)
    prompt, count, deltas = llm._engine.ask(ask), int(random.integers(1, 4)), []
    pause = float(random.random()) * 0.02
    if way == "generator":
        outputs = llm.generate(prompt, params)
        async for output in outputs:
            deltas = (deltas if kind is RequestOutputKind.DELTA else []) + output.outputs
            if (count := count - 1) == 0:
                break
        await outputs.aclose()
        return check(ask, deltas, kind)
    submitting = llm.submit(prompt, params, priority=int(random.integers(0, 3)))
    if way == "cancelled submit":
        task = asyncio.create_task(submitting)
        await asyncio.sleep(pause / 20)
        task.cancel()
        await asyncio.wait({task})
        return collections.Counter(cancelled=ask.n)
    stream = await submitting
    if way == "at once":
        await stream.aclose()
    elif way == "silent":
        await asyncio.sleep(pause)
    elif way == "cancel":

        async def reading():
            async for delta in stream:
                deltas.append(delta)

        task = asyncio.create_task(reading())
        await asyncio.sleep(pause)
        task.cancel()
        await asyncio.wait({task})
    else:
        if way == "late":
            await asyncio.sleep(5 * pause)
        if way == "id":
            asyncio.get_running_loop().call_later(
                pause, lambda: llm._thread.abort_by_id(stream.request_id)
            )
        async for delta in stream:
            deltas.append(delta)
            if way in ("leave", "drop") and len(deltas) >= count:
                break
        if way == "leave":
            await stream.aclose()
    ends = check(ask, deltas, kind)
    if way in ("read", "late"):
        may_abort = may_abort or llm._admission._is_closed
        assert set(ends) <= {"stop", "length", *(["abort"] if may_abort else [])}
        assert stream.metrics is not None
    if way == "id":
        assert None not in ends
    return ends


async def storm(llm, seed, count, ways=WAYS, every=0.001, modes=()):
    """So many callers, who come one after the other; how often what happened.

    With `modes`, two trainers pause and update the engine meanwhile.
    """
    random = np.random.default_rng(seed)
    happened = collections.Counter()
    may_abort, refusals = "abort" in modes, (PausedError,) if modes else ()

    async def visiting(ask, way):
        try:
            happened.update(await visit(llm, ask, way, random, may_abort=may_abort))
        except (*LATE, *refusals) as error:
            happened[type(error).__name__] += 1

    is_over = asyncio.Event()
    trainings = [train(llm, random, modes, happened, is_over) for _ in modes[:2]]
    training = asyncio.gather(*trainings)
    async with asyncio.TaskGroup() as group:
        for _ in range(count):
            group.create_task(visiting(random_ask(random), str(random.choice(ways))))
            await asyncio.sleep(float(random.exponential(every)))
        if modes:
            await asyncio.sleep(0.05)
            is_over.set()
            await training
            await mend(llm)
            assert not llm.is_paused and llm.is_ready
    return happened


async def train(llm, random, modes, happened, is_over):
    """Pauses, sleeps and updates, of which the other trainer's calls may refuse some.

    It goes on until each was done, however slow the machine is.
    """
    while not (is_over.is_set() and all(happened[act] for act in ("pause", "sleep", "update"))):
        mode, level = str(random.choice(modes)), int(random.integers(1, 3))
        tags = [None, ["weights"], ["kv_cache"]][random.integers(3)]
        at_update = "recompute" if mode == "wait" else mode
        acts = {
            "pause": functools.partial(llm.pause, mode, clear_cache=bool(random.integers(2))),
            "sleep": functools.partial(llm.sleep, level, mode, tags=tags),
            "update": functools.partial(llm.update_weights, TREE, mode=at_update),
        }
        act = str(random.choice([*acts]))
        with contextlib.suppress(RuntimeError):
            await acts[act]()
            happened[act] += 1
            await asyncio.sleep(float(random.exponential(0.004)))
            await mend(llm)
        await asyncio.sleep(float(random.exponential(0.004)))


async def mend(llm):
    """End all pauses."""
    await llm.resume()
    await llm.wake_up()
    if llm.is_sleeping:
        await llm.update_weights(TREE)


async def settled(llm, seconds=30):
    """Wait until the engine has nothing to do; the last references to streams are gone then."""
    gc.collect()
    end = time.monotonic() + seconds
    while llm._admission.num_unfinished or llm._engine.session.has_work:
        assert time.monotonic() < end, "something runs on"
        await asyncio.sleep(0.002)
    await asyncio.sleep(0.01)


async def busy(llm):
    """Wait until several requests run or wait; the engine stays within a step until they do."""
    are_there, end = threading.Event(), time.monotonic() + 60
    llm._engine.schedule.runner.at["result"] = lambda: are_there.wait(60)
    while llm._admission.num_unfinished < 4:
        assert time.monotonic() < end, "the storm is over"
        await asyncio.sleep(0.001)
    are_there.set()


async def assert_nothing_is_left(llm):
    await settled(llm)
    assert len(asyncio.all_tasks()) == 1, "a task is left"
    llm._engine.schedule._check_nothing_is_left()
    thread = llm._thread
    assert not thread._live and not thread._waiting and not thread._out and thread._mail.empty()
    assert llm.num_waiting == llm.num_running == llm.kv_cache_usage == 0
    llm._engine.forget()
    gc.collect()
    assert not objects() - set(before)


def objects():
    """What there is of streams, in the whole process."""
    return {
        each
        for each in gc.get_objects()
        if isinstance(each, AsyncStream | OutputQueue | SampleStream)
    }


@pytest.mark.soak
@pytest.mark.parametrize(
    "depth, kept, interval",
    [(2, "off", 1), (3, "pages", 4), soak(0, "off", 4), soak(3, "pages", 1)],
)
def test_whatever_streams_do_others_notice_nothing_and_nothing_is_left(make, depth, kept, interval):
    """Three rounds; memory does not grow, which is looked at once, for looking takes long."""
    num_threads, sizes, is_traced = threading.active_count(), [], depth == 2

    async def rounds():
        happened = collections.Counter()
        options = {"max_in_flight": depth, "prefix_caching": kept, "stream_interval": interval}
        async with make(max_num_queued_reqs=40, **options) as llm:
            for number in range(3):
                happened += await storm(llm, 10 * depth + number, 30)
                await assert_nothing_is_left(llm)
                sizes.append(tracemalloc.get_traced_memory()[0])
            assert llm.is_healthy
        return happened

    if is_traced:
        tracemalloc.start()
    try:
        happened = asyncio.run(rounds())
    finally:
        tracemalloc.stop()
    print(dict(happened), sizes)
    assert happened["stop"] and happened["length"] and happened["abort"] + happened[None]
    assert bool(sizes[1]) == is_traced and sizes[2] - sizes[1] < 100_000, "memory grows"
    assert_threads_are_gone(num_threads)


def assert_threads_are_gone(number):
    end = time.monotonic() + 10
    while threading.active_count() > number and time.monotonic() < end:
        time.sleep(0.01)
    assert threading.active_count() <= number, threading.enumerate()


def test_a_full_queue_refuses_and_those_who_were_let_in_are_served(make):
    async def rounds():
        async with make(max_num_queued_reqs=4, max_num_queued_tokens=20) as llm:
            happened = await storm(llm, 1, 80, ways=("read", "leave"), every=0.001)
            await assert_nothing_is_left(llm)
        return happened

    happened = asyncio.run(rounds())
    assert happened["QueueFullError"] > 0 and happened["stop"] + happened["length"] > 0


def test_requests_that_wait_too_long_are_given_up_and_others_served(make):
    async def rounds():
        async with make(max_num_seqs=1, decode_rows=(1,), queue_timeout=0.05) as llm:
            happened = await storm(llm, 1, 60, ways=("read", "silent"), every=0)
            await assert_nothing_is_left(llm)
        return happened

    happened = asyncio.run(rounds())
    assert happened["QueueTimeoutError"] > 0 and happened["length"] > 0


@pytest.mark.few(1)
@pytest.mark.parametrize("timeout", [None, 0])
def test_a_drain_in_the_middle_refuses_new_ones_and_ends_the_others(make, timeout):
    async def rounds():
        async with make() as llm:
            coming = asyncio.create_task(storm(llm, 2, 60, ways=("read", "leave"), every=0.002))
            await asyncio.sleep(0.03)
            await busy(llm)
            is_whole = await llm.drain(timeout)
            assert not llm._admission.num_unfinished
            happened = await coming
            assert llm.is_healthy  # it may still be asked how it is
            await assert_nothing_is_left(llm)
        return is_whole, happened

    is_whole, happened = asyncio.run(rounds())
    assert happened["DrainingError"] > 3
    assert is_whole == (timeout is None) == (not happened["abort"])


@pytest.mark.few(1)
@pytest.mark.parametrize("timeout", [None, 0.05])
@pytest.mark.parametrize("is_late", [False, True])
def test_a_drain_in_a_pause_ends(make, timeout, is_late):
    """Requests that no step runs are aborted; also if the pause begins after the drain."""

    async def rounds():
        async with make() as llm:
            ask = Ask(prompt=2, max_tokens=12, n=2)
            await llm.pause()
            streams = [await llm.submit(llm._engine.ask(ask)) for _ in range(5)]
            if is_late:
                await llm.resume()
                draining = asyncio.create_task(llm.drain(timeout))
                await asyncio.sleep(0)
                await llm.sleep()
                is_whole = await draining
            else:
                is_whole = await asyncio.wait_for(llm.drain(timeout), 20)
            ends = {delta.finish_reason for each in streams async for delta in each}
            assert not (is_whole and "abort" in ends)
            assert is_late or ends == {"abort"}
            del streams
            await assert_nothing_is_left(llm)

    asyncio.run(rounds())


@pytest.mark.parametrize("timeout", [None, 0])
def test_a_drain_of_a_paused_engine_without_requests_aborts_none(make, timeout):
    async def drained():
        async with make() as llm:
            await llm.pause()
            return await llm.drain(timeout)

    assert asyncio.run(drained())


def test_a_pause_that_waits_refuses_requests_whatever_other_calls_end(make):
    async def paused():
        async with make() as llm:
            gate = llm._engine.session.gate
            await llm.pause()
            stream = await llm.submit(llm._engine.ask(Ask(prompt=2, max_tokens=12)))
            gate.open("pause")  # the engine thread steps at its next mail
            waits = [asyncio.create_task(llm.pause("wait")) for _ in range(2)]
            await asyncio.sleep(0)
            waits.pop().cancel()
            await asyncio.sleep(0)
            assert gate.is_refusing
            await llm.resume()
            assert gate.is_refusing or waits[0].done()
            await waits[0]
            assert [delta.finish_reason async for delta in stream][-1] != "abort"
            await llm.resume()
            assert not gate.is_refusing

    asyncio.run(paused())


@pytest.mark.few(1)
@pytest.mark.parametrize("place", ["dispatch", "result"])
def test_a_step_that_fails_ends_every_stream_and_the_service(make, place):
    """Each stream gives what came before, and then the error."""
    num_threads = threading.active_count()

    def fail():
        raise MemoryError("the device is gone")

    async def rounds():
        async with make() as llm:
            coming = asyncio.create_task(storm(llm, 3, 60, every=0.002))
            await asyncio.sleep(0.03)
            await busy(llm)
            llm._engine.schedule.runner.at[place] = fail
            happened = await coming
            assert not llm.is_healthy and isinstance(llm.error, MemoryError)
            with pytest.raises(EngineDeadError, match="failed with MemoryError") as raised:
                await llm.submit(llm._engine.ask(random_ask(np.random.default_rng(0))))
            assert raised.value.__cause__ is llm.error
            assert not await llm.drain(5)
            del raised
            await llm.close()
            await assert_nothing_is_left(llm)
        return happened

    happened = asyncio.run(rounds())
    assert happened["EngineDeadError"] > 10 and not happened["error"]
    assert_threads_are_gone(num_threads)


def test_a_failure_outside_the_thread_is_heard_of(make):
    """As where programs run on the state once they are compiled."""

    async def rounds():
        async with make() as llm:
            engine, is_in_line = llm._engine, threading.Event()
            engine.schedule.runner.at["result"] = lambda: is_in_line.wait(10)
            stream = await llm.submit(engine.ask(Ask(prompt=1, max_tokens=12)))

            def fail():
                raise OSError("no memory")

            def fail_in_turn():
                threading.Timer(0.05, is_in_line.set).start()
                engine.session.in_turn(lambda: engine.session.guarded(fail))

            engine.before_prepare = fail_in_turn
            with pytest.raises((OSError, EngineDeadError)):  # if the thread has heard already
                await llm.submit("0")
            with pytest.raises(EngineDeadError, match="OSError"):
                async for _ in stream:
                    pass
            assert not llm.is_healthy

    asyncio.run(rounds())


def test_close_ends_what_runs_with_abort(make):
    num_threads = threading.active_count()

    async def rounds():
        llm = make()
        coming = asyncio.create_task(storm(llm, 4, 60, ways=("read", "late"), every=0))
        await busy(llm)
        await asyncio.gather(llm.close(), llm.close())
        happened = await coming
        assert not llm.is_healthy and llm.error is None
        await llm.close()
        with pytest.raises(DrainingError, match="New requests are refused"):
            await llm.submit("0")
        return happened

    assert asyncio.run(rounds())["abort"]
    assert_threads_are_gone(num_threads)


@pytest.mark.soak
@pytest.mark.parametrize(
    "depth, kept, modes",
    [
        (2, "pages", ("keep", "wait")),
        (3, "off", ("keep", "wait", "abort")),
        soak(0, "pages", ("keep",)),
        soak(1, "off", ("wait", "wait")),
    ],
)
def test_trainers_change_no_token_and_leave_nothing(make, depth, kept, modes):
    """L16: pauses, sleeps and updates among callers that come and go."""

    async def rounds():
        happened = collections.Counter()
        async with make(max_in_flight=depth, prefix_caching=kept) as llm:
            for number in range(2):
                happened += await storm(llm, 20 * depth + number, 60, every=0.003, modes=modes)
                await assert_nothing_is_left(llm)
            assert llm.is_healthy
        return happened

    happened = asyncio.run(rounds())
    print(dict(happened))
    assert min(happened[name] for name in ("pause", "sleep", "update", "length", "stop")) > 0
    assert not happened["EngineDeadError"]


@pytest.mark.soak
def test_event_loops_in_several_threads_share_an_engine_and_engines_share_a_loop(make):
    first, second = make(), make(max_in_flight=0)

    async def both(seed):
        storms = [storm(llm, seed + i, 30) for i, llm in enumerate((first, second))]
        return sum(await asyncio.gather(*storms), collections.Counter())

    happened = in_threads(*[lambda seed=seed: asyncio.run(both(seed)) for seed in (5, 7, 9)])
    assert all(each["length"] for each in happened)

    async def end():
        for llm in (first, second):
            await assert_nothing_is_left(llm)
            await llm.close()

    asyncio.run(end())


def test_a_stream_that_nobody_reads_slows_nobody(make):
    """Its tokens come all the same, and later in one piece."""

    async def rounds():
        async with make() as llm:
            ask = Ask(prompt=2, max_tokens=12, n=2)
            unread = [await llm.submit(llm._engine.ask(ask)) for _ in range(3)]
            happened = await storm(llm, 6, 40, ways=("read",))
            await settled(llm)
            for stream in unread:
                deltas = [delta async for delta in stream]
                assert len(deltas) == 2 and check(ask, deltas) == {"length": 2}
        return happened

    assert asyncio.run(rounds())["length"]


def test_a_loop_that_is_closed_leaves_nothing_running(make):
    llm = make()

    async def lose():
        return [await llm.submit(llm._engine.ask(Ask(prompt=0, max_tokens=12))) for _ in range(20)]

    streams = asyncio.run(lose())  # they are alive, and nobody can read them any more

    async def end():
        await settled(llm)
        assert llm.is_healthy
        streams.clear()
        happened = await storm(llm, 8, 20)
        await assert_nothing_is_left(llm)
        await llm.close()
        return happened

    assert asyncio.run(end())["length"]


# Bugs, each planted in place of a method; a storm has to find it.

real_end, real_receive, real_give = EngineThread._end, OutputQueue.receive, SampleStream._give


def an_abort_is_lost(self, inboxes):
    if len(inboxes) == 1 and len(inboxes[0].sample_streams) > 1:
        return
    real_end(self, inboxes)


def samples_that_have_ended_stay(self, sample_stream):
    sample_stream.is_over = True


def arrivals_go_to_the_first_sample(self, sample_stream, token_delta):
    real_receive(self, self.sample_streams[0], token_delta)


def tokens_come_twice(self, finish):
    before = self._num_given
    real_give(self, finish)
    if before % 3 == 2:
        self._num_given = before


def the_last_tokens_are_lost(self, finish):
    if finish is Finish.LENGTH and self.request.index:
        del self.request.tokens[-1]
    real_give(self, finish)


BUGS = [
    (EngineThread, "_end", an_abort_is_lost),
    (EngineThread, "_forget", samples_that_have_ended_stay),
    (OutputQueue, "receive", arrivals_go_to_the_first_sample),
    (SampleStream, "_give", tokens_come_twice),
    (SampleStream, "_give", the_last_tokens_are_lost),
]


async def watched_storm(llm, seconds, seconds_after):
    """A storm within `seconds`, after which the engine is done within `seconds_after`."""
    try:
        async with asyncio.timeout(seconds):
            happened = await storm(llm, 1, 60)
            await settled(llm, seconds_after)
            await assert_nothing_is_left(llm)
    finally:
        llm._thread.stop()
    assert not happened["QueueFullError"]


def test_a_storm_without_a_bug_finds_nothing(make):
    asyncio.run(watched_storm(make(max_num_queued_reqs=50), 300, 60))


@pytest.mark.few(1)
@pytest.mark.parametrize("owner, name, bug", BUGS, ids=lambda value: getattr(value, "__name__", ""))
def test_a_storm_finds(make, owner, name, bug, monkeypatch):
    monkeypatch.setattr(owner, name, bug)
    with pytest.raises((AssertionError, ExceptionGroup, TimeoutError)):
        asyncio.run(watched_storm(make(max_num_queued_reqs=50), 20, 1))
