"""EngineThread by itself: what it takes, when it steps, and what it sends."""

import functools
import threading
import time

import pytest
from callers import Ask, expected
from fake_llm_engine import FakeLLMEngine

from jaxspec.engine.admission import Admission
from jaxspec.engine.async_stream import OutputQueue
from jaxspec.engine.engine_thread import EngineThread
from jaxspec.engine.errors import DrainingError, EngineDeadError
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_params import RequestOutputKind, SamplingParams
from jaxspec.scheduler.request_observer import RequestObserver

LONG = Ask(prompt=0, max_tokens=12)


class Loop:
    """An event loop that runs what it is given when the test says so."""

    def __init__(self):
        self.calls, self.is_closed = [], False

    def call_soon_threadsafe(self, call, *given):
        if self.is_closed:
            raise RuntimeError("Event loop is closed")
        self.calls.append((call, given))

    def run(self):
        calls, self.calls = self.calls, []
        for call, given in calls:
            call(*given)
        return len(calls)


class Harness:
    """A thread over a fake device."""

    def __init__(self, stream_interval=1, **options):
        self.engine = FakeLLMEngine(max_num_seqs=5, decode_rows=(5,), **options)
        self.thread = EngineThread(self.engine.session, Admission(None, None), stream_interval)
        self.runner = self.engine.schedule.runner
        self.num_steps = lambda: self.engine.session.engine.metrics.num_steps

    def submit(self, ask, loop, request_id=None):
        samples = self.engine.prepare_one(self.engine.ask(ask), None, request_id, 0)
        return self.thread.submit(functools.partial(OutputQueue, loop, samples))

    def hold(self):
        """Let the next result wait; a call lets it come."""
        gate = threading.Event()
        self.runner.at["result"] = lambda: gate.wait(30)
        return gate.set

    def wait(self, until):
        end = time.monotonic() + 30
        while not until():
            assert time.monotonic() < end, "it does not come"
            time.sleep(1e-3)

    def wait_until_idle(self):
        self.wait(lambda: not self.thread.admission.num_unfinished)

    def end(self):
        self.thread.stop()
        self.thread.ended.result(30)


@pytest.fixture
def harness():
    made = Harness(max_in_flight=0)
    yield made
    made.end()


def test_a_step_makes_one_call_of_each_event_loop(harness):
    loops = Loop(), Loop()
    may_go = harness.hold()
    harness.submit(LONG, loops[0])
    harness.wait(lambda: "result" not in harness.runner.at)
    inboxes = [harness.submit(LONG, loops[index % 2]) for index in range(4)]
    may_go()
    harness.wait_until_idle()
    harness.wait(lambda: len(loops[1].calls) > 5)
    assert max(len(loop.calls) for loop in loops) <= harness.num_steps()
    for loop in loops:
        loop.run()
    for output_queue in inboxes:
        assert output_queue.take().text == expected(output_queue.sample_streams[0].request)[2]


def test_it_sleeps_while_there_is_nothing_to_do(harness):
    harness.submit(LONG, Loop())
    harness.wait_until_idle()
    harness.wait(lambda: not harness.engine.session.has_work)
    before = harness.num_steps()
    time.sleep(0.05)
    assert harness.num_steps() == before and harness.thread._mail.empty()


def test_a_request_waits_until_it_has_a_row(harness):
    """It is told when the step is over in which it got one."""
    ask = Ask(prompt=0, max_tokens=12, n=4)
    may_go = harness.hold()
    inboxes = [harness.submit(ask, Loop()) for _ in range(3)]
    assert harness.thread.admission.num_waiting == 3
    for _ in range(3):
        harness.wait(lambda: "result" not in harness.runner.at)
        had_begun = sum(output_queue.has_begun for output_queue in inboxes)
        before, may_go = may_go, harness.hold()
        before()
    harness.wait(lambda: "result" not in harness.runner.at)
    assert 1 <= had_begun <= 3 - harness.thread.admission.num_waiting <= 2
    may_go()
    harness.wait_until_idle()
    assert harness.thread.admission.num_waiting == 0


def test_all_mail_is_taken_before_a_step(harness):
    loop = Loop()
    may_go = harness.hold()
    first = harness.submit(LONG, loop)
    harness.wait(lambda: "result" not in harness.runner.at)
    others = [harness.submit(LONG, loop, "mine") for _ in range(3)]
    harness.thread.abort(first)
    harness.thread.abort_by_id("mine")
    before = harness.num_steps()
    may_go()
    harness.wait_until_idle()
    assert harness.num_steps() == before
    assert {
        sample_stream.request.finish
        for output_queue in (first, *others)
        for sample_stream in output_queue.sample_streams
    } == {Finish.ABORT}
    loop.run()
    assert [output_queue.take().finish_reason for output_queue in others] == ["abort"] * 3


def test_a_stop_string_ends_the_row_and_who_follows_hears_its_tokens(harness, monkeypatch):
    heard, loop = [], Loop()
    monkeypatch.setattr(
        harness.engine.session.scheduler,
        "settle",
        lambda request: heard.append((request.num_output, request.finish)),
    )
    ask = Ask(prompt=1, max_tokens=12, ends_at=4, letters=2)
    output_queue = harness.submit(ask, loop)
    (request,) = ask.requests(first_key=0)
    tokens, _, _ = expected(request)
    while harness.thread.admission.num_unfinished:
        loop.run()
    harness.wait(lambda: (loop.run(), heard)[1])
    assert heard == [(len(tokens), Finish.STOP)]
    # A row that has ended before its stop string is found is cut all the same.
    output_queue = harness.submit(ask, loop)
    harness.wait_until_idle()
    assert output_queue.sample_streams[0].request.num_output == 12 and len(heard) == 1
    harness.wait(lambda: (loop.run(), len(heard) == 2)[1])  # its tokens may be on their way
    assert heard[1] == heard[0]
    # And one that nobody reads to its end is settled as it is.
    output_queue = harness.submit(ask, loop)
    harness.wait_until_idle()
    harness.thread.abort(output_queue)
    harness.wait(lambda: len(heard) == 3)
    assert heard[2] == (12, Finish.LENGTH)


def test_the_requests_of_a_closed_loop_are_ended(harness):
    loop, other = Loop(), Loop()
    loop.is_closed = True
    may_go = harness.hold()
    lost = [harness.submit(LONG, loop) for _ in range(3)]
    kept = harness.submit(LONG, other)
    may_go()
    harness.wait_until_idle()
    harness.wait(lambda: not harness.engine.session.has_work)
    assert harness.thread.is_running
    assert all(output_queue.sample_streams[0].request.finish for output_queue in lost)
    assert kept.sample_streams[0].request.finish is Finish.LENGTH


def test_an_error_is_told_to_all_and_what_comes_later_is_refused(harness):
    loop, closed = Loop(), Loop()
    may_go = harness.hold()
    output_queue, lost = harness.submit(LONG, loop), harness.submit(LONG, closed)
    harness.wait(lambda: "result" not in harness.runner.at)
    closed.is_closed = True

    def fail():
        raise OSError("gone")

    harness.runner.at["resulted"] = fail
    may_go()
    harness.wait(lambda: harness.thread.error is not None)
    harness.wait_until_idle()
    assert not harness.thread.is_running and not harness.thread._live
    loop.run()
    assert isinstance(output_queue.error, EngineDeadError) and lost.error is None
    with pytest.raises(EngineDeadError):
        harness.submit(LONG, loop)
    harness.thread.abort(output_queue)  # too late, and harmless


def test_what_the_interval_keeps_back_comes_before_the_error():
    harness, loop = Harness(max_in_flight=0, stream_interval=99), Loop()
    may_go = harness.hold()
    output_queue = harness.submit(LONG, loop)
    harness.wait(lambda: "result" not in harness.runner.at)
    steps = iter(range(3))

    def fail_at_last():
        if next(steps, None) is None:
            raise OSError("gone")
        harness.runner.at["resulted"] = fail_at_last

    harness.runner.at["resulted"] = fail_at_last
    may_go()
    harness.wait(lambda: harness.thread.error is not None)
    harness.wait_until_idle()
    loop.run()
    request = output_queue.sample_streams[0].request
    delta = output_queue.take()
    assert delta.finish_reason is None and delta.token_ids == request.output
    assert len(request.output) >= 3
    assert expected(request)[2].startswith(delta.text)
    assert isinstance(output_queue.error, EngineDeadError)
    harness.end()


@pytest.mark.parametrize("kind", [OSError, TypeError, ValueError])
def test_a_failure_of_the_session_in_another_thread_is_one_of_its_own(harness, kind):
    """As where programs are compiled, or a trace begins."""
    loop, error = Loop(), kind("gone")
    output_queue = harness.submit(LONG, loop)
    harness.wait_until_idle()
    assert harness.thread.is_running and output_queue.error is None

    def fail():
        raise error

    session = harness.engine.session
    with pytest.raises(kind, match="gone"):
        session.in_turn(lambda: session.guarded(fail))
    harness.wait(lambda: not harness.thread.is_running)
    assert harness.thread.error is error
    with pytest.raises(EngineDeadError):
        harness.submit(LONG, loop)


def test_a_stop_ends_what_runs_and_refuses_what_comes():
    harness, loop = Harness(), Loop()
    may_go = harness.hold()
    output_queue = harness.submit(LONG, loop)
    harness.wait(lambda: "result" not in harness.runner.at)
    harness.thread.stop()
    late = harness.submit(LONG, loop)  # nobody knows yet that it ends
    may_go()
    harness.thread.ended.result(30)
    harness.end()
    loop.run()
    assert [each.take().finish_reason for each in (output_queue, late)] == ["abort"] * 2
    assert harness.engine.session.is_closed and not harness.thread.is_running
    with pytest.raises(DrainingError):
        harness.thread.admission.check_open()


def test_a_session_that_can_t_be_closed_says_so(monkeypatch):
    harness, loop = Harness(), Loop()

    def fail():
        raise OSError("gone")

    monkeypatch.setattr(harness.engine.session.engine, "close", fail)
    output_queue = harness.submit(LONG, loop)
    with pytest.raises(OSError, match="gone"):
        harness.end()
    loop.run()
    assert output_queue.take().finish_reason


class Recorder(RequestObserver):
    """Gives requests routes whose copies have ended, or never end."""

    def __init__(self, is_ready, at_end=lambda: None):
        self.is_ready, self.at_end = is_ready, at_end

    def leave(self, request):
        request.routes = self
        self.at_end()


@pytest.mark.parametrize("is_ready", [False, True])
def test_a_last_delta_is_sent_once_its_routes_are_copied(harness, is_ready):
    """Or once there is no work."""
    loop, may_go = Loop(), harness.hold()
    scheduler = harness.engine.session.scheduler
    scheduler.observers = *scheduler.observers, Recorder(is_ready)
    harness.submit(LONG, loop)
    harness.wait(lambda: "result" not in harness.runner.at)
    short = harness.submit(Ask(prompt=1, max_tokens=2), loop)

    def ends():
        """Of each last delta, the number of its call, and whether it is that of `short`."""
        for number, (_, (batch,)) in enumerate(loop.calls):
            for receiver, _, token_delta in batch:
                if token_delta.finish:
                    yield number, receiver is short

    may_go()
    harness.wait(lambda: len(list(ends())) == 2)
    (first, is_short), (last, _) = ends()
    assert (first < last and is_short) if is_ready else first == last


def test_routes_whose_copies_may_have_failed_are_not_sent(harness):
    loop, may_go = Loop(), harness.hold()
    scheduler = harness.engine.session.scheduler
    mail = harness.thread._mail
    recorder = Recorder(is_ready=False, at_end=lambda: mail.put(lambda: 1 / 0))
    scheduler.observers = *scheduler.observers, recorder
    long = harness.submit(LONG, loop)
    harness.wait(lambda: "result" not in harness.runner.at)
    short = harness.submit(Ask(prompt=1, max_tokens=1), loop)
    may_go()
    harness.wait(lambda: harness.thread.error is not None)
    harness.end()
    loop.run()
    assert isinstance(long.error, EngineDeadError) and short.error is None
    delta = short.take()
    assert (delta.finish_reason, delta.routed_experts) == ("length", None)


def test_who_reads_the_end_alone_is_called_once(harness):
    loop = Loop()
    samples = harness.engine.prepare_one(
        harness.engine.ask(LONG), SamplingParams(output_kind=RequestOutputKind.FINAL_ONLY), None, 0
    )
    output_queue = harness.thread.submit(functools.partial(OutputQueue, loop, samples))
    harness.wait_until_idle()
    harness.wait(lambda: loop.calls)
    assert harness.num_steps() > 1 and len(loop.calls) == 1
    loop.run()
    assert output_queue.take().text == expected(output_queue.sample_streams[0].request)[2]
