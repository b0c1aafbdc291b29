"""Scheduler: picks requests and token counts for the next step; records what came back.

It never waits for the device. Prompts advance by exact counts; for decoding rows it plans with an
upper bound, every draft in flight accepted, and learns some dispatches late what really happened.
The bound sizes page reservations and dispatches: positions, counts and slots are the device's own.
"""

import time
from collections.abc import Iterable, Sequence

from jaxspec.config import StepShapes
from jaxspec.plan import Fork, Program, StepOutput, StepPlan, moves_of
from jaxspec.request import Finish, Request
from jaxspec.sampler import Sampler, join, least
from jaxspec.scheduler.decode_steps import num_decode_steps
from jaxspec.scheduler.draft_count import DraftCount
from jaxspec.scheduler.forks import Followers, fork, num_own_pages
from jaxspec.scheduler.host_drafter import HostDrafter
from jaxspec.scheduler.packing import pack_step
from jaxspec.scheduler.page_pool import PagePool, check_fits
from jaxspec.scheduler.prompt_budget import prompt_budget
from jaxspec.scheduler.scheduled_step import Entry, NextStep, Progress, ScheduledStep
from jaxspec.scheduler.step_seconds import StepSeconds
from jaxspec.scheduler.waiting_queue import WaitingQueue, place


class Scheduler:
    """Continuous batching over rows, slots and pages: by priority, then first come first served."""

    def __init__(
        self,
        shapes: StepShapes,
        max_step_ms: float | None = None,
        drafter: HostDrafter | None = None,
    ):
        """Start empty. `max_step_ms`: as in `StepSeconds`."""
        self.shapes, self.drafter = shapes, drafter or HostDrafter()
        self.step_seconds = StepSeconds(shapes, max_step_ms)
        self.num_preemptions = 0
        self.samplers: tuple[Sampler, ...] = ()  # that programs are compiled for; (): for any
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
        self.pages = PagePool(self.shapes.num_pages)
        self._free_slots = list(range(self.shapes.num_slots - 1, 0, -1))
        self._followers = Followers()
        self.draft_count = DraftCount(self.shapes, self.step_seconds.decode)
        self.drafter.clear()

    @property
    def has_work(self) -> bool:
        """Whether any request is unfinished."""
        return bool(self.waiting or self.running)

    def check(self, requests: Iterable[Request]) -> None:
        """Refuse requests that could never run, even alone.

        Raises:
            ValueError: longer than all pages together.
        """
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
        self._followers.remove(request)
        self.drafter.remove(request)

    def cut(self, request: Request, num_tokens: int) -> None:
        """End a request with the output token that completed a stop string.

        A verify may run past it, and may even end the request there: with the tokens "a", "b", "c"
        and the stop string "b", 2 tokens stay and the reason is STOP, whatever followed.
        """
        del request.tokens[len(request.prompt) + num_tokens :]
        del request.draft_positions[num_tokens:]
        request.metrics.num_tokens = num_tokens
        self.end(request, Finish.STOP)
        request.finish = Finish.STOP

    def schedule(self) -> ScheduledStep | None:
        """Plan the next dispatch, or None when none should be made before results arrive."""
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
        num_steps = num_decode_steps(self.shapes, self.running, budget, self.pages.num_free)
        step = NextStep(budget, num_steps)
        index = 0
        while index < len(self.running):  # victims leave from the end
            self._advance(self.running[index], step)
            index += 1
        self._admit(step)
        return self._dispatch(step) if step.decodes or step.prefills else None

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
            if got.finish:
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
            if not (followers and self._free_slots and step.num_new == self.shapes.max_new_rows):
                self._followers.dismiss(leader)
        program = moves_of(join(r.sampler for r in self.running if r.row < 0))
        return ScheduledStep(self._plan(program, step, forks), (), (), 0) if forks else None

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
            wanted = self.shapes.reach(len(request.tokens))
            pages_short = self._pages_for(wanted, request) > self.pages.num_free
            if rows_full or seqs_full or pages_short or request.in_flight:
                break
            self.waiting.remove(request)
            self._enter(request, step, num_computed=0)
            self._advance_prefill(request, step)

    # Rows, slots and pages.

    def _enter(self, request: Request, step: NextStep, num_computed: int) -> None:
        self._followers.release(request)
        request.generation += 1
        request.slot = self._free_slots.pop()
        request.prefill_len, request.num_computed = len(request.tokens), num_computed
        request.num_pages_sent, request.row = 0, -1
        place(request, self.running)
        self.drafter.add(request)
        step.num_new += 1

    def _leave(self, request: Request) -> None:
        """Free what a request holds; steps in flight run before any plan that reuses it."""
        self.running.remove(request)
        self.drafter.leave(request)
        self._free_slots.append(request.slot)
        self.pages.release(request.pages)
        request.slot, request.pages = 0, []

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.waiting.put_back(request)
        request.num_computed = request.prefill_len = 0
        self.num_preemptions += 1

    def _pages_for(self, length: int, request: Request) -> int:
        return self.shapes.pages_for(min(length, request.max_len))

    def _reserve(self, request: Request, length: int, step: NextStep) -> bool:
        """Hold pages for `length` positions, preempting the last admitted while pages are short.

        False: the request itself was the last and had to go.
        """
        if min(length, request.max_len) <= len(request.pages) * self.shapes.page_size:
            return True
        missing = self._pages_for(length, request) - len(request.pages)
        while missing > self.pages.num_free:
            victim = self.running[-1]
            self._preempt(victim)
            if victim is request:
                return False
        request.pages += self.pages.allocate(missing)
        step.grown.append(request)
        return True

    # Writing the plan.

    def _dispatch(self, step: NextStep) -> ScheduledStep:
        requests = step.decodes + [request for request, _ in step.prefills]
        sampler = least(self.samplers, join(request.sampler for request in requests))
        num_prompt_tokens = sum(length for _, length in step.prefills)
        shape, choice = self.draft_count.dispatch(step, num_prompt_tokens, sampler)
        rows, tokens, drafts = shape
        plan = self._plan(Program(rows, tokens, sampler, step.num_steps, drafts), step)
        decodes, prefills = [], []
        for request in step.decodes:
            is_last_prompt_token = request.is_prefilling  # it has no drafts
            request.num_computed += is_last_prompt_token
            bound = 1 if is_last_prompt_token else step.num_steps * (1 + drafts)
            decodes.append(Entry.launch(request, step.num_steps, bound))
        for request, length in step.prefills:
            request.num_computed += length
            ends_prompt = int(not request.is_prefilling)
            prefills.append(Entry.launch(request, ends_prompt, ends_prompt, length))
        return ScheduledStep(plan, tuple(decodes), tuple(prefills), num_prompt_tokens, choice)

    def _plan(self, program: Program, step: NextStep, forks: Sequence[Fork] = ()) -> StepPlan:
        """Pack a plan of every running request; from then on the device knows its row and pages."""
        rows = step.decodes + [request for request, _ in step.prefills]
        if len(rows) < len(self.running):
            active = set(rows)
            rows += [request for request in self.running if request not in active]
        plan = pack_step(
            program,
            self.shapes,
            rows=rows,
            num_decode=len(step.decodes),
            prefills=step.prefills,
            grown=step.grown,
            forks=forks,
            drafter=self.drafter,
        )
        for row, request in enumerate(rows):
            request.row, request.num_pages_sent = row, len(request.pages)
        return plan
