import numpy as np
import pytest

from jaxspec.plan.plan import (
    MOVES,
    Program,
    RowOutput,
    StepOutput,
    output_layout,
    pack_plan,
    plan_layout,
)
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.sampling_features import (
    FULL,
    GREEDY,
    LOGPROBS,
    PROMPT_LOGPROBS,
    SAMPLED,
    SamplingFeatures,
)

BUCKETS = StepShapes(
    max_num_seqs=4,
    max_model_len=64,
    page_size=4,
    num_pages=65,
    num_drafts=3,
    decode_rows=(2, 4),
    prefill_tokens=(8, 32),
)
PROGRAMS = [Program(2, 0, GREEDY), Program(4, 8, FULL), Program(4, 32, SAMPLED)]


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_full_plan_comes_back_as_it_was_packed(program):
    random = np.random.default_rng(0)
    layout = plan_layout(program, BUCKETS)
    values = {
        name: random.integers(-(2**31), 2**31, shape, np.int32)
        for name, shape in layout.shapes.items()
    }
    fields = layout.unpack(pack_plan(program, BUCKETS, values))
    assert fields.keys() == values.keys()
    for name, value in values.items():
        np.testing.assert_array_equal(fields[name], value, err_msg=name)


def test_a_short_list_is_padded_with_none():
    packed = pack_plan(PROGRAMS[1], BUCKETS, {"prev_positions": [2], "append_slots": [1, 2]})
    fields = plan_layout(PROGRAMS[1], BUCKETS).unpack(packed)
    assert fields["prev_positions"].tolist() == [2, -1, -1, -1]
    assert fields["new_row_index"].tolist() == [-1] * BUCKETS.max_new_rows
    assert fields["append_slots"][:3].tolist() == [1, 2, 0]
    rest = [v for k, v in fields.items() if k not in ("prev_positions", "new_row_index")]
    assert sum(np.count_nonzero(value) for value in rest) == 2


def test_an_empty_list_is_none():
    empty = {"new_row_index": [], "prefill_lens": [], "append_pages": [], "prefill_tokens": []}
    np.testing.assert_array_equal(
        pack_plan(PROGRAMS[0], BUCKETS, empty), pack_plan(PROGRAMS[0], BUCKETS, {})
    )


@pytest.mark.parametrize(
    "name", ["prev_positions", "append_pages", "prefill_lens", "prefill_tokens"]
)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_list_longer_than_its_field_is_refused(program, name):
    room = plan_layout(program, BUCKETS).shapes[name][0]
    pack_plan(program, BUCKETS, {name: [7] * room})
    with pytest.raises(ValueError, match=rf"room for \({room},\) in {name}, {room + 1} came"):
        pack_plan(program, BUCKETS, {name: [7] * (room + 1)})


MOVED = ["source_slots", "target_slots", "source_pages", "target_pages", "target_tables"]


@pytest.mark.parametrize("program", PROGRAMS)
def test_moves_have_a_program_of_their_own(program):
    """A hot program has no field for them; the other has a whole page table for each target."""
    sizes = {name: np.prod(shape) for name, shape in plan_layout(program, BUCKETS).shapes.items()}
    assert not any(sizes[name] for name in MOVED)
    shapes = plan_layout(MOVES, BUCKETS).shapes
    assert shapes["target_tables"] == (BUCKETS.max_new_rows, BUCKETS.pages_per_seq)
    assert {shapes[name] for name in MOVED[:-1]} == {(BUCKETS.max_new_rows,)}
    computes = ("append_slots", "prefill_tokens", "prefill_lens", "next_prefill_tokens")
    assert {shapes[name] for name in computes} == {(0,)}


def test_a_program_without_a_prompt_reports_on_none():
    both = FULL | SamplingFeatures.of(PROMPT_LOGPROBS, LOGPROBS)
    assert Program(2, 8, both).features == both
    assert Program(2, 0, both) == Program(2, 0, FULL | SamplingFeatures.of(LOGPROBS))


def test_every_plan_is_a_fresh_array():
    """A plan may still be read by a dispatched step while the next one is written."""
    plans = [pack_plan(PROGRAMS[0], BUCKETS, {}) for _ in range(3)]
    plans[0][:] = 7
    assert not np.shares_memory(plans[0], plans[1])
    assert 7 not in plans[1]


@pytest.mark.parametrize("num_drafts", [0, 1, 8])
def test_an_output_comes_back_as_the_device_wrote_it(num_drafts):
    layout = output_layout(num_drafts)
    packed = np.arange(2 * 3 * layout.size, dtype=np.int32).reshape(2, 3, -1)
    output = StepOutput.unpack(packed, layout)
    counts = np.stack(
        [output.num_drafts, output.num_accepted, output.finish, output.num_dropped], axis=-1
    )
    counts = np.concatenate([counts, output.next_drafts], axis=-1)
    assert output.tokens.shape == (2, 3, 1 + num_drafts)
    np.testing.assert_array_equal(np.concatenate([output.tokens, counts], axis=-1), packed)


def test_the_steps_of_a_dispatch_are_joined_row_by_row():
    """Two steps of three rows: one goes on, one ends in the first step, one is empty."""
    output = StepOutput(
        tokens=np.array([[[5, 6, -1], [7, -1, -1], [-1] * 3], [[8, -1, -1], [-1] * 3, [-1] * 3]]),
        num_drafts=np.array([[2, 0, 0], [1, 0, 0]]),
        num_accepted=np.array([[1, 0, 0], [0, 0, 0]]),
        finish=np.array([[0, 1, 0], [0, 1, 0]]),
        num_dropped=np.array([[1, 0, 0], [1, 0, 0]]),
        next_drafts=np.full((2, 3, 2), -1),
    )
    assert output.by_row() == [
        RowOutput((5, 6, 8), (1, 0, 0), 0, drafted=[2, 1], accepted=[1, 0], num_dropped=2),
        RowOutput((7,), (0,), 1, drafted=[0, 0], accepted=[0, 0]),
        RowOutput((), (), 0, drafted=[0, 0], accepted=[0, 0]),
    ]


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_each_token_is_a_draft_that_stands_or_the_target_s_own(num_drafts):
    """Against a loop over steps and rows: drafts 1 to a, then one token of the target's."""
    random = np.random.default_rng(num_drafts)
    drafts = random.integers(0, num_drafts + 1, (4, 16))
    stood = random.integers(0, drafts + 1)
    tokens = random.integers(0, 99, (4, 16, 1 + num_drafts))
    tokens[np.arange(1 + num_drafts) > stood[:, :, None]] = -1
    idle = random.random((4, 16)) < 0.3
    tokens[idle], drafts[idle], stood[idle] = -1, 0, 0
    output = StepOutput(tokens, drafts, stood, *np.zeros((2, 4, 16), int), tokens[:, :, 1:])
    for row, got in enumerate(output.by_row()):
        ids, positions, verified = [], [], []
        for step in np.flatnonzero(~idle[:, row]):
            count = stood[step, row]
            ids += tokens[step, row, : count + 1].tolist()
            positions += [*range(1, count + 1), 0]
            verified.append(drafts[step, row])
        assert (got.tokens, got.draft_positions) == (tuple(ids), tuple(positions))
        places = range(1, num_drafts + 1)
        assert got.drafted == [sum(count >= j for count in verified) for j in places]
        assert got.accepted == [positions.count(j) for j in places]
