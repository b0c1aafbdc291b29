"""What goes in front of a step, and in which order."""

from fake_device import make_group, make_sizes

from jaxspec.plan.block_plan import Block, Read, Write
from jaxspec.plan.plan import (
    EXPORT,
    READ,
    READ_STATE,
    RESTORE,
    TABLES,
    WRITE,
    WRITE_STATE,
    Program,
    SlotCopy,
    StateExport,
    plan_layout,
)
from jaxspec.prefix.cache import PrefixCache
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.scheduler.automaton_pool import AutomatonPool
from jaxspec.scheduler.packing import PlanPacker
from jaxspec.scheduler.scheduled_step import StepBuilder

SHAPES, LIMITS = make_sizes(prefix_caching="all", num_checkpoints=2)
STEP = Program(5, 0, GREEDY)


def make(count):
    prefixes = PrefixCache(SHAPES, LIMITS)
    running = [make_group(seed, 9, 4)[0] for seed in range(1, 1 + count)]
    for slot, request in enumerate(running, 1):
        request.slot, request.prefill_len = slot, len(request.tokens)
    return PlanPacker(SHAPES, None, prefixes, AutomatonPool()), prefixes, running


def fields(plan):
    return plan_layout(plan.program, SHAPES).unpack(plan.packed)


def test_rows_that_decode_come_first_and_the_device_is_told_once_that_a_row_is_new():
    packer, _, (a, b) = make(2)
    a.pages.extend([4, 5])
    plan = packer.pack(STEP, StepBuilder(0, 1, decodes=[b]), [a, b])
    assert (b.row, a.row) == (0, 1) and a.pages.is_unsent  # it is not in the step
    assert fields(plan)["new_row_index"][:3].tolist() == [0, 1, -1] and not plan.before
    again = packer.pack(STEP, StepBuilder(0, 1, decodes=[a]), [a, b])
    assert fields(again)["append_pages"][:3].tolist() == [4, 5, 0] and not a.pages.is_unsent
    assert fields(again)["prev_positions"][:2].tolist() == [1, 0]
    assert (fields(again)["new_row_index"] == -1).all()


def test_states_are_kept_first_then_rows_enter_on_prefixes_and_then_comes_the_step():
    packer, prefixes, (a, b, c) = make(3)
    packer.pack(STEP, StepBuilder(0, 1, decodes=[a]), [a])
    prefixes.store.copies += (
        StateExport(0, 1),
        SlotCopy(1, 2, 7, 8, (6, 8)),
        SlotCopy(2, 3, 0, 0, (6,)),
    )
    plan = packer.pack(STEP, StepBuilder(0, 1, decodes=[c, a, b]), [a, b, c])
    assert [each.program for each in plan.before] == [EXPORT, RESTORE, RESTORE]
    kept, first, second = map(fields, plan.before)
    assert int(kept["row"]) == 0 and int(kept["checkpoint"]) == 1  # where the last plan had it
    assert first["new_row_index"][:3].tolist() == [1, 2, -1]  # both enter with the first
    assert (second["new_row_index"] == -1).all()
    assert [int(each["target_slots"][0]) for each in (first, second)] == [2, 3]
    assert fields(plan)["prev_positions"][:3].tolist() == [2, 0, 1]
    assert prefixes.store.copies == []


def test_copies_run_in_the_order_in_which_they_were_thought_of():
    """A piece is filled before its page or slot is given away, and a request enters before that."""
    packer, prefixes, (a, b) = make(2)
    pages, state = Block(is_state=False), Block(is_state=True)
    prefixes.store.copies += [
        *(Read(pages, (5, 6)), Write(state, (0,), (5,), 2), SlotCopy(2, 1, 5, 6, (6,))),
        *(
            Read(Block(is_state=True), (5,), 2),
            Write(pages, (1, 0), (9, 5)),
            SlotCopy(1, 2, 0, 0, (9,)),
        ),
    ]
    plan = packer.pack(STEP, StepBuilder(0, 1, decodes=[a, b]), [a, b])
    kinds = [READ, WRITE_STATE, RESTORE, READ_STATE, WRITE, RESTORE]
    assert [each.program for each in plan.before] == kinds
    assert plan.before[0].block is plan.before[4].block is pages and plan.block is None
    assert fields(plan.before[4])["targets"][:3].tolist() == [9, 5, 0]
    assert int(fields(plan.before[1])["checkpoint"]) == 2


def test_a_plan_may_do_no_more_than_let_requests_enter():
    packer, prefixes, (a, b) = make(2)
    prefixes.store.copies += SlotCopy(1, 1, 0, 0, (6,)), SlotCopy(2, 2, 0, 0, (7,))
    plan = packer.pack_copies([a, b])
    assert plan.program == RESTORE and [each.program for each in plan.before] == [RESTORE]
    assert fields(plan)["target_slots"].tolist() == [2]


def test_tables_of_a_request_that_enters_on_a_prefix_come_before_it():
    packer, prefixes, (a,) = make(1)
    a.stop_ids = tuple(range(20))
    a.__post_init__()
    prefixes.store.copies.append(SlotCopy(1, 1, 0, 0, (6,)))
    plan = packer.pack(STEP, StepBuilder(0, 1, decodes=[a]), [a])
    assert [each.program for each in plan.before] == [TABLES, RESTORE]
    assert not any(each.before for each in plan.before)  # whoever notes plans sees them all
