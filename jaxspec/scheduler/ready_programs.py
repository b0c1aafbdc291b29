"""ReadyPrograms: the compiled step programs, and the cheapest one for each step."""

from collections.abc import Iterable
from typing import NamedTuple

from jaxspec.plan.plan import AfterForwardPass, AnyProgram, ForwardPass, Program
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.sampling_features import SamplingFeatures


class StepNeeds(NamedTuple):
    """Sizes and sampling features that a program needs to run a step."""

    num_decode: int  # rows
    num_prompt_tokens: int
    features: SamplingFeatures  # union over all rows
    num_steps: int = 1
    num_drafts: int = 0  # least drafts per row


class ReadyPrograms:
    """The compiled step programs.

    An engine starts with one decode program and one prefill program, both of the largest size and
    with every sampling feature. They can run any step. Others are added later, between steps, and
    make steps cheaper.
    """

    def __init__(self, shapes: StepShapes):
        """Allow every program of `shapes` until some are added; tests compile on demand."""
        self._shapes = shapes
        self._programs: list[Program] = []
        self._halves = set[ForwardPass | AfterForwardPass]()
        self._chosen: dict[StepNeeds, Program] = {}
        self._counts: dict[StepNeeds, list[int]] = {}

    def add(self, programs: Iterable[AnyProgram]) -> None:
        programs = list(programs)
        halves = [p for p in programs if isinstance(p, ForwardPass | AfterForwardPass)]
        new = [p for p in programs if type(p) is Program and p not in self._programs]
        self._programs = sorted([*self._programs, *new], key=_cost)
        self._halves.update(halves)
        self._chosen.clear()
        self._counts.clear()

    def can_run(self, needs: StepNeeds) -> bool:
        return not self._programs or any(_can_run(program, needs) for program in self._programs)

    def choose(self, needs: StepNeeds) -> Program:
        """Return the cheapest program that can run a step.

        Raises:
            RuntimeError: no program can.
        """
        if not self._programs:
            rows, tokens, drafts = self._shapes.round_up(
                needs.num_decode, needs.num_prompt_tokens, needs.num_drafts
            )
            return Program(rows, tokens, needs.features, needs.num_steps, drafts)
        if needs not in self._chosen:
            able = (program for program in self._programs if _can_run(program, needs))
            if (program := next(able, None)) is None:
                raise RuntimeError(
                    f"A step must have a program that is compiled, and none can run {needs}. "
                    "This is a bug in jaxspec."
                )
            self._chosen[needs] = program
        return self._chosen[needs]

    def first_half(self, needs: StepNeeds) -> ForwardPass | None:
        """Return the cheapest forward pass with K drafts whose second half can run a step, if any.

        Second halves have the features of `EVERYTHING` alone.
        """
        halves = (ForwardPass(rows, self._shapes.num_drafts) for rows in self._shapes.decode_rows)
        able = (half for half in halves if self._is_ready(half) and _can_run(half.rest, needs))
        return next(able, None)

    def _is_ready(self, half: ForwardPass) -> bool:
        return not self._programs or {half, half.rest} <= self._halves

    def draft_buckets(self, needs: StepNeeds) -> list[int]:
        """Return the numbers of drafts for which a program can run a step, ascending."""
        if not self._programs:
            return list(self._shapes.draft_buckets)
        if needs not in self._counts:
            able = (program for program in self._programs if _can_run(program, needs))
            self._counts[needs] = sorted({program.num_drafts for program in able})
        return self._counts[needs]


def _can_run(program: Program, needs: StepNeeds) -> bool:
    needed = needs.features if program.prefill_tokens else needs.features.of_decoding
    return (
        program.decode_rows >= needs.num_decode
        and program.prefill_tokens >= needs.num_prompt_tokens
        and (program.prefill_tokens > 0) == (needs.num_prompt_tokens > 0)
        and program.num_drafts >= needs.num_drafts
        and program.num_steps == needs.num_steps
        and program.features | needed == program.features
    )


def _cost(program: Program) -> tuple[int, int, int, int, tuple[str, ...]]:
    names = program.features.names
    return program.prefill_tokens, program.decode_rows, program.num_drafts, len(names), names
