import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.plan.plan import MOVES, Program, pack_plan
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.device_plan import DevicePlan
from jaxspec.runner.prepare import prepare
from jaxspec.runner.remap import update_page_tables, write_page_tables

DECODE_ROWS = 3
jitted_update = jax.jit(update_page_tables)


def make_buckets(num_drafts=3, page_size=4):
    return StepShapes(
        max_num_seqs=6,
        max_model_len=64,
        page_size=page_size,
        num_pages=200,
        num_drafts=num_drafts,
        decode_rows=(DECODE_ROWS, 6),
        prefill_tokens=(12,),
        max_prefill_seqs=3,
    )


@functools.partial(jax.jit, static_argnums=(3, 4))
def run(rows, tables, packed, program, buckets):
    plan = DevicePlan.unpack(packed, program, buckets)
    return prepare(rows, tables, plan, buckets.page_size, program)


def prepare_step(rows, tables, *, num_decode=0, chunks=(), after_chunks=(), page_size=4):
    """`prepare` on a plan: the first `num_decode` rows decode, each after them gets a chunk."""
    num_drafts = rows.drafts.shape[1]
    buckets = make_buckets(num_drafts, page_size)
    program = Program(DECODE_ROWS, 12 if chunks else 0, GREEDY, num_drafts=num_drafts)
    values = {
        "num_decode": num_decode,
        "prefill_tokens": [token for chunk in chunks for token in chunk],
        "prefill_lens": [len(chunk) for chunk in chunks],
        "next_prefill_tokens": list(after_chunks) or [-1] * len(chunks),
    }
    inputs = run(rows, tables, pack_plan(program, buckets, values), program, buckets)
    return jax.tree.map(np.asarray, inputs)


def consecutive_tables(num_slots=7, num_pages=16):
    """Slot s has the pages 16 s, 16 s + 1, ...; the null slot has none."""
    tables = np.arange(num_slots * num_pages, dtype=np.int32).reshape(num_slots, num_pages)
    tables[0] = 0
    return jnp.asarray(tables)


def kv_slot(slot, position, page_size=4):
    return (slot * 16 + position // page_size) * page_size + position % page_size


def all_rows(make_rows, num_drafts, rows):
    return make_rows(num_drafts, [*rows, *[None] * (6 - len(rows))])


def test_positions_lengths_and_slots_come_from_the_devices_own_counts(make_rows):
    """The plan names rows and nothing else: the same plan gives what the rows' counts say."""
    rows = [
        {"slot": 2, "num_computed": 9, "last_token": 50, "drafts": [51, 52, 53], "num_drafts": 3,
         "max_len": 60, "prefill_len": 5, "state_offset": 2},
        {"slot": 5, "num_computed": 30, "last_token": 60, "drafts": [61, 62, 63], "num_drafts": 1,
         "max_len": 60, "prefill_len": 5, "state_offset": 1},
    ]  # fmt: skip
    for shift in [0, 1, 7]:
        moved = [row | {"num_computed": row["num_computed"] + shift} for row in rows]
        inputs = prepare_step(all_rows(make_rows, 3, moved), consecutive_tables(), num_decode=2)
        model, (a, b) = inputs.model, (9 + shift, 30 + shift)
        assert model.decode.num_computed.tolist() == [a, b, 0]
        assert model.decode.query_len.tolist() == [4, 2, 0]
        assert model.decode.state_offset.tolist() == [2, 1, 0]
        assert model.tokens.tolist()[:8] == [50, 51, 52, 53, 60, 61, 62, 63]
        assert model.positions.tolist()[:8] == [*range(a, a + 4), *range(b, b + 4)]
        live = [kv_slot(2, p) for p in range(a, a + 4)] + [kv_slot(5, b), kv_slot(5, b + 1)]
        assert model.kv_slots.tolist() == live + [-1] * 6
        assert model.live.tolist() == [True] * 6 + [False] * 6
        assert inputs.num_draft_tokens.tolist() == [3, 1, 0]
        assert inputs.produces_token.tolist() == [True, True, False]
        assert inputs.logits_indices.tolist() == list(range(12))


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_the_tail_of_a_prompt_is_one_real_token_without_drafts(make_rows, num_drafts):
    """Prompt 11, computed 10: the prompt's own last token, and nothing verified behind it."""
    row = {"slot": 1, "num_computed": 10, "prefill_len": 11, "last_token": 42, "max_len": 40}
    inputs = prepare_step(
        all_rows(make_rows, num_drafts, [row]), consecutive_tables(), num_decode=1
    )
    width = 1 + num_drafts
    assert inputs.model.tokens[:width].tolist() == [42] + [0] * num_drafts
    assert inputs.model.kv_slots[:width].tolist() == [kv_slot(1, 10)] + [-1] * num_drafts
    assert inputs.model.decode.query_len.tolist() == [1, 0, 0]
    assert inputs.num_draft_tokens.tolist() == [0, 0, 0]
    assert inputs.produces_token.tolist() == [True, False, False]


@pytest.mark.parametrize(
    ("num_computed", "max_len", "num_verified"),
    # One token is sure; each draft verified may give one more.
    [(10, 20, 3), (10, 15, 3), (10, 14, 2), (10, 13, 1), (10, 12, 0)],
)
def test_drafts_beyond_the_end_of_a_request_are_not_verified(
    make_rows, num_computed, max_len, num_verified
):
    row = {"slot": 1, "num_computed": num_computed, "max_len": max_len, "last_token": 1,
           "drafts": [2, 3, 4], "num_drafts": 3}  # fmt: skip
    inputs = prepare_step(all_rows(make_rows, 3, [row]), consecutive_tables(), num_decode=1)
    assert inputs.num_draft_tokens[0] == num_verified
    assert num_computed + 1 + (1 + num_verified) <= max_len, "tokens there are, and may be made"
    assert inputs.model.decode.query_len[0] == 1 + num_verified
    written = [kv_slot(1, num_computed + place) for place in range(1 + num_verified)]
    assert inputs.model.kv_slots[:4].tolist() == written + [-1] * (3 - num_verified)


def test_a_placeholder_draft_embeds_as_something_and_stays_a_placeholder(make_rows):
    row = {"slot": 1, "num_computed": 10, "max_len": 40, "last_token": 7, "drafts": [8, -1, 9],
           "num_drafts": 3}  # fmt: skip
    inputs = prepare_step(all_rows(make_rows, 3, [row]), consecutive_tables(), num_decode=1)
    assert inputs.model.tokens[:4].tolist() == [7, 8, 0, 9]
    assert inputs.active.drafts[0].tolist() == [8, -1, 9]
    assert inputs.num_draft_tokens[0] == 3


def test_chunks_of_several_prompts_lie_end_to_end(make_rows):
    """One decode row, then chunks of 3, 1 and 5 tokens that stand at 0, 8 and 20."""
    rows = all_rows(make_rows, 1, [
        {"slot": 6, "num_computed": 5, "last_token": 9, "max_len": 60, "prefill_len": 2},
        {"slot": 1, "num_computed": 0, "prefill_len": 3, "max_len": 60},
        {"slot": 4, "num_computed": 8, "prefill_len": 30, "max_len": 60, "state_offset": 1},
        {"slot": 2, "num_computed": 20, "prefill_len": 25, "max_len": 60},
    ])  # fmt: skip
    chunks = [[10, 11, 12], [20], [30, 31, 32, 33, 34]]
    inputs = prepare_step(
        rows, consecutive_tables(), num_decode=1, chunks=chunks, after_chunks=[-1, 21, -1]
    )
    model, prefill = inputs.model, inputs.model.prefill
    assert model.tokens[6:].tolist() == [10, 11, 12, 20, 30, 31, 32, 33, 34, 0, 0, 0]
    positions = [0, 1, 2, 8, *range(20, 25)]
    owners = [1, 1, 1, 4, 2, 2, 2, 2, 2]
    assert model.positions[6:15].tolist() == positions
    slots = [kv_slot(owner, p) for owner, p in zip(owners, positions, strict=True)]
    assert model.kv_slots.tolist() == [kv_slot(6, 5)] + [-1] * 5 + slots + [-1] * 3
    np.testing.assert_array_equal(model.live, model.kv_slots >= 0)
    assert prefill.query_start.tolist() == [0, 3, 4, 9]
    assert prefill.slots.tolist() == [1, 4, 2]
    assert prefill.num_computed.tolist() == [0, 8, 20]
    assert prefill.state_offset.tolist() == [0, 1, 0]
    # Logits: all of the rectangle, then the last token of each chunk.
    assert inputs.logits_indices.tolist() == [*range(6), 6 + 2, 6 + 3, 6 + 8]
    assert inputs.produces_token.tolist() == [True, False, False, True, False, True]
    assert inputs.num_draft_tokens.tolist() == [0] * 6
    assert inputs.index.tolist() == [0, 6, 6, 1, 2, 3]
    assert inputs.next_prefill_token.tolist() == [-1, 21, -1]
    # The index of the token each row makes first: 5 computed and one more are there already.
    assert inputs.first_position[[0, 3, 4, 5]].tolist() == [6, 3, 9, 25]


@pytest.mark.parametrize("length", [1, 4, 12])
def test_a_chunk_emits_only_where_it_ends_its_prompt(make_rows, length):
    for prefill_len in range(length, length + 3):
        row = {"slot": 3, "num_computed": 16, "prefill_len": 16 + prefill_len, "max_len": 60}
        inputs = prepare_step(
            all_rows(make_rows, 3, [row]), consecutive_tables(), chunks=[[5] * length]
        )
        assert inputs.produces_token.tolist() == [False] * 3 + [length == prefill_len, False, False]


@pytest.mark.parametrize(
    "row",
    [
        None,
        {"slot": 2, "finish": Finish.STOP},
        {"slot": 2, "finish": Finish.ERROR, "prefill_len": 3},
    ],
    ids=["empty", "finished", "failed"],
)
def test_inert_rows_write_nothing_and_emit_nothing(make_rows, row):
    base = {"num_computed": 9, "max_len": 40, "last_token": 3, "drafts": [4, 5], "num_drafts": 2}
    live = base | {"slot": 1}
    rows = all_rows(make_rows, 2, [row and base | row, live])
    inputs = prepare_step(rows, consecutive_tables(), num_decode=2)
    assert inputs.model.decode.query_len.tolist() == [0, 3, 0]
    written = [kv_slot(1, position) for position in (9, 10, 11)]
    assert inputs.model.kv_slots.tolist() == [-1] * 3 + written + [-1] * 3
    assert inputs.produces_token.tolist() == [False, True, False]
    assert inputs.num_draft_tokens.tolist() == [0, 2, 0]


def test_rows_the_plan_does_not_name_are_idle(make_rows):
    """A row past `num_decode` without a chunk keeps what it has: it is not among the active."""
    row = {"num_computed": 9, "max_len": 40, "last_token": 3}
    rows = all_rows(make_rows, 1, [row | {"slot": slot} for slot in (1, 2, 3, 4, 5)])
    inputs = prepare_step(rows, consecutive_tables(), num_decode=1, chunks=[[7, 8]])
    assert inputs.active.slot.tolist() == [1, 0, 0, 2, 0, 0]
    assert inputs.index.tolist() == [0, 6, 6, 1, 6, 6]
    put = rows.put(jnp.asarray(inputs.index), jax.tree.map(jnp.zeros_like, inputs.active))
    assert np.asarray(put.slot).tolist() == [0, 0, 3, 4, 5, 0]


def test_an_empty_plan_names_no_token(make_rows):
    rows = all_rows(make_rows, 3, [{"slot": 1, "num_computed": 9, "max_len": 40}])
    inputs = prepare_step(rows, consecutive_tables())
    assert set(inputs.model.kv_slots.tolist()) == {-1} and not inputs.produces_token.any()
    assert not inputs.active.fields.any()


@pytest.mark.parametrize(
    ("page_size", "pages", "positions", "slots"),
    [
        (16, [5, 6, 7], [0, 15, 16, 47], [80, 95, 96, 127]),
        (16, [9, 2], [3], [147]),
        (16, [7, 4], [20], [68]),
        # Beyond the table, and where no page was given: nowhere.
        (16, [5, 6, 7], [48, 63], [-1, -1]),
        (16, [5, 0, 7], [15, 16, 32], [95, -1, 112]),
        (1, [3, 9, 4], [0, 1, 2], [3, 9, 4]),
    ],
)
def test_slots_equal_the_table(make_rows, page_size, pages, positions, slots):
    tables = np.zeros((7, 64 // page_size), np.int32)
    tables[4, : len(pages)] = pages
    for position, slot in zip(positions, slots, strict=True):
        row = {"slot": 4, "num_computed": position, "max_len": 99, "last_token": 1}
        rows = all_rows(make_rows, 0, [row])
        inputs = prepare_step(rows, jnp.asarray(tables), num_decode=1, page_size=page_size)
        assert inputs.model.kv_slots[0] == slot


def append(make_rows, tables, new_rows, **appends):
    """`update_page_tables` after a plan with these appends."""
    program, buckets = Program(DECODE_ROWS, 0, GREEDY), make_buckets(0)
    packed = pack_plan(program, buckets, appends)
    new = all_rows(make_rows, 0, new_rows)
    plan = DevicePlan.unpack(jnp.asarray(packed), program, buckets)
    return np.asarray(jitted_update(tables, new, plan))


def test_a_slot_given_to_a_new_request_begins_with_its_own_pages_only(make_rows):
    before = consecutive_tables()
    after = append(
        make_rows,
        before,
        [None, {"slot": 3, "num_computed": 0}],
        append_slots=[3, 3, 5],
        append_indices=[0, 1, 2],
        append_pages=[77, 78, 99],
    )
    expected = np.array(before)
    expected[3] = [77, 78] + [0] * 14
    expected[5, 2] = 99
    np.testing.assert_array_equal(after, expected)


def test_a_plan_of_moves_brings_whole_tables_and_its_padding_none():
    before, buckets = consecutive_tables(), make_buckets(0)
    tables = np.arange(100, 132, dtype=np.int32).reshape(2, 16)
    packed = pack_plan(MOVES, buckets, {"target_slots": [3, 5], "target_tables": tables})
    plan = DevicePlan.unpack(jnp.asarray(packed), MOVES, buckets)
    expected = np.array(before)
    expected[[3, 5]] = tables
    np.testing.assert_array_equal(write_page_tables(before, plan), expected)


def test_without_new_rows_and_appends_the_tables_stay(make_rows):
    before = consecutive_tables()
    np.testing.assert_array_equal(append(make_rows, before, []), before)


def test_a_row_beyond_its_pages_writes_nowhere_instead_of_into_another(make_rows):
    """Positions past the end of the table clamp to nothing: 64 is outside 16 pages of 4."""
    row = {"slot": 4, "num_computed": 62, "max_len": 99, "last_token": 1, "drafts": [1, 2, 3],
           "num_drafts": 3}  # fmt: skip
    inputs = prepare_step(all_rows(make_rows, 3, [row]), consecutive_tables(), num_decode=1)
    assert inputs.model.kv_slots[:4].tolist() == [kv_slot(4, 62), kv_slot(4, 63), -1, -1]
