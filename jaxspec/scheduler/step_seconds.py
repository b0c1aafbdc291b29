"""How long steps with prompts take, and how many prompt tokens keep to a bound of it."""

from jaxspec.config import StepShapes
from jaxspec.plan import Program

_FORGOTTEN = 0.001  # of what a size took, each time that it is passed over for it


class StepSeconds:
    """What a step takes by the size of its program, as the engine saw it.

    A size whose steps once took too long is tried again some day, for what it takes shrinks a
    little each time that it is passed over.
    """

    def __init__(self, shapes: StepShapes, max_step_ms: float | None = None):
        """Know nothing yet.

        `max_step_ms`: most milliseconds of a step with prompts, while rows decode; None: no bound.
        """
        self._shapes, self._most = shapes, max_step_ms and max_step_ms / 1000
        self._seconds: dict[tuple[int, int], float] = {}  # by decode rows and prompt tokens

    def note(self, program: Program, seconds: float) -> None:
        """A step of `program` took so long; half of what is known comes from the newest."""
        if program.prefill_tokens:
            size = program.decode_rows, program.prefill_tokens
            self._seconds[size] = (self._seconds.get(size, seconds) + seconds) / 2

    def most_prompt_tokens(self, num_decodes: int) -> int:
        """The largest compiled number of prompt tokens that keeps to the bound beside these rows.

        At least the smallest. A size that is not known yet is tried.
        """
        if self._most is None:
            return self._shapes.prefill_tokens[-1]
        chosen, *larger = self._shapes.prefill_tokens
        for tokens in larger:
            size = self._shapes.round_up(num_decodes, tokens)
            if self._seconds.get(size, 0.0) > self._most:
                self._seconds[size] *= 1 - _FORGOTTEN
                break
            chosen = tokens
        return chosen
