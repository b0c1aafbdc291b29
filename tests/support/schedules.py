"""Schedules: callers of a session that come, go and are interrupted, on a device that checks all.

The host is whole: `Session` over `Engine` over `Scheduler`. Its device is `FakeDevice`.
"""

import collections
import contextlib
from collections.abc import Callable

import numpy as np
from callers import Ask, Caller, Watched
from fake_device import FakeDevice, make_sizes
from fake_weights import TREE, FakeRollouts, FakeWeights, OthersGate
from interrupts import INTERRUPTS, CtrlC, Interrupter

from jaxspec.engine.engine import Engine
from jaxspec.engine.session import Session
from jaxspec.requests.request import Finish, Request
from jaxspec.scheduler.scheduler import Scheduler

MAX_LEN = 30
MAX_STEPS = 2000  # far more than any schedule here needs
PLACES = ("dispatch", "dispatched", "result", "resulted", "reset")  # in the runner
TRAINED = ("put away", "bring back", "allocate", "replaced")  # where it has to do with weights


class WatchedScheduler(Scheduler):
    """A scheduler that remembers the step it planned last, for the device to check."""

    def schedule(self):
        self.planned = super().schedule()
        return self.planned


class Runner(FakeWeights):
    """Where plans go: the device runs them at once, and tells when asked."""

    def __init__(self, device: FakeDevice, scheduler: WatchedScheduler, interrupter: Interrupter):
        super().__init__(self._pass)
        self.device, self.scheduler, self.interrupter = device, scheduler, interrupter
        self.is_closed = False
        self.session: Session | None = None
        self.at: dict[str, Callable[[], None]] = {}  # what happens at a place of `PLACES`, once

    def dispatch(self, plan):
        self._pass("dispatch")
        step = self.scheduler.planned
        assert step.plan is plan and self.session.gate.is_open
        self.check(step.weight_version or self.scheduler.weight_version)  # copies have none
        with self.interrupter.away():
            pending = Pending(self, step, self.device.run(self.scheduler, step))
        self._pass("dispatched")
        return pending

    def reset(self):
        self._pass("reset")
        self.device.reset()

    def replace_weights(self, model, drafter):
        self.device.renew()
        super().replace_weights(model, drafter)

    def close(self):
        self.is_closed = True

    def collected(self, step):
        self._pass("result")
        self.device.collected(step)
        self._pass("resulted")

    def _pass(self, place):
        self.at.pop(place, lambda: None)()
        assert self.session._turns._turn._is_owned(), "a step without the turn"
        assert not self.is_closed or place == "reset", "a step of a closed engine"


class Pending:
    """An output on its way."""

    def __init__(self, runner: Runner, step, output):
        self._runner, self._step, self._output = runner, step, output
        self._packed = step.plan.packed.tobytes()

    def result(self):
        self._runner.collected(self._step)
        assert self._step.plan.packed.tobytes() == self._packed, "a plan was changed on its way"
        return self._output

    def done_time(self):
        return None


class Schedule:
    """One session from its first caller to its last; each method is something that happens."""

    def __init__(self, max_in_flight=2, accuracy=0.6, seed=0, keeps_errors=False, **sizes):
        """Start one; `keeps_errors` as IPython does, so that frames they passed live on."""
        shapes, limits = make_sizes(max_model_len=MAX_LEN, **sizes)
        self.scheduler = WatchedScheduler(shapes, limits)
        self.scheduler.prefixes.min_uncached = 3
        self.random = np.random.default_rng(seed)
        self.requests: dict[int, Request] = {}
        self.device = FakeDevice(shapes, self.requests, self.random, accuracy)
        self.interrupter = Interrupter()
        self.runner = Runner(self.device, self.scheduler, self.interrupter)
        self.session = Session(Engine(self.scheduler, self.runner, max_in_flight=max_in_flight))
        self.session.gate = OthersGate()
        self.runner.session = self.session
        self.rollouts = FakeRollouts(self.session, self.runner)
        self.asked: list[Ask] = []
        self.watched: list[Watched] = []
        self.callers: list[Caller] = []
        self.is_broken = False  # a check has failed
        self.keeps_errors = keeps_errors
        self._kept: BaseException | None = None
        self.num_interrupts = self._num_errors = 0
        self.num_trained = self.num_refused = self.num_broken = 0  # updates that broke off

    # What happens.

    def arrive(self, ask: Ask, how: str):
        """Samples come: by themselves ("add"), or with a caller ("run", "stream").

        A pause may refuse them, and so may an update that broke off.
        """
        if self.session.gate.is_refusing or self.session.is_broken:
            self.num_refused += 1
            return
        self.asked.append(ask)
        requests = ask.requests(first_key=1 + len(self.requests))
        self.requests.update((request.proposer_key, request) for request in requests)
        watched = [Watched(request, name=str(len(self.asked))) for request in requests]
        self.watched += watched
        samples = [each.sample for each in watched]
        self.session.check(samples)
        if how == "add":
            if self._call(lambda: self.session.add(samples)):
                self._came_in(watched)
        elif how == "run":
            self.callers.append(Caller(watched, self.session.run(samples)))
        else:
            for each in watched:
                each.request.parent = None  # a stream is of one sample
                self.callers.append(
                    Caller([each], self.session.stream(each.sample), is_stream=True)
                )

    def retry(self, index: int, how: str):
        """Somebody asks for what was asked before."""
        if self.asked:
            self.arrive(self.asked[index % len(self.asked)], how)

    def step(self, times: int):
        """Steps of nobody's, as long as there is something to do."""
        for _ in range(times):
            if not self.session.has_work:
                return
            self._call(self.session.step)

    def advance(self, index: int, times: int):
        """A caller goes on, at most to its end."""
        caller = self.callers[index % len(self.callers)]
        for _ in range(times):
            waits = caller.is_stream and self.rollouts.is_paused  # for another thread
            if caller.has_ended or waits:
                return
            self._advance(caller)

    def leave(self, index: int, way: str):
        """A caller stops in the middle, or is lost ("drop")."""
        caller = self.callers.pop(index % len(self.callers))
        self._leaves(caller)
        had_ended = caller.has_ended  # with an error it may have left its samples behind
        if self._call(caller.close if way == "close" else caller.drop) and not had_ended:
            self._check_ended(caller.watched)

    def abort(self, start: int, count: int):
        """Samples are cancelled: waiting, running, ended or never let in.

        So many in a row, or with a `count` of 0 all those of one prompt, by their id.
        """
        start %= len(self.watched)
        victims = self.watched[start : start + count]
        named = [each.sample for each in victims]
        if not count:
            named = self.watched[start].sample.request_id
            victims = [each for each in self.watched if each.sample.request_id == named]
        for each in victims:
            each.may_abort = True
        if self._call(lambda: self.session.abort(named)):
            self._check_ended(victims)

    def preempt(self, index: int):
        """A running row has to go for a while."""
        running = self.scheduler.running
        self.scheduler.preempt(running[index % len(running)])
        self.scheduler.num_preemptions += 1  # as if pages were short

    def permute(self, by: int):
        """The rows move."""
        running = self.scheduler.running
        by %= len(running)
        running[:] = [*running[by:], *running[:by]][:: 1 if by % 2 else -1]

    def interrupt(self, places: int, error: type[BaseException]):
        """An error comes so many places later, within whatever call that will be."""
        self.interrupter.plan(places, error())

    def fail(self, place: str, error: type[BaseException]):
        """The runner fails at `place`, when a step gets there."""

        def raise_it():
            raise error()

        self.runner.at[place] = raise_it

    def leave_within(self, place: str, index: int, places: int | None):
        """A caller is lost in the middle of a step of others', as the garbage collector may do.

        Unless `places` is None, an interrupt comes so many places later.
        """

        def leave():
            left = [caller for caller in self.callers if not caller.generator.gi_running]
            if left:
                caller = left[index % len(left)]
                self.callers.remove(caller)
                self._leaves(caller)
                if places is not None:
                    self.interrupter.plan(places, CtrlC(), first=True)
                with contextlib.suppress(*INTERRUPTS):  # lost
                    caller.drop()

        self.runner.at[place] = leave

    # Trainers

    def pause(self, mode, *, clear_cache):
        self._train(lambda: self.rollouts.pause(mode, clear_cache=clear_cache), mode)

    def resume(self):
        self._train(self.rollouts.resume)

    def sleep(self, level, mode, tags):
        self._train(lambda: self.rollouts.sleep(level, mode, tags=tags), mode)

    def wake_up(self, tags):
        self._train(lambda: self.rollouts.wake_up(tags))

    def update(self, mode):
        """New weights; asleep at level 1 they are refused."""
        if not self.runner.has_put_away:
            self._train(lambda: self.rollouts.update_weights(TREE, mode=mode), mode)

    def mend(self):
        self._train(self.rollouts.mend)

    def _train(self, call, mode="keep"):
        """Call a trainer's call; one that breaks off may abort requests."""
        unfinished = [each for each in self.watched if not each.request.finish]
        for each in unfinished if mode == "abort" else ():
            each.may_abort = True
        self._call(call, unfinished)
        self.num_trained += 1

    def end(self, closes: bool):
        """All go on to their ends, or are closed, undisturbed; the next one is served.

        Nothing is left behind then.
        """
        self.interrupter.cancel()
        self.runner.at.clear()
        if closes:
            for each in self.watched:
                each.may_abort = True
            self._call(self.session.close)
            self._check_ended(self.watched)
        else:
            self._call(self.rollouts.mend)
        for caller in self.callers:
            caller.close() if closes and not caller.has_begun else self._exhaust(caller)
        self._run_dry()
        self._call(lambda: self.session.abort([]))
        if not closes:
            self.arrive(Ask(prompt=3, max_tokens=3, n=3), "run")
            self._exhaust(self.callers[-1])
        for each in self.watched:
            each.check_end()
        self._check_nothing_is_left()

    def happened(self) -> collections.Counter:
        """How often what happened, and each way for a sample to end."""
        counts = collections.Counter(each.request.finish.name for each in self.watched)
        return counts + collections.Counter(
            schedules=1,
            interrupts=self.num_interrupts,
            trained=self.num_trained,
            refused=self.num_refused,
            broken=self.num_broken,
            preemptions=self.scheduler.num_preemptions,
            forks=self.device.num_forks,
        )

    # How.

    def _call(self, function, watched=()):
        """Call the session; False: an interrupt that was planned ended the call."""
        is_interrupted, was_whole = False, self.session._is_whole
        was_broken = self.session.is_broken
        self.is_broken = True  # until all is checked
        try:
            self.interrupter.run(function)
        except INTERRUPTS as error:
            is_interrupted = True
            _check_causes(error)
            self._kept = error if self.keeps_errors else None
        # Behind the `except`: what hung on the error's traceback is gone, unless it is kept.
        assert not self.session._turns._turn._is_owned(), "a turn without an end"
        num_errors = self._count_errors()
        if is_interrupted:
            self.num_interrupts += 1
            for each in watched:
                each.may_abort = True
        elif was_whole:
            assert num_errors == self._num_errors, "an error without an interrupt"
            self._check_slots_and_pages()
        self._num_errors = num_errors
        is_broken = self.session.is_broken or self.session.is_closed
        is_asleep = self.session.gate.is_closed_by("weights")
        assert is_asleep or is_broken or self.runner.has_weights, "awake without weights"
        if was_broken or is_broken:
            self.num_broken += self.session.is_broken and not was_broken
            for each in self.watched:
                each.may_abort |= not each.request.finish or each.request.finish == Finish.ABORT
        self.is_broken = False
        return not is_interrupted

    def _count_errors(self):
        return sum(each.request.finish == Finish.ERROR for each in self.watched)

    def _check_slots_and_pages(self):
        """Each is free or somebody's; only pages have several owners."""
        scheduler, running = self.scheduler, self.scheduler.running
        slots = scheduler._free_slots + [request.slot for request in running]
        assert sorted(slots) == list(range(1, scheduler.shapes.num_slots))
        held = {page for request in running for page in request.pages}
        assert len(held) + scheduler.pages.num_free == scheduler.shapes.num_pages - 1

    def _advance(self, caller):
        if self._call(caller.advance, caller.watched):
            self._came_in(caller.watched)
            assert not caller.has_ended or all(each.request.finish for each in caller.watched)
        else:
            caller.has_ended = True
        if caller.has_ended:
            caller.check_deltas()

    def _check_ended(self, watched):
        """Nobody else has the turn, so what is to end has ended, if it came in at all."""
        assert all(each.request.finish or each.may_be_out for each in watched)

    def _came_in(self, watched):
        for each in watched:
            each.may_be_out = False

    def _exhaust(self, caller):
        for _ in range(MAX_STEPS):
            if caller.has_ended:
                return
            self._advance(caller)
        raise AssertionError("no end in sight")

    def _run_dry(self):
        self.step(MAX_STEPS)
        assert not self.session.has_work, "no end in sight"

    def _leaves(self, caller):
        for each in caller.watched:
            each.may_abort = True
        caller.check_deltas()

    def _check_nothing_is_left(self):
        session, scheduler = self.session, self.scheduler
        assert not session.has_work and not session._samples
        assert not session._added and not session._notes
        assert not scheduler.has_work and not scheduler._forked_samples
        assert scheduler.pages.num_free == scheduler.shapes.num_pages - 1
        assert len(scheduler._free_slots) == scheduler.shapes.num_slots - 1


def _check_causes(error):
    """Nothing but interrupts led to this one."""
    while error is not None:
        assert isinstance(error, (*INTERRUPTS, GeneratorExit)), "an error behind the interrupt"
        error = error.__context__
