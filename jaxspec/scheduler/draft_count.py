"""How many drafts a decode step verifies, where programs for several numbers are compiled."""

import math
from collections.abc import Mapping, Sequence

from jaxspec.config import StepShapes
from jaxspec.plan import Program, RowOutput
from jaxspec.sampler import Sampler
from jaxspec.scheduler.decode_seconds import DecodeSeconds, Load, load_of
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds
from jaxspec.scheduler.scheduled_step import DraftChoice, NextStep, ScheduledStep

# Verifies after which one counts a third of the newest: some, and some steps of all rows.
_MEMORY, _MEMORY_STEPS = 256, 16
_PRIOR_SHARE = 0.8  # of drafts that stand behind one that does, before any was verified
_PRIOR_WEIGHT = 16  # verifies that it counts as
# Steps of another number, but at least two dispatches: the first one may find too few drafts.
_TRIAL_STEPS = 4
_TRIAL_SHARE = 0.005  # of the tokens, that such steps may cost
_PAUSE = 16  # steps between trials of numbers that never ran with as many rows
_LEAST_GAIN = 0.01  # of the tokens a second, below which the number stays


class DraftCount:
    """Picks the number that gives the most tokens a second, for the rows that a step has.

    A step with `k` drafts gives a row `1 + s_1 + ... + s_k` tokens, where `s_j` is the share of
    verifies in which the first `j` drafts stood. What it takes, `DecodeSeconds` knows. An example
    is 8 rows of which 60, 40 and 30 % of the drafts stand:

        drafts          0      1      3
        milliseconds    5.0    5.6    7.1
        tokens a row    1.0    1.6    2.3
        tokens a ms     0.20   0.29   0.32

    Few drafts tell nothing of further ones, and a number that does not run is not timed. So each
    number is tried once with about as many rows, and then the neighbours of the best one now and
    then, as often as costs half a percent of the tokens.
    """

    def __init__(self, shapes: StepShapes, seconds: DecodeSeconds, programs: ReadyPrograms):
        """Start with all drafts, as if most had been accepted."""
        self._shapes, self._seconds, self._programs = shapes, seconds, programs
        share, weight = _PRIOR_SHARE, _PRIOR_WEIGHT
        self._stood = [weight * share ** (j + 1) for j in range(shapes.num_drafts)]
        self._verified = [weight * share**j for j in range(shapes.num_drafts)]
        self._current = shapes.num_drafts
        self._num_made = 0  # drafts by the last program, for each of its rows
        self._trial, self._is_trial = 0, False  # steps that are left of it; whether one is on
        self._spared, self._tries_larger = 0.0, True  # for trials, in steps
        self._since_trial = 0  # steps
        self._ran: set[tuple[Load, int, int]] = set()  # with which numbers of drafts and steps

    def dispatch(self, step: NextStep, needs: StepNeeds) -> tuple[Program, DraftChoice]:
        """Return the program for a step, and what is known of its drafts.

        The step counts as dispatched. With prompt tokens there is one number of drafts.

        Args:
            step: What the step computes.
            needs: What a program must do for it; its number of drafts is chosen here.
        """
        drafts = self._shapes.num_drafts
        if not needs.num_prompt_tokens:
            drafts = self.choose(needs, max(request.max_drafts for request in step.decodes))
        choice = DraftChoice(self._num_made, self._is_trial and not needs.num_prompt_tokens)
        self._num_made = drafts
        return self._programs.choose(needs._replace(num_drafts=drafts)), choice

    def choose(self, needs: StepNeeds, most: int) -> int:
        """Return the drafts of the next steps, of which no row wants more than `most`."""
        counts = self._programs.draft_counts(needs)
        if len(counts) == 1:
            self._is_trial = False
            return counts[0]
        num_rows, num_steps = needs.num_decode, needs.num_steps
        sampler = self._programs.choose(needs).sampler
        allowed = [count for count in counts if count < most]
        allowed += [count for count in counts if count >= most][:1]
        self._is_trial = self._trial > 0 and self._current in allowed
        if self._is_trial:
            self._trial -= num_steps
            return self._current
        speeds = self._speeds(allowed, sampler, num_rows, num_steps)
        self._current = self._best(speeds)
        length = max(_TRIAL_STEPS, 2 * num_steps)
        self._spared += num_steps * _TRIAL_SHARE
        self._since_trial += num_steps
        other, price = self._neighbour(allowed), 0.0
        load = load_of(sampler, num_rows)
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
        """Learn from what a dispatch gave its rows."""
        program = step.plan.program
        if step.prefills or step.drafts.num_known < program.num_drafts:
            return  # some verifies lacked drafts
        # Each step that a row did not end before gave it a token besides the drafts that stood.
        trials = sum(len(row.tokens) - sum(row.accepted) for row in given)
        kept = math.exp(-trials / (_MEMORY + _MEMORY_STEPS * len(given)))
        for draft in range(program.num_drafts):
            stood = sum(row.accepted[draft] for row in given)
            self._verified[draft] = kept * self._verified[draft] + trials
            self._stood[draft] = kept * self._stood[draft] + stood
            trials = stood

    def tokens(self, count: int) -> float:
        """What a step with so many drafts is expected to give a row."""
        total = share = 1.0
        for stood, verified in zip(self._stood[:count], self._verified[:count], strict=True):
            share *= stood / max(verified, 1e-9)
            total += share
        return total

    def _best(self, speeds: Mapping[int, float]) -> int:
        best = max(speeds, key=lambda count: (speeds[count], count))
        least = speeds.get(self._current, 0.0) * (1 + _LEAST_GAIN)
        return best if speeds[best] >= least else self._current

    def _speeds(
        self, counts: Sequence[int], sampler: Sampler, num_rows: int, num_steps: int
    ) -> dict[int, float]:
        """Tokens a second of a row; infinite for a number that was never timed."""
        rows, *_ = self._shapes.round_up(num_rows, 0, 0)
        seconds = self._seconds.beside(sampler, num_rows, rows, counts, num_steps)
        return {n: self.tokens(n) / seconds[n] if n in seconds else math.inf for n in counts}

    def _new(self, counts: Sequence[int], load: Load, num_steps: int) -> int | None:
        """A number that was never tried with such a load; None while the current one is such.

        Once is enough, also where nobody saw what the trial took.
        """
        is_known = (load, self._current, num_steps) in self._ran
        self._ran.add((load, self._current, num_steps))
        new = (n for n in counts if (load, n, num_steps) not in self._ran)
        return next(new, None) if is_known else None

    def _neighbour(self, counts: Sequence[int]) -> int:
        """The number to try next: the next larger one and the next smaller one take turns."""
        place = counts.index(self._current)
        larger, smaller = counts[place + 1 : place + 2], counts[max(place - 1, 0) : place]
        turns = (larger, smaller) if self._tries_larger else (smaller, larger)
        return next((each[0] for each in turns if each), self._current)


def _loss(speed: float, now: float) -> float:
    """By which share a trial is slower than what runs now, as far as that is known."""
    return max(1 - speed / now, 0.05) if math.isfinite(now) else 1.0
