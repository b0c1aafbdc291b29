"""Pieces in a replay: filled by the flight's own plans, or refused."""

import numpy as np
import pytest
from fake_device import make_buckets

from jaxspec.flight import Step
from jaxspec.flight.blocks import ReplayedBlocks, bounds_of_copy
from jaxspec.plan.block_plan import Block, Read, Write
from jaxspec.plan.plan import BLOCK_COPIES, EXPORT, MOVES, READ, WRITE, pack_copy, plan_layout

SHAPES = make_buckets(num_checkpoints=2, block_pages=3)
PAGES, STATE = Block(is_state=False), Block(is_state=True)
READS = Read(PAGES, (4, 5)), Read(STATE, (6,), 1)
WRITES = Write(PAGES, (1,), (7,)), Write(STATE, (0,), (8,), 2)


def steps_of(*copies):
    plans = [pack_copy(copy, SHAPES) for copy in copies]
    return [Step(plan.program, plan.packed) for plan in plans]


def test_a_piece_is_the_one_that_the_flight_filled_and_goes_after_its_last_use():
    steps = steps_of(*READS, WRITES[1], WRITES[0], WRITES[1])
    blocks = ReplayedBlocks(steps, SHAPES)
    plans = []
    for step in steps:
        plans.append(blocks.plan(step))
        assert (plans[-1].program, plans[-1].packed is step.packed) == (step.program, True)
    assert plans[0].block is plans[3].block and plans[1].block is plans[2].block is plans[4].block
    assert not blocks._blocks
    other = Step(MOVES, np.zeros(plan_layout(MOVES, SHAPES).size, np.int32))
    assert blocks.plan(other).block is None


@pytest.mark.parametrize(
    "copies",
    [[WRITES[0]], [READS[1], WRITES[0]], [READS[0], WRITES[0], WRITES[1]], [WRITES[1], READS[1]]],
)
def test_a_piece_from_elsewhere_is_refused_and_named(copies):
    wrong = next(i for i, c in enumerate(copies) if isinstance(c, Write) and c.block is not PAGES
                 or isinstance(c, Write) and READS[0] not in copies[:i])  # fmt: skip
    with pytest.raises(ValueError, match=rf"dispatch {wrong} restores one from before"):
        ReplayedBlocks(steps_of(*copies), SHAPES)


def test_a_state_is_not_taken_for_pages():
    state, pages = steps_of(READS[1], WRITES[0])
    plan_layout(WRITE, SHAPES).read(pages.packed, "block")[...] = STATE.number
    with pytest.raises(ValueError, match="dispatch 1"):
        ReplayedBlocks([state, pages], SHAPES)


def test_every_field_of_a_copy_has_its_bounds():
    for program in (EXPORT, *BLOCK_COPIES):
        assert bounds_of_copy(program, SHAPES).keys() == plan_layout(program, SHAPES).fields.keys()
    assert bounds_of_copy(READ, SHAPES)["sources"] == (0, SHAPES.num_pages - 1)
    assert bounds_of_copy(WRITE, SHAPES)["sources"] == (0, 2)
