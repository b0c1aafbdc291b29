"""Pieces of kept prefixes in a flight: a replay fills its own, or says that it can't.

A plan names a piece by its number. Whatever a flight's plans fill, a replay fills with the same. A
piece that was filled before the flight began, or that came from a file or another engine, is not in
it. Without it a replay would give something else, and look like a fault of the device.
"""

from collections.abc import Sequence

from jaxspec.config import StepShapes
from jaxspec.flight import Step
from jaxspec.piece_plan import Piece
from jaxspec.plan import EXPORT, PIECES, READ, READ_STATE, Program, StepPlan, plan_layout


class ReplayedPieces:
    """The pieces of a flight's steps, each of them kept as long as a later step puts it back."""

    def __init__(self, steps: Sequence[Step], shapes: StepShapes):
        """Follow `steps`, which are to be asked for in this order.

        Raises:
            ValueError: a step puts back a piece that none before it fills.
        """
        self._shapes = shapes
        self._pieces: dict[int, Piece] = {}
        self._last: dict[int, Step] = {}  # that has to do with each piece
        kinds: dict[int, bool] = {}  # of those that are filled: whether they have a state
        for index, step in enumerate(steps):
            if step.program not in PIECES:
                continue
            number, is_state = self._number(step), step.program.is_of_state
            if step.program in (READ, READ_STATE):
                kinds[number] = is_state
            elif kinds.get(number) is not is_state:
                raise ValueError(
                    f"A flight must fill each piece of a prefix that it puts back, and dispatch "
                    f"{index} puts back one that came from before the flight, from a file or from "
                    "another engine. Record from the start, without kv_offloading_folder; or call "
                    "reset_prefix_cache() in front of restart_flight()."
                )
            self._last[number] = step

    def plan(self, step: Step) -> StepPlan:
        """The plan of the next step, with its piece, if it has one."""
        if step.program not in PIECES:
            return StepPlan(step.program, step.packed)
        number = self._number(step)
        if step.program in (READ, READ_STATE):
            self._pieces[number] = Piece(is_state=step.program.is_of_state)
        piece = self._pieces[number]
        if self._last[number] is step:
            del self._pieces[number]
        return StepPlan(step.program, step.packed, piece=piece)

    def _number(self, step: Step) -> int:
        return int(plan_layout(step.program, self._shapes).read(step.packed, "piece"))


def bounds_of_copy(program: Program, shapes: StepShapes) -> dict[str, tuple[int, int]]:
    """What the fields of a plan for `EXPORT`, or for one of `PIECES`, may be from and to."""
    page, place = (0, shapes.num_pages - 1), (0, shapes.piece_pages - 1)
    bounds = {"checkpoint": (0, shapes.num_checkpoints)}
    if program == EXPORT:
        rows = {"row": (0, shapes.max_num_seqs - 1)}
        return bounds | rows | dict.fromkeys(("source_page", "target_page"), page)
    is_read = program in (READ, READ_STATE)
    sources = page if is_read else (0, 0) if program.is_of_state else place
    return bounds | {"piece": (0, 2**31 - 1), "sources": sources, "targets": page}
