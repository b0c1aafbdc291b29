"""How long steps take, and how many prompt tokens keep to a bound of it."""

from jaxspec.config import StepShapes
from jaxspec.plan import Program
from jaxspec.scheduler.decode_seconds import DecodeSeconds
from jaxspec.scheduler.scheduled_step import ScheduledStep

_FORGOTTEN = 0.001  # of what a size took, each time that it is passed over for it
_CAP = 2  # times the bound: a step that hung longer says little of the next one


class StepSeconds:
    """What a step takes by the size of its program, as the engine saw it.

    A size whose steps took too long is tried again some day: what it takes shrinks a little each
    time that it is passed over, until one step of it may run.
    """

    def __init__(self, shapes: StepShapes, max_step_ms: float | None = None):
        """Know nothing yet.

        `max_step_ms`: most milliseconds of a step with prompts, while rows decode; None: no bound.
        """
        self._shapes, self._most = shapes, max_step_ms and max_step_ms / 1000
        self.decode = DecodeSeconds()  # of steps without prompts
        # What steps with prompts take, by `Program.shape`.
        self._seconds: dict[tuple[int, int, int], float] = {}

    def guess(self, program: Program, seconds: float) -> None:
        """A dispatch of `program` takes about so long, as long as none was seen."""
        seconds /= max(1, program.num_steps)
        if program.prefill_tokens:
            self._seconds.setdefault(program.shape, seconds)
        else:
            self.decode.guess(program, seconds)

    def note_step(self, step: ScheduledStep, seconds: float) -> None:
        """A dispatch took so long."""
        program = step.plan.program
        if program.prefill_tokens:
            self.note(program, seconds)
        elif step.decodes:
            seconds /= program.num_steps
            self.decode.note(program, len(step.decodes), seconds, is_trial=step.drafts.is_trial)

    def note(self, program: Program, seconds: float) -> None:
        """A step of `program`, which has prompt tokens, took so long.

        Less than known is believed at once, more by half.
        """
        if self._most is not None:
            seconds = min(seconds, _CAP * self._most)
        known = self._seconds.get(program.shape, seconds)
        self._seconds[program.shape] = min(seconds, (known + seconds) / 2)

    def within_bound(self, num_prompt_tokens: int, num_decodes: int) -> int:
        """How many of so many prompt tokens a step computes beside these rows.

        All, if the compiled size that holds them keeps to the bound; else they fill the largest
        one that does, or the smallest. A size that is not known yet is tried.
        """
        if self._most is None:
            return num_prompt_tokens
        chosen, *larger = self._shapes.prefill_tokens
        for tokens in larger:
            if chosen >= num_prompt_tokens:
                break  # the larger ones are not needed, so they are not passed over
            shape = self._shapes.round_up(num_decodes, tokens, self._shapes.num_drafts)
            known = self._seconds.get(shape, 0.0)
            if known > self._most:
                known *= 1 - _FORGOTTEN
                is_tried = known <= self._most
                # A second one waits until it is seen what the first one took.
                self._seconds[shape] = _CAP * self._most if is_tried else known
                if not is_tried:
                    break
            chosen = tokens
        return min(num_prompt_tokens, chosen)
