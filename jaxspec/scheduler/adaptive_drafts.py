"""AdaptiveDrafts: chooses the drafts per decode step if programs for several numbers exist."""

import math
from collections.abc import Mapping, Sequence

from jaxspec.plan.plan import Program, RowOutput
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds
from jaxspec.scheduler.scheduled_step import DraftChoice, ScheduledStep, StepBuilder
from jaxspec.scheduler.step_seconds import DecodeSeconds, Load, load_of

# Time constant of the acceptance rates in verify steps: the first plus the second times the rows.
_MEMORY, _MEMORY_STEPS = 256, 16
_PRIOR_SHARE = 0.8  # prior acceptance rate of a draft after an accepted one
_PRIOR_WEIGHT = 16  # weight of the prior, in verify steps
# Steps per trial. A trial has at least two dispatches, because the first may have too few drafts.
_TRIAL_STEPS = 4
_TRIAL_SHARE = 0.005  # most tokens that trials may cost, as a share of all
_PAUSE = 16  # least steps before a trial of a number that is new at this load
_LEAST_GAIN = 0.01  # least relative gain in tokens per second for a change


class AdaptiveDrafts:
    """Chooses the number of drafts with the most tokens per second for the rows of a step.

    A step with `k` drafts gives a row `1 + s_1 + ... + s_k` tokens on average, where `s_j` is the
    share of verify steps that accepted the first `j` drafts. `DecodeSeconds` estimates the time.
    For example, 8 rows that accept 60, 40 and 30 % of the drafts:

        drafts            0      1      3
        ms per step       5.0    5.6    7.1
        tokens per row    1.0    1.6    2.3
        tokens per ms     0.20   0.29   0.32

    A step with few drafts gives no data on further drafts, and a number that does not run is not
    timed. So each number is tried once at each load (rows rounded up to a power of 2, sampling
    features), and then the neighbors of the best one from time to time, so rarely that trials cost
    at most half a percent of the tokens.
    """

    def __init__(self, shapes: StepShapes, seconds: DecodeSeconds, programs: ReadyPrograms):
        """Start with all drafts, as if most had been accepted."""
        self._shapes, self._seconds, self._programs = shapes, seconds, programs
        share, weight = _PRIOR_SHARE, _PRIOR_WEIGHT
        self._accepted = [weight * share ** (j + 1) for j in range(shapes.num_drafts)]
        self._verified = [weight * share**j for j in range(shapes.num_drafts)]
        self._current = shapes.num_drafts
        self._num_made = 0  # drafts per row that the last program proposed
        self._trial, self._is_trial = 0, False  # remaining steps; True during a trial
        self._spared, self._tries_larger = 0.0, True  # budget of trials, in steps
        self._since_trial = 0  # steps since the last trial
        self._ran: set[tuple[Load, int, int]] = set()  # load, drafts, steps per dispatch

    def choose_program(self, step: StepBuilder, needs: StepNeeds) -> tuple[Program, DraftChoice]:
        """Return the program of the next dispatch and its choice of drafts; call it once for each.

        Steps with prompt tokens always use the largest number of drafts.

        Args:
            step: Contents of the step.
            needs: Requirements on the program; its number of drafts is chosen here.
        """
        drafts = self._shapes.num_drafts
        if not needs.num_prompt_tokens:
            drafts = self.choose(needs, max(request.max_drafts for request in step.decodes))
        choice = DraftChoice(self._num_made, self._is_trial)
        self._num_made = drafts
        return self._programs.choose(needs._replace(num_drafts=drafts)), choice

    def all_drafts(self) -> DraftChoice:
        """Record a step with all K drafts, which was not chosen here."""
        choice = DraftChoice(self._num_made)
        self._num_made = self._shapes.num_drafts
        return choice

    def choose(self, needs: StepNeeds, most: int) -> int:
        """Return the drafts of the next steps; no row wants more than `most`."""
        counts = self._programs.draft_buckets(needs)
        if len(counts) == 1:
            self._is_trial = False
            return counts[0]
        num_rows, num_steps = needs.num_decode, needs.num_steps
        features = self._programs.choose(needs).features
        allowed = [count for count in counts if count < most]
        allowed += [count for count in counts if count >= most][:1]
        self._is_trial = self._trial > 0 and self._current in allowed
        if self._is_trial:
            self._trial -= num_steps
            return self._current
        speeds = self._speeds(allowed, features, num_rows, num_steps)
        self._current = self._best(speeds)
        length = max(_TRIAL_STEPS, 2 * num_steps)
        self._spared += num_steps * _TRIAL_SHARE
        self._since_trial += num_steps
        other, price = self._neighbor(allowed), 0.0
        load = load_of(features, num_rows)
        new = self._new(allowed, load, num_steps)
        if new is not None and self._since_trial > _PAUSE:
            other = new
        else:
            price = length * _loss(speeds[other], speeds[self._current])
        if other != self._current and self._spared > price:
            self._ran.add((load, other, num_steps))
            self._trial, self._is_trial, self._since_trial = length - num_steps, True, 0
            self._spared = max(0.0, self._spared - price)
            self._current, self._tries_larger = other, not self._tries_larger
        return self._current

    def note(self, step: ScheduledStep, given: Sequence[RowOutput]) -> None:
        """Update the acceptance rates with the results of a dispatch."""
        program = step.plan.program
        if not isinstance(program, Program):
            return
        if step.prefills or step.drafts.num_known < program.num_drafts:
            return  # some verify steps lacked drafts
        # Each verify step of a row emits one token besides its accepted drafts.
        trials = sum(len(row.tokens) - sum(row.accepted) for row in given)
        kept = math.exp(-trials / (_MEMORY + _MEMORY_STEPS * len(given)))
        for draft in range(program.num_drafts):
            stood = sum(row.accepted[draft] for row in given)
            self._verified[draft] = kept * self._verified[draft] + trials
            self._accepted[draft] = kept * self._accepted[draft] + stood
            trials = stood

    def tokens(self, count: int) -> float:
        """Return the expected tokens per row of a step with `count` drafts."""
        total = share = 1.0
        for stood, verified in zip(self._accepted[:count], self._verified[:count], strict=True):
            share *= stood / max(verified, 1e-9)
            total += share
        return total

    def _best(self, speeds: Mapping[int, float]) -> int:
        best = max(speeds, key=lambda count: (speeds[count], count))
        least = speeds.get(self._current, 0.0) * (1 + _LEAST_GAIN)
        return best if speeds[best] >= least else self._current

    def _speeds(
        self, counts: Sequence[int], features: SamplingFeatures, num_rows: int, num_steps: int
    ) -> dict[int, float]:
        """Return tokens per second of a row; infinite for numbers never timed."""
        rows, *_ = self._shapes.round_up(num_rows, 0, 0)
        seconds = self._seconds.beside(features, num_rows, rows, counts, num_steps)
        return {n: self.tokens(n) / seconds[n] if n in seconds else math.inf for n in counts}

    def _new(self, counts: Sequence[int], load: Load, num_steps: int) -> int | None:
        """Return a number that was never tried at this load, or None if the current one is new.

        A number counts as tried even if its trial was not timed.
        """
        is_known = (load, self._current, num_steps) in self._ran
        self._ran.add((load, self._current, num_steps))
        new = (n for n in counts if (load, n, num_steps) not in self._ran)
        return next(new, None) if is_known else None

    def _neighbor(self, counts: Sequence[int]) -> int:
        """Return the next larger or next smaller number, in turn."""
        place = counts.index(self._current)
        larger, smaller = counts[place + 1 : place + 2], counts[max(place - 1, 0) : place]
        turns = (larger, smaller) if self._tries_larger else (smaller, larger)
        return next((each[0] for each in turns if each), self._current)


def _loss(speed: float, now: float) -> float:
    """Return the share by which a trial is slower than the current number, at least 5 %."""
    return max(1 - speed / now, 0.05) if math.isfinite(now) else 1.0
