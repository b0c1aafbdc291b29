"""Measured durations of steps, and the prompt tokens that keep a step within a time limit."""

from collections.abc import Sequence
from typing import NamedTuple

from jaxspec.plan.plan import AfterForwardPass, Program
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.sampling_features import SamplingFeatures
from jaxspec.scheduler.scheduled_step import ScheduledStep

_SHARE = 0.25  # least weight of the newest step in the stored time
_YOUNG = 4  # steps measured with a number of drafts before its times scale those of the load
_MOST = 2.0  # limit on the ratio of a new time to the stored one; longer steps have stalled
Key = tuple[int, int]  # drafts and steps of a program
Load = tuple[SamplingFeatures, int]  # sampling features, and log2 of the rows, rounded up


class Seen(NamedTuple):
    """Measured duration of the steps of one program."""

    seconds: float  # recent seconds per step
    count: int  # number of measured dispatches


class DecodeSeconds:
    """Seconds per step without prompt tokens, by number of rows and of drafts.

    The number of rows decides, not only the size of the program: a mixture of experts reads the
    experts that some row selects. So times are stored per load: the rows rounded up to a power of
    2, and the sampling features, whose cost grows with the verified positions.

    Within a load times still drift as contexts grow, by the same factor for all numbers of drafts.
    Only one number runs at a time. Its time scales those of all others, while the time of a trial
    changes only its own. For example, in ms per step with 3 drafts and with 1:

        measured so far          12.0 and 8.0
        3 drafts take 12.4       12.1 and 8.07      both + 0.8 %: a quarter of the difference
        a trial of 1 takes 8.7   12.1 and 8.23
    """

    def __init__(self):
        self._guesses: dict[int, dict[Key, Seen]] = {}  # by rows of the program
        self._seen: dict[Load, dict[Key, Seen]] = {}

    def guess(self, program: Program, seconds: float) -> None:
        """Set the duration of a step of `program` until one is measured.

        It may be inaccurate: without rows, a step reads no experts. But the error is the same for
        all programs with the same number of rows.
        """
        guesses = self._guesses.setdefault(program.decode_rows, {})
        guesses.setdefault((program.num_drafts, program.num_steps), Seen(seconds, 0))

    def note(self, program: Program, num_rows: int, seconds: float, *, is_trial: bool) -> None:
        """Record the duration of a step of `program` with `num_rows` rows."""
        times = self._seen.setdefault(load_of(program.features, num_rows), {})
        key = program.num_drafts, program.num_steps
        known, count = times.get(key, Seen(seconds, 0))
        ratio = min(max(seconds / known, 1 / _MOST), _MOST)
        factor = 1 + max(_SHARE, 1 / (count + 1)) * (ratio - 1)
        if not is_trial and count >= _YOUNG:
            times.update({k: Seen(x.seconds * factor, x.count) for k, x in times.items()})
        times[key] = Seen(known * factor, count + 1)

    def beside(
        self,
        features: SamplingFeatures,
        num_rows: int,
        program_rows: int,
        counts: Sequence[int],
        num_steps: int,
    ) -> dict[int, float]:
        """Return the seconds of a step for each of `counts` drafts, except numbers without data.

        A number that did not run at this load is estimated from the nearest load at which it ran,
        or from the guesses for a program of `program_rows`, scaled by the numbers that both have.
        """
        (_, power), found = load_of(features, num_rows), dict[int, float]()
        nearest = sorted(self._seen, key=lambda load: (load[0] != features, abs(load[1] - power)))
        tables = [self._seen[other] for other in nearest]
        for times in (*tables, self._guesses.get(program_rows, {})):
            own = {n: times[n, num_steps].seconds for n in counts if (n, num_steps) in times}
            both = [found[n] / own[n] for n in own if n in found]
            if both or not found:
                scale = sum(both) / len(both) if both else 1.0
                found = {n: scale * seconds for n, seconds in own.items()} | found
            if len(found) == len(counts):
                break
        return found


def load_of(features: SamplingFeatures, num_rows: int) -> Load:
    """Return the load of a step; only times of the same load are compared."""
    return features, (num_rows - 1).bit_length()


_FORGOTTEN = 0.001  # decrease of a size's stored time, each time that the size is skipped
_CAP = 2  # limit on stored times, as a multiple of the bound, since steps may stall


class StepSeconds:
    """Measured seconds per step by size of the program.

    The time of a size that took too long shrinks a little each time the size is skipped, until one
    step of it may run again.
    """

    def __init__(self, shapes: StepShapes, max_step_ms: float | None = None):
        """Start without measurements.

        `max_step_ms` limits the milliseconds of a step with prompt tokens while rows decode; None
        means unlimited.
        """
        self._shapes, self._most = shapes, max_step_ms and max_step_ms / 1000
        self.decode = DecodeSeconds()  # steps without prompt tokens
        # Seconds of steps with prompt tokens, by `Program.shape`.
        self._seconds: dict[tuple[int, int, int], float] = {}

    def guess(self, program: Program, seconds: float) -> None:
        """Set the duration of a dispatch of `program` until one is measured."""
        if isinstance(program, AfterForwardPass):
            return  # the seconds of half a step
        seconds /= program.num_steps
        if program.prefill_tokens:
            self._seconds.setdefault(program.shape, seconds)
        else:
            self.decode.guess(program, seconds)

    def note_step(self, step: ScheduledStep, seconds: float) -> None:
        """Record the duration of a dispatch."""
        program = step.plan.program
        if not isinstance(program, Program) or isinstance(program, AfterForwardPass):
            return  # a step in halves also waits for its masks
        if program.prefill_tokens:
            self.note(program, seconds)
        elif step.decodes:
            seconds /= program.num_steps
            self.decode.note(program, len(step.decodes), seconds, is_trial=step.drafts.is_trial)

    def note(self, program: Program, seconds: float) -> None:
        """Record the duration of a step of `program`, which has prompt tokens.

        A shorter time replaces the stored one; a longer time is averaged with it.
        """
        if self._most is not None:
            seconds = min(seconds, _CAP * self._most)
        known = self._seconds.get(program.shape, seconds)
        self._seconds[program.shape] = min(seconds, (known + seconds) / 2)

    def within_bound(self, num_prompt_tokens: int, num_decodes: int) -> int:
        """Return how many of the prompt tokens a step computes beside `num_decodes` decode rows.

        All of them if the compiled size that holds them is within the limit; else as many as fill
        the largest size within it, or the smallest size. Sizes without measurements are tried.
        """
        if self._most is None:
            return num_prompt_tokens
        chosen, *larger = self._shapes.prefill_tokens
        for tokens in larger:
            if chosen >= num_prompt_tokens:
                break  # larger sizes are not needed, so they do not count as skipped
            shape = self._shapes.round_up(num_decodes, tokens, self._shapes.num_drafts)
            known = self._seconds.get(shape, 0.0)
            if known > self._most:
                known *= 1 - _FORGOTTEN
                is_tried = known <= self._most
                # No second step of this size runs until the first one is measured.
                self._seconds[shape] = _CAP * self._most if is_tried else known
                if not is_tried:
                    break
            chosen = tokens
        return min(num_prompt_tokens, chosen)
