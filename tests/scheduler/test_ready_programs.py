"""ReadyPrograms: the first programs run any step, and later ones make it cheaper."""

import itertools

import pytest

from jaxspec.plan.plan import ForwardPass, Program
from jaxspec.plan.step_shapes import SchedulerLimits, StepShapes
from jaxspec.requests.sampling_features import EVERYTHING, GREEDY, LADDER, TOP_K, SamplingFeatures
from jaxspec.runner.warmup import first_programs, later_programs
from jaxspec.scheduler.ready_programs import ReadyPrograms, StepNeeds

SHAPES = StepShapes(
    max_num_seqs=16,
    max_model_len=64,
    page_size=4,
    num_pages=99,
    num_drafts=3,
    decode_rows=(1, 4, 16),
    prefill_tokens=(16, 64),
    steps_per_dispatch=4,
    draft_buckets=(0, 1, 3),
)
NEEDS = [
    StepNeeds(rows, tokens, features, 1, drafts)
    for rows, tokens, features, drafts in itertools.product((1, 5, 16), (0, 9, 64), LADDER, (0, 3))
]


def begun():
    programs = ReadyPrograms(SHAPES)
    programs.add(first_programs(SHAPES, SchedulerLimits()))
    return programs


def is_enough(program, needs):
    """Stated apart from the code under test."""
    names = set(needs.features.names) - (set() if needs.num_prompt_tokens else {"prompt_logprobs"})
    kept = set(program.features.names)
    if "top_k_top_p" in kept:
        kept.add("small_top_k")
    return (
        program.decode_rows >= needs.num_decode
        and program.prefill_tokens >= needs.num_prompt_tokens
        and bool(program.prefill_tokens) == bool(needs.num_prompt_tokens)
        and program.num_drafts >= needs.num_drafts
        and names <= kept
    )


def test_the_first_programs_run_any_step():
    programs = begun()
    assert all(programs.can_run(needs) for needs in NEEDS)
    assert all(is_enough(programs.choose(needs), needs) for needs in NEEDS)


def test_each_program_that_is_added_makes_no_step_dearer_and_drops_no_feature():
    programs = begun()
    before = {needs: programs.choose(needs) for needs in NEEDS}
    for program in later_programs(SHAPES):
        programs.add([program])
        for needs in NEEDS:
            chosen = programs.choose(needs)
            sizes = chosen.prefill_tokens, chosen.decode_rows
            assert is_enough(chosen, needs)
            assert sizes <= (before[needs].prefill_tokens, before[needs].decode_rows)
            before[needs] = chosen
    chosen = programs.choose(StepNeeds(1, 0, TOP_K, 1, 1))
    assert (chosen.decode_rows, chosen.features, chosen.num_drafts) == (1, TOP_K, 1)
    assert programs.choose(StepNeeds(4, 0, GREEDY, 4)).num_steps == 4


def test_several_steps_and_fewer_drafts_wait_for_their_programs():
    programs, several = begun(), StepNeeds(4, 0, GREEDY, 4)
    assert not programs.can_run(several) and programs.draft_buckets(NEEDS[0]) == [3]
    with pytest.raises(RuntimeError, match="none can run"):
        programs.choose(several)
    programs.add(later_programs(SHAPES))
    assert programs.can_run(several) and programs.draft_buckets(NEEDS[0]) == [0, 1, 3]


def test_a_step_runs_in_halves_once_both_are_there():
    programs, (small, large) = begun(), (ForwardPass(4, 3), ForwardPass(16, 3))
    three, four, five, all_rows = (StepNeeds(rows, 0, TOP_K) for rows in (3, 4, 5, 16))
    assert programs.first_half(three) is None
    programs.add([large])
    assert programs.first_half(three) is None
    programs.add([large.rest, small.rest])
    assert programs.first_half(three) == programs.first_half(all_rows) == large
    programs.add([small])
    assert (programs.first_half(four), programs.first_half(five)) == (small, large)
    assert programs.first_half(StepNeeds(4, 0, SamplingFeatures.of("registered outside"))) is None
    assert all(type(programs.choose(needs)) is Program for needs in NEEDS)


def test_the_number_of_programs_does_not_depend_on_the_requests():
    count = len(later_programs(SHAPES))
    assert count == len(later_programs(SHAPES, [EVERYTHING])) == len(set(later_programs(SHAPES)))
    assert not set(later_programs(SHAPES)) & set(first_programs(SHAPES, SchedulerLimits()))
