"""Prefix blocks in a flight, bounds of plans that copy them, and removal of token ids.

A plan names a block by its number. A replay fills the blocks that the flight's plans fill, with the
same contents. A block that was filled before the flight began, or that was read from a file or
another engine, is not in the flight. Without it a replay would differ, and look like a fault of the
device, so such flights are refused.
"""

import dataclasses
import hashlib
import secrets
from collections.abc import Callable, Sequence

import numpy as np

from jaxspec.flight import Flight, Step
from jaxspec.plan.block_plan import Block
from jaxspec.plan.plan import (
    CopyBlock,
    ExportState,
    StepPlan,
    output_layout,
    plan_layout,
)
from jaxspec.plan.row import row_layout
from jaxspec.plan.step_shapes import StepShapes


class ReplayedBlocks:
    """Blocks of a flight's steps, each held until the last step that restores it."""

    def __init__(self, steps: Sequence[Step], shapes: StepShapes):
        """Prepare for `steps`, whose plans must be requested in this order.

        Raises:
            ValueError: a step restores a block that no earlier step fills.
        """
        self._shapes = shapes
        self._blocks: dict[int, Block] = {}
        self._last: dict[int, Step] = {}  # last step that uses each block
        kinds: dict[int, bool] = {}  # True for filled blocks with a state, False with pages
        for index, step in enumerate(steps):
            if not isinstance(step.program, CopyBlock):
                continue
            number, is_state = self._number(step), step.program.of_state
            if step.program.direction == "read":
                kinds[number] = is_state
            elif kinds.get(number) is not is_state:
                raise ValueError(
                    "A flight must record the copy of each block that it restores, and dispatch "
                    f"{index} restores one from before the flight, from a file or from "
                    "another engine. Record from the start, without kv_offloading_folder; or call "
                    "reset_prefix_cache() in front of restart_flight()."
                )
            self._last[number] = step

    def plan(self, step: Step) -> StepPlan:
        """Return the plan of the next step, with its block if it has one."""
        if not isinstance(step.program, CopyBlock):
            return StepPlan(step.program, step.packed)
        number = self._number(step)
        if step.program.direction == "read":
            self._blocks[number] = Block(is_state=step.program.of_state)
        block = self._blocks[number]
        if self._last[number] is step:
            del self._blocks[number]
        return StepPlan(step.program, step.packed, block=block)

    def _number(self, step: Step) -> int:
        return int(plan_layout(step.program, self._shapes).read(step.packed, "block"))


def bounds_of_copy(
    program: ExportState | CopyBlock, shapes: StepShapes
) -> dict[str, tuple[int, int]]:
    """Return the bounds of the fields of a plan that copies a state or a block."""
    page, place = (0, shapes.num_pages - 1), (0, shapes.block_pages - 1)
    bounds = {"checkpoint": (0, shapes.num_checkpoints)}
    if isinstance(program, ExportState):
        rows = {"row": (0, shapes.max_num_seqs - 1)}
        return bounds | rows | dict.fromkeys(("source_page", "target_page"), page)
    is_read = program.direction == "read"
    sources = page if is_read else (0, 0) if program.of_state else place
    return bounds | {"block": (0, 2**31 - 1), "sources": sources, "targets": page}


# Fields of a plan and of its new rows with token ids, or with values made of a prompt's ids.
_PLAN_FIELDS = ("prefill_tokens", "next_prefill_tokens", "paths", "bad_words", "recent")
_ROW_FIELDS = ("last_token", "proposer_key")

_Map = Callable[[np.ndarray], np.ndarray]


def without_ids(flight: Flight) -> Flight:
    """Return the flight with each token id of prompts and completions replaced by a made-up one.

    Equal ids stay equal, and -1 stays -1. The key of the hash is drawn here and not stored, so ids
    cannot be looked up; their frequencies can still be counted. Stop ids, biases and seeds are
    parameters and stay, but masks and automata of grammars do not.
    """
    made_up = _hash(flight.about["vocab_size"])
    steps = [_hashed(step, flight.shapes, made_up) for step in flight.steps]
    return dataclasses.replace(flight, steps=steps, hashed=True)


def _hashed(step: Step, shapes: StepShapes, made_up: _Map) -> Step:
    packed, output = step.packed.copy(), step.output
    fields = plan_layout(step.program, shapes).unpack(packed)
    for name in fields.keys() & set(_PLAN_FIELDS):
        fields[name][...] = made_up(fields[name])
    if "masks" in fields:
        fields["masks"][...] = -1  # a grammar allows few ids at most positions
    if "automaton" in fields:
        fields["classes"][...] = fields["next"][...] = fields["limited"][...] = 0
        fields["allowed"][...] = fields["forced"][...] = -1
    if "new_rows" in fields:
        columns = row_layout(shapes.num_drafts).unpack(fields["new_rows"])
        for name in _ROW_FIELDS:
            columns[name][...] = made_up(columns[name])
    if output is not None:
        output = output.copy()
        for name in ("tokens", "next_drafts"):
            tokens = output_layout(shapes.num_drafts).read(output, name)
            tokens[...] = made_up(tokens)
    return Step(step.program, packed, output)


def _hash(vocab_size: int) -> _Map:
    key = secrets.token_bytes(16)

    def of(token: int) -> int:
        if token < 0:
            return token
        digest = hashlib.blake2b(token.to_bytes(4, "little"), key=key, digest_size=4).digest()
        return int.from_bytes(digest, "little") % vocab_size

    def of_all(tokens: np.ndarray) -> np.ndarray:
        ids, where = np.unique(tokens, return_inverse=True)
        hashed = np.array([of(int(token)) for token in ids], np.int32)
        return hashed[where].reshape(tokens.shape)

    return of_all
