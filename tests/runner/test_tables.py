"""The step's tokens into the tables: chunks before the verify, and only what stands after it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_device import make_buckets

from jaxspec.plan.plan import Program, pack_plan
from jaxspec.requests.sampling_features import BIAS, GREEDY, PENALTIES, SamplingFeatures
from jaxspec.runner.device_plan import DevicePlan
from jaxspec.runner.prepare import prepare
from jaxspec.runner.tables import step_tokens, stop_ids, with_chunks, with_verified
from jaxspec.sampling import Acceptance
from jaxspec.sampling.tables import SamplingTables

VOCAB, WIDTH = 20, 3
SHAPES = make_buckets(num_drafts=WIDTH - 1, decode_rows=(2, 5), vocab_size=VOCAB)
PROGRAM = Program(2, 16, SamplingFeatures.of(BIAS, PENALTIES), num_drafts=WIDTH - 1)


@pytest.fixture
def inputs(make_rows):
    """Two rows that decode, the first its prompt's last token; a fresh chunk, and a resumed one."""
    common = {"max_len": 40, "prefill_len": 6}
    rows = make_rows(
        WIDTH - 1,
        [
            {"slot": 1, "num_computed": 5, "prompt_len": 6, "last_token": 11, "table_slot": 1},
            {"slot": 2, "num_computed": 9, "prompt_len": 4, "last_token": 12, "num_drafts": 2,
             "drafts": [13, 13]},
            {"slot": 3, "num_computed": 0, "prompt_len": 9, "table_slot": 3},
            {"slot": 4, "num_computed": 4, "prompt_len": 6, "table_slot": 4},
            None,
        ],
    )  # fmt: skip
    rows = rows.with_fields(
        **{name: jnp.where(rows.slot > 0, value, 0) for name, value in common.items()}
    )
    chunks = [[1, 2, 1], [7, 7, 8, 7]]
    values = {
        "num_decode": 2,
        "prefill_tokens": sum(chunks, []),
        "prefill_lens": [len(chunk) for chunk in chunks],
        "prev_positions": np.arange(5),
    }
    plan = DevicePlan.unpack(pack_plan(PROGRAM, SHAPES, values), PROGRAM, SHAPES)
    tables = np.zeros((SHAPES.num_slots, SHAPES.pages_per_seq), np.int32)
    return prepare(rows, tables, jax.tree.map(jnp.asarray, plan), SHAPES.page_size, PROGRAM)


@pytest.fixture
def tables():
    """As former tenants left them: full of junk."""
    empty = SamplingTables.empty(SHAPES.num_slots, VOCAB, 40, SHAPES.width)
    junk = jax.tree.map(lambda part: jnp.full_like(part, 1), empty.seen)
    return SamplingTables(seen=junk, bias=empty.bias)


def counted(array, slot):
    return {int(i): int(array[slot, i]) for i in np.flatnonzero(np.asarray(array[slot]))}


def test_chunks_count_as_prompt_or_as_output_and_a_fresh_one_clears_its_slot(inputs, tables):
    after = with_chunks(tables, inputs)
    assert counted(after.seen.in_prompt, 3) == {1: 1, 2: 1} and counted(after.seen.counts, 3) == {}
    ones = dict.fromkeys(range(VOCAB), 1)
    assert counted(after.seen.counts, 4) == ones | {7: 2, 8: 2}  # indices 6 and 7; 4, 5 are prompt
    for slot in (0, 1, 2, 5):
        assert counted(after.seen.counts, slot) == ones
    assert after.bias.recent[3, :4].tolist() == [1, 2, 1, -1]
    assert after.bias.recent[4, 3:9].tolist() == [-1, 7, 7, 8, 7, -1]


def test_of_a_verify_the_input_and_the_drafts_that_stand_are_counted(inputs, tables):
    emitted = Acceptance(
        tokens=jnp.array([[15, -1, -1], [13, 16, -1], [5, -1, -1], [6, -1, -1], [-1] * 3]),
        num_accepted=jnp.array([0, 1, 0, 0, 0]),
    )
    assert step_tokens(inputs).tolist() == [[11, -1, -1], [12, 13, 13]]
    after = with_verified(tables, inputs, emitted)
    ones = dict.fromkeys(range(VOCAB), 1)
    assert counted(after.seen.counts, 1) == ones  # the last token of its prompt
    assert counted(after.seen.counts, 2) == ones | {12: 2, 13: 2}
    assert counted(after.seen.counts, 3) == counted(after.seen.counts, 0) == ones
    assert after.bias.recent[1, 4:8].tolist() == [-1, 11, -1, -1]
    assert (after.bias.recent[jnp.array([0, 2, 3, 4])] == -1).all()  # 2 has no tables


def test_rows_without_a_token_count_nothing(inputs, tables):
    nothing = Acceptance(jnp.full((5, WIDTH), -1), jnp.zeros(5, jnp.int32))
    after = with_verified(tables, inputs, nothing)
    jax.tree.map(np.testing.assert_array_equal, after, tables)


def test_a_program_without_tables_touches_none(inputs):
    none = SamplingTables.empty(6, VOCAB, 40, 4).of(GREEDY)
    assert with_chunks(none, inputs) is none
    assert with_verified(none, inputs, Acceptance(jnp.zeros((5, 3)), jnp.zeros(5))) is none
    assert stop_ids(none, inputs.active) is not None


def test_all_stop_ids_of_a_row_end_it(inputs, tables):
    found = stop_ids(tables, inputs.active)
    assert found.shape[1] == inputs.active.stop_ids.shape[1] + tables.bias.more_stop_ids.shape[1]
