"""ReplicaGroup over engines in this process: routing, ends, starts again, and calls of all."""

import asyncio
import contextlib
import functools
import socket
import threading
import time

import pytest
from callers import Ask, expected
from fake_llm_engine import FakeLLMEngine, sample_of

from jaxspec.api import async_llm
from jaxspec.api.async_calls import WorkerSpec
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.processes import replica, replica_group, replica_session
from jaxspec.api.processes.channel import Channel
from jaxspec.api.processes.engine_server import RemoteEngineServer
from jaxspec.api.processes.replica import Replica
from jaxspec.api.processes.replica_group import ReplicaGroup
from jaxspec.api.processes.replica_session import ReplicaSession
from jaxspec.engine import async_stream
from jaxspec.engine.admission import Admission
from jaxspec.engine.async_stream import AsyncStream, OutputQueue
from jaxspec.engine.errors import EngineDeadError, ReplicaDiedError, ReplicasDeadError
from jaxspec.options.engine_options import EngineConfig

ASKS = [Ask(prompt=number % 5, max_tokens=3 + number, n=1 + number % 2) for number in range(9)]
ASKS += [Ask(prompt=2, max_tokens=12, ends_at=4, letters=2), Ask(prompt=3, max_tokens=9, ends_at=2)]
LONG = Ask(prompt=4, max_tokens=16)


class Process:
    """Stands for a `Popen` whose engine is here."""

    returncode = None

    def __init__(self, gone):
        self._gone = gone

    def poll(self):
        return self.returncode

    def wait(self):
        return self.returncode

    def end(self):
        self.returncode = 0 if self.returncode is None else self.returncode
        self._gone()

    def kill(self):
        self.returncode = -9 if self.returncode is None else self.returncode
        self._gone()


class Starts:
    """What replaces `Replica.start`: `engines` has those of all starts, `fail` fails later ones."""

    def __init__(self):
        self.engines, self.serving, self.fail = [], set(), False
        self.hangs = False  # after a failed step
        self.warmed = []  # engine and argument of each `warm_up`
        self.warming = None  # called in it

    async def start(self, environment):
        if self.fail:
            raise OSError("planted")
        near, far = [await Channel.of(end) for end in socket.socketpair()]
        llm = AsyncLLM(max_num_seqs=5, decode_rows=(5,))
        process = Process(far.close)
        process.llm = llm
        spec = WorkerSpec(list, "fake", llm.shapes, llm.limits)

        async def get_ready():
            process.is_ready = True

        async def warm_up(sets):
            self.warmed.append((process, sets))
            if self.warming is not None:
                await self.warming()

        handlers = {
            "warm_up": warm_up,
            "options": lambda options: far.notify("ready", spec),
            "end": process.end,
            "snapshot": llm.snapshot,
            "get_ready": get_ready,
        }
        task = asyncio.create_task(RemoteEngineServer(llm, far, handlers).run())
        self.serving.add(task)
        self.engines.append(process)

        async def end_if_failed():
            while process.returncode is None:
                if llm.error is not None and not self.hangs:
                    process.kill()
                await asyncio.sleep(0.005)

        self.serving.add(asyncio.create_task(end_if_failed()))
        return Replica(process, near)

    def close(self):
        for process in self.engines:
            process.llm.shutdown(30)


@pytest.fixture
def starts(monkeypatch):
    monkeypatch.setattr(async_llm, "LLMEngine", FakeLLMEngine)
    found = Starts()
    monkeypatch.setattr(replica_group.Replica, "start", found.start)
    monkeypatch.setattr(replica_group, "WAITS", (0.0, 0.0))
    yield found
    found.close()


@contextlib.contextmanager
def grouped(count=2, **options):
    """A group and its session."""
    group = ReplicaGroup(EngineConfig(data_parallel_size=count, **options), Admission(None, None))
    try:
        yield group, ReplicaSession(group, group.spec.shapes)
    finally:
        group.stop()
        group.ended.result(30)
        assert not group._thread.join(30) and not group._thread.is_alive()


def samples_of(asks):
    groups = [ask.requests(first_key=0) for ask in asks]
    for number, group in enumerate(groups):
        for index, request in enumerate(group):
            request.index, request.request_id = index, str(number)
    return [[sample_of(request) for request in group] for group in groups]


def until(is_so):
    end = time.monotonic() + 30
    while not is_so():
        assert time.monotonic() < end
        time.sleep(0.002)


def check(samples):
    for sample in samples:
        tokens, finish, text = expected(sample.request)
        assert (sample.request.output, sample.request.finish, sample.text) == (tokens, finish, text)


def nothing_is_left(group):
    until(lambda: not group._placed and not group.admission.num_unfinished)
    assert set(group._router._in_flight.values()) == {0}


def test_a_batch_is_spread_and_every_sample_is_right(starts):
    with grouped() as (group, session):
        flat = [sample for samples in samples_of(ASKS) for sample in samples]
        lefts = [len(left) for left in session.run(flat)]
        assert lefts[-1] == 0 and lefts == sorted(lefts, reverse=True)
        check(flat)
        assert not session._buffers
        nothing_is_left(group)
        tokens = [process.llm.metrics()["num_tokens"] for process in starts.engines]
        assert all(tokens) and group.snapshot().engine["num_tokens"] == sum(tokens)


def test_threads_share_the_replicas_and_each_reads_its_own(starts):
    with grouped() as (group, session):
        found = []

        def run():
            flat = [sample for samples in samples_of(ASKS) for sample in samples]
            for _ in session.run(flat):
                pass
            found.extend(flat)

        threads = [threading.Thread(target=run) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert len(found) == 4 * sum(ask.n for ask in ASKS)
        check(found)
        nothing_is_left(group)


def test_streams_of_an_event_loop_and_one_that_is_left(starts):
    async def run(group):
        streams = []
        for samples in samples_of([*ASKS, LONG]):

            def make(make_sample_stream, settle, samples=samples):
                loop = asyncio.get_running_loop()
                return OutputQueue(loop, samples, make_sample_stream, settle)

            streams.append((samples, AsyncStream(group.submit(make), group.abort)))
        _, left = streams.pop()
        await anext(left)
        await left.aclose()
        for samples, stream in streams:
            async for _ in stream:
                pass
            check(samples)

    with grouped(3) as (group, _):
        asyncio.run(run(group))
        nothing_is_left(group)


def first_then(event):
    """The first call returns at once, later ones wait."""
    calls = iter([True])
    return lambda: next(calls, False) or event.wait(30)


def test_one_that_is_killed_ends_its_own_and_is_prepared_and_takes_requests_again(starts):
    with grouped() as (group, session):
        group.prepare("get_ready")
        killed = threading.Event()
        for process in starts.engines:
            process.llm._engine.schedule.runner.at["result"] = first_then(killed)
        streams = [session.stream(*samples) for samples in samples_of([LONG, LONG])]
        for stream in streams:
            next(stream)
        group.snapshot()
        group._loop.call_soon_threadsafe(starts.engines[0].kill)
        until(lambda: starts.engines[0].returncode == -9)
        killed.set()
        with pytest.raises(ReplicaDiedError, match="Replica 1 of 2.* status -9"):
            list(streams[0])
        assert list(streams[1])[-1].finish_reason == "length"
        until(lambda: len(group._replicas) == 2)
        assert starts.engines[2].is_ready
        flat = [sample for samples in samples_of(ASKS) for sample in samples]
        list(session.run(flat))
        check(flat)
        assert starts.engines[2].llm.metrics()["num_tokens"] > 0
        alive = sum(process.llm.metrics()["num_tokens"] for process in starts.engines[1:])
        assert group.snapshot().engine["num_tokens"] > alive  # and those of the dead one
        nothing_is_left(group)


def test_a_request_counts_as_waiting_until_its_first_row_even_if_it_is_read_at_its_end(
    starts, monkeypatch
):
    begun = []
    monkeypatch.setattr(replica_session.Buffer, "begin", lambda buffer: begun.append(buffer))
    with grouped() as (group, session):
        begins = threading.Event()
        for process in starts.engines:
            process.llm._engine.schedule.runner.at["result"] = lambda: begins.wait(30)
        (samples,) = samples_of([LONG])
        running = session.run(samples)
        thread = threading.Thread(target=list, args=(running,))
        thread.start()
        until(lambda: group.admission.num_unfinished == 1 and not group.admission.num_waiting)
        begins.set()
        thread.join(30)
        check(samples)
        assert len(begun) == 1 and begun[0].samples == samples


def test_samples_that_are_added_are_returned_as_they_end_and_abort_ends_them(starts):
    with grouped() as (group, session):
        prompts = samples_of(ASKS)
        for samples in prompts:
            session.add(samples)
        ended = []
        while session.has_work:
            for buffer, deltas in session.step():
                ended += [delta.finish_reason for delta in deltas]
                assert all(buffer.samples[delta.index].is_taken for delta in deltas)
        assert len(ended) == sum(ask.n for ask in ASKS)
        check([sample for samples in prompts for sample in samples])
        for process in starts.engines:
            process.llm._engine.schedule.runner.at["result"] = lambda: time.sleep(0.01)
        (samples,) = samples_of([LONG])
        session.add(samples)
        session.abort(samples)
        ((buffer, (delta,)),) = session.step()
        assert delta.finish_reason == "abort" and not session.has_work and not session.step()
        nothing_is_left(group)


def test_a_failed_step_ends_a_replica_and_no_other(starts):
    with grouped() as (group, session):

        def fail():
            raise OSError("planted")

        starts.engines[0].llm._engine.schedule.runner.at["result"] = fail
        first, second = (session.stream(*samples) for samples in samples_of([LONG, LONG]))
        with pytest.raises(ReplicaDiedError, match="failed in a step"):
            list(first)
        assert list(second)[-1].finish_reason == "length"
        assert group.is_running


def test_one_that_hangs_after_a_failed_step_is_killed(starts, monkeypatch):
    monkeypatch.setattr(replica, "_ENDING", 0.01)
    with grouped() as (group, session):

        def fail():
            raise OSError("planted")

        starts.hangs = True
        starts.engines[0].llm._engine.schedule.runner.at["result"] = fail
        with pytest.raises(ReplicaDiedError, match="failed in a step"):
            list(session.stream(*samples_of([LONG])[0]))
        until(lambda: len(starts.engines) == 3 and len(group._replicas) == 2)
        assert starts.engines[0].returncode == -9


class ClosedLoop:
    def call_soon_threadsafe(self, callback, *args):
        raise RuntimeError("Event loop is closed")


def test_requests_of_a_closed_loop_that_no_replica_has_end_with_their_abort_or_the_group(
    starts, monkeypatch
):
    monkeypatch.setattr(replica, "_MOST_QUEUEING", 0)  # nothing is sent
    with grouped() as (group, _):
        first, second = samples_of([LONG, LONG])

        def submit(samples):
            return group.submit(functools.partial(OutputQueue, ClosedLoop(), samples))

        group.abort(submit(first))
        nothing_is_left(group)
        submit(second)
        until(lambda: group._placed)
        group.stop()
        assert group.ended.result(30) is None
        assert not group.admission.num_unfinished
        assert all(process.returncode == 0 for process in starts.engines), "ended in order"


def test_one_that_starts_makes_the_calls_that_come_meanwhile(starts):
    with grouped() as (group, _):
        group.prepare("warm_up", "a")
        group.prepare("warm_up", "a")
        goes_on, waits = threading.Event(), threading.Event()

        async def warming():
            waits.set()
            await asyncio.to_thread(goes_on.wait, 30)

        starts.warming = warming
        group._loop.call_soon_threadsafe(starts.engines[0].kill)
        assert waits.wait(30)
        later = threading.Thread(target=group.prepare, args=("warm_up", "b"))
        later.start()
        until(lambda: (starts.engines[1], "b") in starts.warmed)
        goes_on.set()
        later.join(30)
        until(lambda: len(group._replicas) == 2)
        new = starts.engines[2]
        assert [sets for process, sets in starts.warmed if process is new] == ["a", "b"]


def test_a_call_that_fails_is_not_repeated(starts):
    with grouped() as (group, _):

        async def refuse():
            raise ValueError("planted")

        starts.warming = refuse
        with pytest.raises(ValueError, match="planted"):
            group.prepare("warm_up", "a")
        assert not group._prepared


def test_the_request_of_a_reader_that_fails_is_aborted(starts, monkeypatch):
    with grouped() as (group, session):
        aborted, (samples,) = [], samples_of([LONG])

        def fail(request, token_delta):
            raise ValueError("planted")

        monkeypatch.setattr(async_stream, "receive", fail)
        monkeypatch.setattr(group, "abort", lambda *receivers: aborted.extend(receivers))
        session.add(samples)
        with pytest.raises(ValueError, match="planted"):
            session.step()
        assert [receiver.samples for receiver in aborted] == [samples]
        ((_, (delta,)),) = session.step()
        assert delta.finish_reason == "error" and not session.has_work


def test_without_a_replica_nothing_is_ready_and_ends_in_a_row_end_the_group(starts):
    with grouped() as (group, session):
        starts.fail = True
        (samples,) = samples_of([LONG])
        stream = session.stream(*samples)
        next(stream)
        for process in list(starts.engines):
            group._loop.call_soon_threadsafe(process.kill)
        with pytest.raises((ReplicaDiedError, ReplicasDeadError)):
            list(stream)
        group.ended.result(30)
        assert not group.is_running and not group.is_ready
        assert isinstance(group.error, EngineDeadError) and "planted" in str(group.error)
        with pytest.raises(ReplicasDeadError):
            session.require_usable()
        (samples,) = samples_of([LONG])
        with pytest.raises(ReplicasDeadError):
            next(session.stream(*samples))


def test_a_start_that_fails_raises_its_error(starts):
    starts.fail = True
    with pytest.raises(OSError, match="planted"):
        ReplicaGroup(EngineConfig(data_parallel_size=2), Admission(None, None))


def test_an_end_aborts_what_runs(starts):
    with grouped() as (group, session):
        streams = [session.stream(*samples) for samples in samples_of([LONG] * 3)]
        for stream in streams:
            next(stream)
        session.close()
        assert [list(stream)[-1].finish_reason for stream in streams] == ["abort"] * 3
        with pytest.raises(RuntimeError, match="closed"):
            session.add(samples_of([LONG])[0])


def test_a_stopped_group_is_closed_for_calls_of_all_replicas(starts):
    with grouped() as (group, session):
        group.stop()
        group.ended.result(30)
        for call in (session.require_usable, group.snapshot, group.reset_prefix_cache):
            with pytest.raises(RuntimeError, match="closed"):
                call()


def test_hidden_states_are_refused_by_name(tmp_path):
    speculation = {"method": "extract_hidden_states", "folder": str(tmp_path), "layers": [0]}
    config = EngineConfig(data_parallel_size=2, speculative_config=speculation)
    with pytest.raises(ValueError, match="Hidden states.*data_parallel_size=2"):
        ReplicaGroup(config, Admission(None, None))


def test_each_replica_has_folders_of_its_own(tmp_path):
    config = EngineConfig(
        data_parallel_size=2, profiler_folder=tmp_path / "profiles", show_progress=True
    )
    found = [replica_group.options_of(config, number) for number in (1, 2)]
    assert [each["profiler_folder"].name for each in found] == ["replica-1", "replica-2"]
    assert [each["show_progress"] for each in found] == [True, False]
    assert all(each["data_parallel_size"] == 1 for each in found)
