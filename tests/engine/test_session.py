"""A session's turns: threads that step at once, streams dropped midway, steps that fail."""

import functools
import os
import random
import signal
import threading
import time

import pytest
from threads import in_threads

from jaxspec.engine.session import Session
from jaxspec.plan.block_plan import Copied
from jaxspec.plan.plan import RowOutput
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Finish, Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.requests.stop_strings import StopStrings
from jaxspec.scheduler.scheduled_step import Progress
from jaxspec.scheduler.scheduler import Scheduler

SIZES = StepShapes(
    max_num_seqs=8,
    max_model_len=400,
    page_size=16,
    num_pages=201,
    num_drafts=0,
    decode_rows=(8,),
    prefill_tokens=(8,),
)


class FakeEngine:
    """Gives each request one letter a step, from that of its seed on; slow, as a device is."""

    def __init__(self):
        self.scheduler = Scheduler(SIZES, SchedulerLimits())
        self.has_work = self.is_stepping = False
        self.num_steps = self.num_drains = self.num_resets = 0
        self.within_step = lambda: None  # what happens during a step

    def step(self):
        assert not self.is_stepping, "two threads step at once"
        self.is_stepping = True
        try:
            self.num_steps += 1
            time.sleep(1e-3)
            self.within_step()
            return [self._progress(request) for request in list(self.scheduler.waiting)]
        finally:
            self.is_stepping = False

    def _progress(self, request):
        tokens = (ord("a") + (request.seed + request.num_output) % 26,)
        request.tokens += tokens
        if request.num_output == request.params.max_tokens:
            self.scheduler.end(request, Finish.LENGTH)
        return Progress(request, RowOutput(tokens, (0,), 0, [], []))

    def drain(self):
        assert not self.is_stepping
        self.num_drains += 1

    def reset(self):
        self.num_resets += 1

    def close(self):
        self.is_closed = True


class Letters:
    """A text stream of tokens that are characters."""

    def push(self, ids):
        return "".join(map(chr, ids))

    def flush(self):
        return ""


def make_session():
    return Session(FakeEngine())


def make_sample(seed=0, max_tokens=20, stop=()):
    request = Request((1, 2), SamplingParams(max_tokens=max_tokens, stop=stop), seed=seed)
    return Sample(request, Letters(), StopStrings(stop) if stop else None)


def letters(seed, count):
    return "".join(chr(ord("a") + (seed + i) % 26) for i in range(count))


def run(session, samples):
    for _ in session.run(samples):
        pass
    return [sample.output().text for sample in samples]


def stream(session, sample):
    deltas = list(session.stream(sample))
    assert [bool(delta.finish_reason) for delta in deltas[:-1]] == [False] * (len(deltas) - 1)
    return "".join(delta.text for delta in deltas)


def test_a_run_ends_with_its_samples_and_names_those_left_after_each_step():
    session, samples = make_session(), [make_sample(i, 3 + i) for i in range(3)]
    left = [len(each) for each in session.run(samples)]
    assert left == [3, 3, 2, 1, 0] and session.engine.num_steps == 5
    assert [s.output().text for s in samples] == [letters(i, 3 + i) for i in range(3)]
    assert not session.scheduler.has_work and session.engine.num_drains == 1


def test_threads_that_step_at_once_get_what_each_would_get_alone():
    session = make_session()
    calls = []
    for thread in range(4):
        samples = [make_sample(3 * thread + i, 15 + 10 * thread) for i in range(3)]
        calls.append(functools.partial(run, session, samples))
        calls.append(functools.partial(stream, session, make_sample(thread, 30)))
    results = in_threads(*calls)
    for thread in range(4):
        want = [letters(3 * thread + i, 15 + 10 * thread) for i in range(3)]
        assert results[2 * thread] == want and results[2 * thread + 1] == letters(thread, 30)
    # A step moves everybody on: far fewer than the 570 that one after another would take.
    assert session.engine.num_steps < 120
    assert not session.scheduler.has_work and not session._samples


def test_a_thread_that_steps_in_a_loop_leaves_others_their_turn():
    session = make_session()
    ends = {}

    def streaming():
        stream(session, make_sample(0, 5))
        ends["short"] = session.engine.num_steps

    def running():
        run(session, [make_sample(1, 300)])
        ends["long"] = session.engine.num_steps

    in_threads(running, streaming)
    assert ends["short"] < 100 < 300 <= ends["long"]


def test_two_streams_in_one_thread_interleave():
    session = make_session()
    first, second = (session.stream(make_sample(i, 6)) for i in (0, 10))
    assert next(first).text == "a"
    pairs = list(zip(first, second, strict=False))
    assert pairs[0][0].text == "b" and pairs[0][1].text == "k"
    assert "".join(delta.text for delta, _ in pairs) == letters(0, 6)[1:]
    assert "".join(delta.text for delta in second) == letters(10, 6)[5:]


def test_what_another_caller_moved_on_comes_in_one_piece_without_a_step():
    session = make_session()
    deltas = session.stream(make_sample(0, 50))
    next(deltas)
    run(session, [make_sample(5, 10)])
    before = session.engine.num_steps
    assert next(deltas).text == letters(0, 11)[1:] and session.engine.num_steps == before
    deltas.close()
    assert not session.scheduler.has_work and session.engine.num_drains == 1


def test_a_stream_closed_within_a_step_ends_when_the_step_is_over():
    """As where the garbage collector finds it: in the thread that steps, at any line."""
    session = make_session()
    dropped, kept = make_sample(0, 50), make_sample(1, 9)
    deltas = session.stream(dropped)
    next(deltas)

    def close():
        session.engine.within_step = lambda: None
        deltas.close()
        assert not dropped.request.finish

    session.engine.within_step = close
    assert run(session, [kept]) == [letters(1, 9)]
    assert dropped.request.finish == Finish.ABORT and dropped.request.num_output == 2
    assert not session.scheduler.has_work


def test_threads_that_drop_streams_midway_leave_nothing_behind():
    session = make_session()

    def dropping(seed):
        for i in range(20):
            deltas = session.stream(make_sample(seed + i, 50))
            text = "".join(next(deltas).text for _ in range(1 + i % 3))
            deltas.close()
            assert text == letters(seed + i, len(text))

    in_threads(*[functools.partial(dropping, 7 * thread) for thread in range(5)])
    assert not session.scheduler.has_work and not session.has_work and not session._samples
    assert run(session, [make_sample(2, 4)]) == [letters(2, 4)]


def test_an_abort_before_the_first_step_ends_what_was_added():
    session, sample = make_session(), make_sample()
    session.add([sample])
    assert session.has_work
    session.abort([sample])
    assert sample.request.finish == Finish.ABORT and not session.scheduler.has_work
    session.abort([sample])  # once more: nothing left to do
    assert session.engine.num_steps == 0


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_after_a_failed_step_all_have_ended_and_the_session_starts_afresh(error):
    session = make_session()
    streamed, other = session.stream(make_sample(0)), make_sample(1)
    next(streamed)

    def fail():
        raise error("the device is gone")

    session.engine.within_step = fail
    with pytest.raises(error, match="the device is gone"):
        run(session, [other])
    assert other.request.finish == Finish.ERROR
    assert [delta.finish_reason for delta in streamed] == ["error"]
    assert session.engine.num_resets == 1 and not session.scheduler.has_work
    session.engine.within_step = lambda: None
    assert run(session, [make_sample(2, 4)]) == [letters(2, 4)]


@pytest.mark.parametrize("target", ["scheduler", "engine"])
def test_a_recovery_that_is_interrupted_is_made_up_for(target, monkeypatch):
    """A second Ctrl-C comes while the session starts afresh, before or after its books are new."""
    session, sample = make_session(), make_sample(0)
    streamed = session.stream(sample)
    next(streamed)

    def interrupt(*args):
        monkeypatch.undo()
        raise KeyboardInterrupt("the second")

    def fail():
        raise KeyboardInterrupt("the first")

    session.engine.within_step = fail
    monkeypatch.setattr(getattr(session, target), "reset", interrupt)
    with pytest.raises(KeyboardInterrupt, match="the second"):
        run(session, [make_sample(1)])
    session.engine.within_step = lambda: None
    assert run(session, [make_sample(2, 4)]) == [letters(2, 4)]
    assert [delta.finish_reason for delta in streamed] == ["error"]
    assert not session._samples and not session.scheduler.has_work


# An interrupt that comes in JAX's hook of the garbage collector is swallowed there, with a warning.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_an_interrupt_at_any_time_leaves_no_lock_held_and_nothing_running():
    session, rng = make_session(), random.Random(0)
    interrupts = []  # with their frames, as a notebook keeps them
    for seed in range(300):
        signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            # It is set in here, for on a busy machine its time is over before the call returns.
            signal.setitimer(signal.ITIMER_REAL, rng.uniform(1e-5, 6e-3))
            texts = run(session, [make_sample(seed, 3)])
            signal.setitimer(signal.ITIMER_REAL, 0)
            assert texts == [letters(seed, 3)]
        except KeyboardInterrupt as interrupt:
            interrupts.append(interrupt)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    assert len(interrupts) > 20
    results = in_threads(*[lambda: run(session, [make_sample(4, 5)])] * 2)  # no lock is held
    assert results == [[letters(4, 5)]] * 2
    assert not session._samples and not session.scheduler.has_work


def test_memory_that_runs_out_where_a_request_leaves_loses_no_slot_and_no_page(monkeypatch):
    session, samples = make_session(), [make_sample(seed) for seed in range(2)]

    def leave(request):
        session.scheduler.waiting.remove(request)
        raise MemoryError

    streams = [session.stream(sample) for sample in samples]
    for deltas in streams:
        next(deltas)
    with monkeypatch.context() as patch:
        patch.setattr(session.scheduler, "end", lambda request, finish: leave(request))
        with pytest.raises(MemoryError):
            streams[0].close()
    assert [delta.finish_reason for delta in streams[1]][-1] == "error"
    assert len(session.scheduler._free_slots) == SIZES.max_num_seqs
    assert session.scheduler.pages.num_free == SIZES.num_pages - 1
    assert run(session, [make_sample(2, 4)]) == [letters(2, 4)]


def test_a_request_is_ended_by_its_id_from_another_thread():
    session = make_session()
    samples = [make_sample(seed, 300) for seed in range(3)]
    for sample, name in zip(samples, ("mine", "mine", "other"), strict=True):
        sample.request_id = name

    def aborting():
        while samples[2].request.num_output < 3:
            time.sleep(1e-3)
        session.abort("nobody's")
        session.abort("mine")

    texts, _ = in_threads(lambda: run(session, samples), aborting)
    assert [sample.request.finish for sample in samples] == [Finish.ABORT] * 2 + [Finish.LENGTH]
    assert texts[2] == letters(2, 300) and texts[0] == letters(0, len(texts[0]))


def test_a_closed_session_has_ended_all_and_takes_no_more():
    session = make_session()
    streamed, running = session.stream(make_sample(0)), make_sample(1, 300)
    next(streamed)

    def closing():
        while running.request.num_output < 3:
            time.sleep(1e-3)
        session.close()

    in_threads(lambda: run(session, [running]), closing)
    assert running.request.finish == Finish.ABORT
    assert [delta.finish_reason for delta in streamed][-1] == "abort"
    assert session.engine.is_closed
    with pytest.raises(RuntimeError, match="once it is closed"):
        session.add([make_sample(2)])
    late = make_sample(2)
    session._added.append((late,))  # by a thread that had asked before the session was closed
    assert session.step() == [] and late.request.finish == Finish.ABORT
    session.close()  # once more: nothing left to do


def test_an_engine_that_fails_while_it_is_drained_is_closed_all_the_same(monkeypatch):
    session = make_session()
    next(session.stream(make_sample(0)))

    def fail():
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(session.engine, "drain", fail)
    with pytest.raises(RuntimeError, match="the device is gone"):
        session.close()
    assert session.engine.is_closed


def test_a_call_from_within_one_s_own_step_is_refused_and_harms_nothing():
    """As of a signal's handler, or of an object that the garbage collector finalizes."""
    session, sample, refused = make_session(), make_sample(0, 5), []

    def call():
        session.engine.within_step = lambda: None
        for nested in (session.step, session.close, lambda: run(session, [make_sample(1)])):
            with pytest.raises(RuntimeError, match="from within its own step"):
                nested()
            refused.append(nested)

    session.engine.within_step = call
    assert run(session, [sample]) == [letters(0, 5)]
    assert len(refused) == 3 and not session._samples and not session.scheduler.has_work


def test_a_signal_s_handler_may_call_while_its_thread_waits_for_the_turn():
    session, handled, sample = make_session(), [], make_sample(0, 400)
    is_held, may_go = threading.Event(), threading.Event()

    def holding():
        session.in_turn(lambda: (is_held.set(), may_go.wait(30)))

    def handle(*_):
        may_go.set()
        session.close()
        handled.append(sample.request.finish)

    thread = threading.Thread(target=holding, daemon=True)
    thread.start()
    assert is_held.wait(30)
    before = signal.signal(signal.SIGALRM, handle)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        run(session, [sample])
    finally:
        signal.signal(signal.SIGALRM, before)
    thread.join(30)
    assert handled == [Finish.ABORT] and not session._samples


def test_an_abort_by_id_ends_those_that_are_there_alone():
    """A caller may ask again under the same id while another thread still has the turn."""
    session, old, new = make_session(), make_sample(0, 50), make_sample(1, 4)
    old.request_id = new.request_id = "mine"
    streamed = session.stream(old)
    next(streamed)

    def abort_and_ask_again():
        session.engine.within_step = lambda: None
        session.abort("mine")
        session.add([new])

    session.engine.within_step = abort_and_ask_again
    session.step()
    while not new.request.finish:
        session.step()
    assert old.request.finish == Finish.ABORT and new.request.finish == Finish.LENGTH


def test_a_note_is_done_at_once_or_when_the_turn_is_over():
    session, done = make_session(), []
    session.leave_note(lambda: done.append("at once"))

    def note():
        session.engine.within_step = lambda: None
        session.leave_note(lambda: done.append("after the step"))
        done.append("within it")

    session.engine.within_step = note
    run(session, [make_sample(0, 2)])
    assert done == ["at once", "within it", "after the step"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of forks beside threads
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_forked_child_is_refused_and_may_drop_what_its_parent_runs():
    session = make_session()
    streamed = session.stream(make_sample(0, 5))
    next(streamed)
    child = os.fork()
    if not child:
        refused = 0
        for call in (
            session.step,
            session.close,
            lambda: session.add([]),
            lambda: session.in_turn(int),
        ):
            try:
                call()
            except RuntimeError as error:
                refused += "made it" in str(error) and "spawn" in str(error)
        streamed.close()
        os._exit(10 * refused + session.engine.num_drains)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 40
    assert "".join(delta.text for delta in streamed) == letters(0, 5)[1:]


def test_one_thread_s_failed_step_ends_the_other_thread_s_samples_too():
    session = make_session()
    samples = [make_sample(i, 200) for i in range(2)]

    def fail():
        if all(sample.request.num_output > 3 for sample in samples):
            session.engine.within_step = lambda: None
            raise RuntimeError("the device is gone")

    def running(sample):
        try:
            run(session, [sample])
        except RuntimeError:
            return "raised"
        return sample.output().finish_reason

    session.engine.within_step = fail
    calls = [functools.partial(running, sample) for sample in samples]
    assert sorted(in_threads(*calls)) == ["error", "raised"]
    assert [sample.request.finish for sample in samples] == [Finish.ERROR] * 2


def test_a_stop_string_ends_the_request_and_its_tokens():
    session, sample = make_session(), make_sample(0, 20, stop=["cd"])
    assert run(session, [sample]) == ["ab"]
    assert sample.request.output == [ord(letter) for letter in "abcd"]
    assert sample.request.finish == Finish.STOP and not session.scheduler.has_work
    assert sample.output().token_ids == sample.request.output


def test_who_follows_requests_hears_when_no_stop_string_cuts_them_any_more(monkeypatch):
    """Also where the last token completes the string; of an abort nobody reads the end."""
    session, heard = make_session(), []
    monkeypatch.setattr(
        session.scheduler,
        "settle",
        lambda request: heard.append((request.seed, request.num_output, request.finish)),
    )
    samples = [make_sample(0, 4, stop=["cd"]), make_sample(1, 3), make_sample(2, 300)]
    session.add(samples)
    for _ in range(6):
        session.step()
    session.abort(samples[2:])
    assert heard == [(1, 3, Finish.LENGTH), (0, 4, Finish.STOP)]


def test_a_sample_whose_text_is_made_elsewhere_is_cut_and_settled_by_who_reads_it(monkeypatch):
    """It may have gone on, or have ended, when its stop string is found."""
    session, heard = make_session(), []
    monkeypatch.setattr(
        session.scheduler,
        "settle",
        lambda request: heard.append((request.num_output, request.finish)),
    )
    monkeypatch.setattr(Sample, "is_settled", False)
    running, over, whole, gone = samples = [make_sample(i, n) for i, n in enumerate((9, 3, 3, 9))]
    session.add(samples)
    for _ in range(4):
        session.step()
    session.abort([gone])
    assert not heard
    session.settle(running, 2)
    session.settle(over, 1)
    session.settle(whole)
    session.settle(gone, 1)  # an abort stays one
    assert heard == [(2, Finish.STOP), (1, Finish.STOP), (3, Finish.LENGTH), (4, Finish.ABORT)]
    assert not session._samples and not session.scheduler.has_work


def test_samples_that_could_never_run_are_refused():
    session = make_session()
    with pytest.raises(ValueError, match="must fit the page pool alone"):
        session.check([make_sample(max_tokens=4000)])


def test_a_sample_that_is_being_let_in_is_found_once():
    session, sample = make_session(), make_sample()
    session._added.append((sample,))
    session._samples[sample.request] = sample  # as another thread may see it
    assert session.of_request(sample.request_id) == (sample,)


def test_a_closed_session_takes_nothing_of_another_engine_and_stays_whole():
    session = make_session()
    session.close()
    with pytest.raises(RuntimeError, match="closed"):
        session.bring(make_sample(), Copied(0), session.scheduler.weight_version)
    assert session.engine.num_resets == 0
