"""Scheduler: chooses requests and token counts for the next step, and records results.

It never waits for the device. Prompts advance by exact counts. Decode rows are planned with an
upper bound, as if every draft in flight were accepted; the actual counts follow some dispatches
later. The bound is used for page reservations and numbers of dispatches only: the device computes
positions, counts and slots itself.
"""

import dataclasses
import time
from collections.abc import Callable, Iterable, Sequence

from jaxspec.plan.plan import MOVES, SlotCopy, StepOutput
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.prefix.cache import PrefixCache
from jaxspec.prefix.host_tier import HostTier
from jaxspec.prefix.page_pool import check_fits
from jaxspec.requests.request import Finish, PageTable, Request
from jaxspec.requests.sampling_features import join
from jaxspec.requests.waiting_queue import WaitingQueue, place
from jaxspec.scheduler.adaptive_drafts import AdaptiveDrafts
from jaxspec.scheduler.automaton_pool import AutomatonPool
from jaxspec.scheduler.forks import ForkedSamples, fork, num_own_pages
from jaxspec.scheduler.host_drafter import HostDrafter
from jaxspec.scheduler.packing import PlanPacker
from jaxspec.scheduler.prompt_budget import num_decode_steps, prompt_budget
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds
from jaxspec.scheduler.request_observer import RequestObserver
from jaxspec.scheduler.scheduled_step import Progress, ScheduledStep, StepBuilder, set_in_flight
from jaxspec.scheduler.step_seconds import StepSeconds


class Scheduler:
    """Continuous batching over rows, slots and pages: by priority, then first come first served."""

    def __init__(
        self,
        shapes: StepShapes,
        limits: SchedulerLimits,
        drafter: HostDrafter | None = None,
        tier: HostTier | None = None,
        observers: Sequence[RequestObserver] = (),
    ):
        """Start empty; `tier` as in `PrefixCache`."""
        self.shapes, self.limits = shapes, limits
        self.observers = (*observers, *([drafter] if drafter else []))
        self.prefixes = PrefixCache(shapes, limits, tier)
        self.automata = AutomatonPool()
        self.packer = PlanPacker(shapes, drafter, self.prefixes, self.automata)
        self.step_seconds = StepSeconds(shapes, limits.max_step_ms)
        self.num_preemptions = 0
        self.weight_version = ""  # of the steps that are planned
        self.programs = ReadyPrograms(shapes)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by urgency, then admission; the last is preempted first
        self.reset()

    def reset(self, requests: Iterable[Request] = ()) -> None:
        """Drop all requests, even if an interrupt left the bookkeeping inconsistent.

        All its requests, and `requests`, end with ERROR. Slots and pages are recreated, so none is
        lost. It may be called again after an interrupt in `reset` itself.
        """
        for request in (*requests, *self.waiting, *self.running):
            request.finish = Finish.ERROR
        self.waiting.clear()
        self.running.clear()
        self.pages = self.prefixes.new_pool()
        self._free_slots = list(range(self.shapes.num_slots - 1, 0, -1))
        self.automata.clear()
        self._forked_samples = ForkedSamples()
        self.adaptive_drafts = AdaptiveDrafts(self.shapes, self.step_seconds.decode, self.programs)
        for observer in self.observers:
            observer.clear()

    @property
    def has_work(self) -> bool:
        """True if any request is unfinished."""
        return bool(self.waiting or self.running)

    def check(self, requests: Iterable[Request]) -> None:
        """Raise a ValueError for requests that need more pages than the pool has."""
        for request in requests:
            check_fits(request.max_len, self.shapes)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue validated requests; the first sample of a prompt is the `parent` of the others."""
        for request in requests:
            self.waiting.add(request)
            self._forked_samples.add(request)

    def end(self, request: Request, finish: Finish) -> None:
        """Remove a request for good; its results in flight will be ignored.

        A request that has already ended keeps its finish reason.
        """
        if request.finish:
            return
        request.finish = finish
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)
            self.prefixes.over(request)
        self._forked_samples.remove(request)
        for observer in self.observers:
            observer.remove(request)

    def settle(self, request: Request) -> None:
        """Notify the observers that an ended request was read: no stop string cuts it any more."""
        for observer in self.observers:
            observer.settle(request)

    def cut(self, request: Request, num_tokens: int) -> None:
        """End a request with the output token that completed a stop string.

        A verify step may emit more tokens, and may even end the request. With the tokens "a", "b",
        "c" and the stop string "b", 2 tokens remain and the reason is STOP, whatever followed.
        """
        request.cut(num_tokens)
        self.end(request, Finish.STOP)
        request.finish = Finish.STOP

    def schedule(self) -> ScheduledStep | None:
        """Plan the next dispatch; None if none should be made before results arrive."""
        for request in self._forked_samples.prefilled():
            self.prefixes.preempted(request)
            self.end(request, Finish.ABORT)
        if not (self.waiting and self._free_slots) and all(r.is_likely_over for r in self.running):
            return None  # a row that continues waits for the host, which costs less than a step
        forked = self._fork() if self._forked_samples else None
        if forked is not None:
            return forked
        num_free = min(len(self._free_slots), self.shapes.max_new_rows)
        budget = prompt_budget(
            self.shapes,
            self.limits,
            self.running,
            self.waiting,
            self._forked_samples,
            num_free,
            self.step_seconds.within_bound,
        )
        num_steps = num_decode_steps(
            self.shapes, self.programs, self.running, budget, self.pages.num_free
        )
        step = StepBuilder(budget, num_steps)
        index = 0
        while index < len(self.running):  # preemptions remove requests from the end
            self._advance(self.running[index], step)
            index += 1
        self._admit(step)
        if step.awaiting and (halves := self._in_halves(step)) is not None:
            return halves
        if step.has_work:
            return self._plan(step)
        if self.prefixes.store.lets_in:  # parents whose forked samples enter next
            return ScheduledStep(self.packer.pack_copies(self.running), (), (), 0)
        return None

    def complete(self, step: ScheduledStep) -> ScheduledStep:
        """Return the second half of a step whose plan is a `ForwardPass`.

        All earlier steps are collected by then, and the masks of the host follow their tokens.
        """
        return dataclasses.replace(step, plan=self.packer.pack_rest(step))

    def collect(self, step: ScheduledStep, output: StepOutput) -> list[Progress]:
        """Record the results of a dispatch, matched by request and generation."""
        if not (step.decodes or step.prefills):
            return []
        progress = []
        now, given = time.monotonic(), output.by_row()
        for row, entry in step.rows:
            request = entry.request
            if not entry.is_awaited:
                continue
            request.in_flight -= step.plan.num_steps
            request.in_flight_bound -= entry.bound
            got = given[row]
            if not got.tokens and not got.finish:
                raise RuntimeError(
                    "A step must give each of its rows a token or an end; row "
                    f"{row} got neither: the device lost its request. This is a bug in jaxspec."
                )
            request.made_by(step.weight_version)
            # First, because an interrupt may leave more positions than tokens, but not fewer.
            request.draft_positions.extend(got.draft_positions)
            request.tokens.extend(got.tokens)
            if request.matcher is not None:
                request.matcher.advance(got.tokens)
            if request.is_masked_by_host:
                request.next_drafts = tuple(output.next_drafts[-1, row].tolist())
            for observer in self.observers:
                observer.extend(request, got.tokens)
            request.metrics.record_tokens(len(got.tokens), now)
            request.metrics.record(got.drafted, got.accepted)
            self.prefixes.given(request)
            if got.finish:
                self.prefixes.ended(request, Finish(got.finish))
                self.end(request, Finish(got.finish))
            progress.append(Progress(request, got))
        self.adaptive_drafts.note(step, [each.given for each in progress])
        return progress

    # Choice of rows

    def _advance(self, request: Request, step: StepBuilder) -> None:
        if request.takes_decode_row:
            if request.awaits_result:
                step.awaiting.append(request)
            elif self._reserve(request, self._reach(request, step.num_steps), step):
                step.decodes.append(request)
        elif request.is_prefilling:
            self._advance_prefill(request, step)

    def _reach(self, request: Request, num_steps: int) -> int:
        return self.shapes.reach(request.tokens_bound, num_steps)

    def _advance_prefill(self, request: Request, step: StepBuilder) -> None:
        end = self._forked_samples.prefill_end(request)
        longest = self.limits.long_prefill_token_threshold or step.budget
        end = self.prefixes.chunk_end(request, end)
        length = min(end - request.num_computed, step.budget, longest)
        if length < 1 or len(step.prefills) == self.shapes.max_prefill_seqs:
            return
        upto = request.num_computed + length
        if upto == request.prefill_len:
            upto = self.shapes.reach(upto)
        if self._reserve(request, upto, step):
            step.prefills.append((request, length))
            step.budget -= length

    def _fork(self) -> ScheduledStep | None:
        """Plan a dispatch in which forked samples enter on copies of their parent's state.

        Return None if none can enter. If more samples wait than may enter at once, the rest enter
        in the next dispatch.
        """
        step, copies = StepBuilder(budget=0, num_steps=0), list[SlotCopy]()
        for parent in self._forked_samples.ready(self.running):
            forked = self._forked_samples.of(parent)
            own_pages = num_own_pages(parent, self.shapes.page_size)
            while forked and self._has_row(step) and own_pages <= self.pages.num_free:
                child = forked[0]
                self.waiting.remove(child)
                self._enter(child, step, num_computed=len(parent.prompt) - 1)
                copies.append(fork(parent, child, self.pages, self.shapes.page_size))
            if not (forked and self._free_slots and step.num_new == self.shapes.max_new_rows):
                self._forked_samples.dismiss(parent)
        if not copies:
            return None
        return ScheduledStep(self.packer.pack(MOVES, step, self.running, copies), (), (), 0)

    def _has_row(self, step: StepBuilder) -> bool:
        return bool(self._free_slots) and step.num_new < self.shapes.max_new_rows

    def _admit(self, step: StepBuilder) -> None:
        reserved = 0
        for request in list(self.waiting):
            if self._forked_samples.waits(request, self.running):
                reserved += 1  # keeps a row free until its parent reaches the fork
                continue
            rows_full = len(self._free_slots) <= reserved or not self._has_row(step)
            seqs_full = len(step.prefills) >= self.shapes.max_prefill_seqs or step.budget < 1
            if rows_full or seqs_full or request.in_flight:
                self.prefixes.expect(request)
                break
            reach = self.shapes.reach(len(request.tokens))
            wanted = self.shapes.pages_for(min(reach, request.max_len))
            can_wait = step.has_work or bool(step.awaiting)
            if self.prefixes.is_coming(request, wanted, can_wait=can_wait):
                reserved += 1
                continue
            hit = self.prefixes.find(request)
            self.pages.share(hit.pages)  # held, so that they no longer count as free
            is_room = self.automata.make_room(request)
            if not is_room or wanted - len(hit.pages) > self.pages.num_free:
                self.pages.release(hit.pages)
                break
            self.waiting.remove(request)
            self._enter(request, step, hit.num_cached)
            self.prefixes.enter(request, hit)
            if request.num_computed < self._forked_samples.prefill_end(request):
                self._advance(request, step)

    # Rows, slots and pages

    def _enter(self, request: Request, step: StepBuilder, num_computed: int) -> None:
        self._forked_samples.release(request)
        request.generation += 1
        request.metrics.record_row(time.monotonic())
        request.slot = self._free_slots.pop()
        request.prefill_len, request.num_computed = len(request.tokens), num_computed
        request.row, request.next_drafts = -1, ()
        self.automata.enter(request)
        place(request, self.running)
        for observer in self.observers:
            observer.add(request)
        self.prefixes.follow(request)
        step.num_new += 1

    def _leave(self, request: Request) -> None:
        """Free the slot and pages of a request; plans that reuse them run after steps in flight."""
        self.running.remove(request)
        for observer in self.observers:
            observer.leave(request)
        self.prefixes.leave(request)
        self._free_slots.append(request.slot)
        self.pages.release(request.pages)
        self.automata.leave(request)
        request.slot, request.pages = 0, PageTable()

    def renew_weights(self, version: str, fingerprint: Callable[[], str]) -> None:
        """Plan later steps with other weights, and drop what earlier ones computed.

        Rows keep their own pages and states, but no other request reads them.

        Args:
            version: Version of the weights.
            fingerprint: Returns the fingerprint of the model with them.
        """
        self.weight_version = version
        self.prefixes.renew(fingerprint)
        for parent in self.running:
            self._forked_samples.dismiss(parent)

    def forget_device(self) -> None:
        """Preempt all requests and drop all that is on the device, which will be empty."""
        self.preempt_all()
        self.prefixes.clear()
        self.automata.clear()

    def preempt_all(self) -> None:
        """Move all running requests to the queue, in their order."""
        for request in reversed(self.running.copy()):
            self.preempt(request)

    def preempt(self, request: Request) -> None:
        """Move a request from the batch to the queue; its computed prefix is cached if possible."""
        self.prefixes.preempted(request)
        self._leave(request)
        self.waiting.put_back(request)
        request.num_computed = request.prefill_len = 0

    def _reserve(self, request: Request, length: int, step: StepBuilder) -> bool:
        """Reserve pages for `length` positions; preempt the last admitted while pages are short.

        Return False if the request itself was the last and is preempted.
        """
        missing = self._missing_pages(request, length)
        if missing == 0:
            return True
        while missing > self.pages.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        request.pages += self.pages.allocate(missing)
        return True

    def _missing_pages(self, request: Request, length: int) -> int:
        return max(0, self.shapes.pages_for(min(length, request.max_len)) - len(request.pages))

    # The plan

    def _in_halves(self, step: StepBuilder) -> ScheduledStep | None:
        """Plan the first half of a step with the awaiting rows.

        The engine collects their results and computes their masks while the device runs it. Return
        None if the step has prompts, no program for its halves is ready, or pages are short: then
        the awaiting rows are in the next step, and none is preempted for them.
        """
        rows, reach = (*step.decodes, *step.awaiting), [self._reach(r, 1) for r in step.awaiting]
        missing = sum(map(self._missing_pages, step.awaiting, reach))
        features = join(request.features for request in rows)
        program = self.programs.first_half(StepNeeds(len(rows), 0, features))
        if step.prefills or program is None or missing > self.pages.num_free:
            return None
        for request, length in zip(step.awaiting, reach, strict=True):
            self._reserve(request, length, step)
        step.decodes += step.awaiting
        choice = self.adaptive_drafts.all_drafts()
        plan = self.packer.pack(program, step, self.running)
        decodes, _ = set_in_flight(step, program.num_drafts)
        return ScheduledStep(plan, decodes, (), 0, choice, self.weight_version)

    def _plan(self, step: StepBuilder) -> ScheduledStep:
        chunks = [request for request, _ in step.prefills]
        num_prompt_tokens = sum(length for _, length in step.prefills)
        features = join(r.features for r in (*step.decodes, *chunks))
        needs = StepNeeds(len(step.decodes), num_prompt_tokens, features, step.num_steps)
        program, choice = self.adaptive_drafts.choose_program(step, needs)
        plan = self.packer.pack(program, step, self.running)
        decodes, prefills = set_in_flight(step, program.num_drafts)
        for request in chunks:
            self.prefixes.computed(request)
        return ScheduledStep(
            plan, decodes, prefills, num_prompt_tokens, choice, self.weight_version
        )
