"""Scheduler: picks requests and token counts for the next step; records what came back.

It never waits for the device. Prompts advance by exact counts; for decoding rows it plans with an
upper bound, every draft in flight accepted, and learns some dispatches late what really happened.
The bound sizes page reservations and dispatches: positions, counts and slots are the device's own.
"""

import time
from collections.abc import Iterable

from jaxspec.config import StepShapes
from jaxspec.plan import MOVES, Fork, StepOutput
from jaxspec.request import Finish, Request
from jaxspec.sampler import join
from jaxspec.scheduler.decode_steps import num_decode_steps
from jaxspec.scheduler.draft_count import DraftCount
from jaxspec.scheduler.forks import Followers, fork, num_own_pages
from jaxspec.scheduler.host_drafter import HostDrafter
from jaxspec.scheduler.host_tier import HostTier
from jaxspec.scheduler.page_pool import check_fits
from jaxspec.scheduler.prefix_cache import PrefixCache
from jaxspec.scheduler.prompt_budget import prompt_budget
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds
from jaxspec.scheduler.row_plans import RowPlans
from jaxspec.scheduler.scheduled_step import NextStep, Progress, ScheduledStep, launch
from jaxspec.scheduler.step_seconds import StepSeconds
from jaxspec.scheduler.waiting_queue import WaitingQueue, place


class Scheduler:
    """Continuous batching over rows, slots and pages: by priority, then first come first served."""

    def __init__(
        self,
        shapes: StepShapes,
        max_step_ms: float | None = None,
        drafter: HostDrafter | None = None,
        tier: HostTier | None = None,
    ):
        """Start empty. `max_step_ms`: as in `StepSeconds`; `tier`: as in `PrefixCache`."""
        self.shapes, self.drafter = shapes, drafter or HostDrafter()
        self.prefixes = PrefixCache(shapes, tier)
        self.plans = RowPlans(shapes, self.drafter, self.prefixes)
        self.step_seconds = StepSeconds(shapes, max_step_ms)
        self.num_preemptions = 0
        self.programs = ReadyPrograms(shapes)
        self.waiting = WaitingQueue()
        self.running: list[Request] = []  # by urgency, then admission; the last is preempted first
        self.reset()

    def reset(self, requests: Iterable[Request] = ()) -> None:
        """Forget every request, whatever an interrupt has left of the books.

        All it has, and `requests`, end with ERROR. Slots and pages are counted anew, so none can be
        lost. It may be called again after an interrupt of its own.
        """
        for request in (*requests, *self.waiting, *self.running):
            request.finish = Finish.ERROR
        self.waiting.clear()
        self.running.clear()
        self.pages = self.prefixes.new_pool()
        self._free_slots = list(range(self.shapes.num_slots - 1, 0, -1))
        self._followers = Followers()
        self.draft_count = DraftCount(self.shapes, self.step_seconds.decode, self.programs)
        self.drafter.clear()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def check(self, requests: Iterable[Request]) -> None:
        """Refuse requests that are longer than all pages together, by a ValueError."""
        for request in requests:
            check_fits(request.max_len, self.shapes)

    def add(self, requests: Iterable[Request]) -> None:
        """Queue checked requests; samples of one prompt name their first as `leader`."""
        for request in requests:
            self.waiting.add(request)
            self._followers.add(request)

    def end(self, request: Request, finish: Finish) -> None:
        """Take a request out for good; what is in flight for it will be ignored.

        One that has ended already keeps its reason.
        """
        if request.finish:
            return
        request.finish = finish
        if request in self.running:
            self._leave(request)
        else:
            self.waiting.remove(request)
            self.prefixes.over(request)
        self._followers.remove(request)
        self.drafter.remove(request)

    def cut(self, request: Request, num_tokens: int) -> None:
        """End a request with the output token that completed a stop string.

        A verify may run past it, and may even end the request there: with the tokens "a", "b", "c"
        and the stop string "b", 2 tokens stay and the reason is STOP, whatever followed.
        """
        request.cut(num_tokens)
        self.end(request, Finish.STOP)
        request.finish = Finish.STOP

    def schedule(self) -> ScheduledStep | None:
        """Plan the next dispatch, or None when none should be made before results arrive."""
        for request in self._followers.prefilled():
            self.prefixes.preempted(request)
            self.end(request, Finish.ABORT)
        if not (self.waiting and self._free_slots) and all(r.is_likely_over for r in self.running):
            return None  # a row that outlives them waits for the host, which is less than a step
        forked = self._fork() if self._followers else None
        if forked is not None:
            return forked
        num_free = min(len(self._free_slots), self.shapes.max_new_rows)
        budget = prompt_budget(
            self.shapes,
            self.running,
            self.waiting,
            self._followers,
            num_free,
            self.step_seconds.within_bound,
        )
        num_steps = num_decode_steps(
            self.shapes, self.programs, self.running, budget, self.pages.num_free
        )
        step = NextStep(budget, num_steps)
        index = 0
        while index < len(self.running):  # victims leave from the end
            self._advance(self.running[index], step)
            index += 1
        self._admit(step)
        if step.has_work:
            return self._dispatch(step)
        if self.prefixes.lets_in:  # samples whose followers enter next
            return ScheduledStep(self.plans.only_copies(self.running), (), (), 0)
        return None

    def collect(self, step: ScheduledStep, output: StepOutput) -> list[Progress]:
        """Record a dispatch's results, keyed by request and generation."""
        if not (step.decodes or step.prefills):
            return []
        progress = []
        now, given = time.monotonic(), output.by_row()
        for row, entry in step.rows:
            request = entry.request
            if not entry.is_awaited:
                continue
            request.in_flight -= step.plan.program.num_steps
            request.in_flight_bound -= entry.bound
            got = given[row]
            if not got.tokens and not got.finish:
                raise RuntimeError(
                    "A step must give each of its rows a token or an end; row "
                    f"{row} got neither: the device lost its request. This is a bug in jaxspec."
                )
            request.draft_positions.extend(got.draft_positions)  # an interrupt leaves too many
            request.tokens.extend(got.tokens)
            self.drafter.extend(request, got.tokens)
            request.metrics.record_tokens(len(got.tokens), now)
            request.metrics.record(got.drafted, got.accepted)
            self.prefixes.given(request)
            if got.finish:
                self.prefixes.ended(request, Finish(got.finish))
                self.end(request, Finish(got.finish))
            progress.append(Progress(request, got))
        self.draft_count.note(step, [each.given for each in progress])
        return progress

    # Which rows get tokens.

    def _advance(self, request: Request, step: NextStep) -> None:
        if request.takes_decode_row:
            upto = self.shapes.reach(request.tokens_bound, step.num_steps)
            if self._reserve(request, upto, step):
                step.decodes.append(request)
        elif request.is_prefilling:
            self._advance_prefill(request, step)

    def _advance_prefill(self, request: Request, step: NextStep) -> None:
        end = self._followers.prefill_end(request)
        longest = self.shapes.long_prefill_token_threshold or step.budget
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
        """A dispatch in which samples enter on copies of their leader's state; None: none can.

        Leaders whose followers are more than may enter at once wait for the next dispatch.
        """
        step, forks = NextStep(budget=0, num_steps=0), list[Fork]()
        for leader in self._followers.ready(self.running):
            followers = self._followers.of(leader)
            own_pages = num_own_pages(leader, self.shapes.page_size)
            while followers and self._has_row(step) and own_pages <= self.pages.num_free:
                child = followers[0]
                self.waiting.remove(child)
                self._enter(child, step, num_computed=len(leader.prompt) - 1)
                forks.append(fork(leader, child, self.pages, self.shapes.page_size))
                child.num_pages_sent = len(child.pages)
            if not (followers and self._free_slots and step.num_new == self.shapes.max_new_rows):
                self._followers.dismiss(leader)
        if not forks:
            return None
        return ScheduledStep(self.plans.plan(MOVES, step, self.running, forks), (), (), 0)

    def _has_row(self, step: NextStep) -> bool:
        return bool(self._free_slots) and step.num_new < self.shapes.max_new_rows

    def _admit(self, step: NextStep) -> None:
        reserved = 0
        for request in list(self.waiting):
            if self._followers.waits(request, self.running):
                reserved += 1  # a row is kept for it until its leader reaches the fork
                continue
            rows_full = len(self._free_slots) <= reserved or not self._has_row(step)
            seqs_full = len(step.prefills) >= self.shapes.max_prefill_seqs or step.budget < 1
            if rows_full or seqs_full or request.in_flight:
                self.prefixes.expect(request)
                break
            reach = self.shapes.reach(len(request.tokens))
            wanted = self.shapes.pages_for(min(reach, request.max_len))
            if self.prefixes.is_coming(request, wanted, can_wait=step.has_work):
                reserved += 1
                continue
            hit = self.prefixes.find(request)
            self.pages.share(hit.pages)  # what it holds is not there for others
            if wanted - len(hit.pages) > self.pages.num_free:
                self.pages.release(hit.pages)
                break
            self.waiting.remove(request)
            self._enter(request, step, hit.num_cached)
            self.prefixes.enter(request, hit)
            if request.num_computed < self._followers.prefill_end(request):
                self._advance(request, step)

    # Rows, slots and pages.

    def _enter(self, request: Request, step: NextStep, num_computed: int) -> None:
        self._followers.release(request)
        request.generation += 1
        request.metrics.record_row(time.monotonic())
        request.slot = self._free_slots.pop()
        request.prefill_len, request.num_computed = len(request.tokens), num_computed
        request.num_pages_sent, request.row = 0, -1
        place(request, self.running)
        self.drafter.add(request)
        self.prefixes.follow(request)
        step.num_new += 1

    def _leave(self, request: Request) -> None:
        """Free what a request holds; steps in flight run before any plan that reuses it."""
        self.running.remove(request)
        self.drafter.leave(request)
        self.prefixes.leave(request)
        self._free_slots.append(request.slot)
        self.pages.release(request.pages)
        request.slot, request.pages = 0, []

    def preempt(self, request: Request) -> None:
        """Take a request out of the batch; it waits, and what can be kept of it is kept."""
        self.prefixes.preempted(request)
        self._leave(request)
        self.waiting.put_back(request)
        request.num_computed = request.prefill_len = 0

    def _reserve(self, request: Request, length: int, step: NextStep) -> bool:
        """Hold pages for `length` positions, preempting the last admitted while pages are short.

        False: the request itself was the last and had to go.
        """
        missing = self.shapes.pages_for(min(length, request.max_len)) - len(request.pages)
        if missing <= 0:
            return True
        while missing > self.pages.num_free:
            victim = self.running[-1]
            self.preempt(victim)
            self.num_preemptions += 1
            if victim is request:
                return False
        request.pages += self.pages.allocate(missing)
        step.grown.append(request)
        return True

    # Writing the plan.

    def _dispatch(self, step: NextStep) -> ScheduledStep:
        chunks = [request for request, _ in step.prefills]
        num_prompt_tokens = sum(length for _, length in step.prefills)
        sampler = join(r.sampler for r in (*step.decodes, *chunks))
        needs = StepNeeds(len(step.decodes), num_prompt_tokens, sampler, step.num_steps)
        program, choice = self.draft_count.dispatch(step, needs)
        plan = self.plans.plan(program, step, self.running)
        decodes, prefills = launch(step, program.num_drafts)
        for request in chunks:
            self.prefixes.computed(request)
        return ScheduledStep(plan, decodes, prefills, num_prompt_tokens, choice)
