import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.cache import Replay, Snapshot
from jaxspec.requests.request import Finish
from jaxspec.runner.update import truncate_at_stop, update
from jaxspec.sampling import Acceptance

NONE = -1
SNAPSHOT = Snapshot()


def acceptance_of(tokens, num_accepted=None):
    """As verification gives it: one token more than drafts that stand, unless one is missing."""
    tokens = np.asarray(tokens, np.int32)
    if num_accepted is None:
        num_accepted = np.maximum((tokens != NONE).sum(1) - 1, 0)
    return Acceptance(tokens=tokens, num_accepted=np.asarray(num_accepted, np.int32))


@functools.partial(jax.jit, static_argnames="states")
def cut_and_update(acceptance, rows, lens, emits, states):
    """The two as the step joins them."""
    num_decode = rows.num_rows - lens.shape[0]
    first = rows.num_computed + jnp.pad(lens - 1, (num_decode, 0)) + 1
    cut, finish = truncate_at_stop(acceptance, rows, first, emits)
    return cut, cut.num_emitted, update(rows, cut, finish, lens, states)


def step(rows, tokens, prefill_lens=(), emits=None, num_accepted=None, states=SNAPSHOT):
    """What is emitted, and the fields of the rows after it."""
    emits = np.ones(len(tokens), bool) if emits is None else np.asarray(emits)
    lens = np.asarray(prefill_lens, np.int32)
    acceptance = acceptance_of(tokens, num_accepted)
    cut, num_emitted, after = cut_and_update(acceptance, rows, lens, emits, states)
    after = SimpleNamespace(fields=after.fields, **after.layout.unpack(np.asarray(after.fields)))
    tokens, num_accepted = np.asarray(cut.tokens), np.asarray(cut.num_accepted)
    return SimpleNamespace(tokens=tokens, num_emitted=num_emitted, num_accepted=num_accepted), after


def test_counts_and_next_tokens_equal_the_table(make_rows):
    """Emitted tokens of K + 1 = 5; a discarded row and an empty one keep their last token."""
    rows = make_rows(
        4,
        [
            {"slot": s, "last_token": 10 * s, "num_computed": 50, "max_len": 999}
            for s in (1, 2, 3, 4)
        ],
    )
    tokens = [
        [0, 1, NONE, NONE, NONE],
        [0, 1, 2, 3, 4],
        [NONE] * 5,
        [0, 1, 2, NONE, NONE],
    ]
    cut, after = step(rows, tokens, emits=[True, True, False, False])
    assert np.asarray(cut.num_emitted).tolist() == [2, 5, 0, 0]
    assert np.asarray(after.last_token).tolist() == [1, 4, 30, 40]
    assert np.asarray(after.num_computed).tolist() == [52, 55, 50, 50]
    assert not np.any(after.finish)


def test_the_device_counts_from_its_own_count(make_rows):
    """Row 0 had 10 computed and gains 3; rows 1 and 2 were not verified and keep theirs."""
    rows = make_rows(
        3,
        [
            {"slot": s, "num_computed": c, "state_offset": o, "max_len": 999}
            for s, c, o in [(1, 10, 2), (2, 20, 1), (3, 30, 3)]
        ],
    )
    tokens = [[5, 6, 7, NONE], [NONE] * 4, [NONE] * 4]
    _, after = step(rows, tokens, emits=[True, False, False])
    assert np.asarray(after.num_computed).tolist() == [13, 20, 30]
    assert np.asarray(after.state_offset).tolist() == [2, 1, 3]


@pytest.mark.parametrize(
    ("prefill_len", "offset", "gained", "offset_after"), [(0, 2, 0, 2), (1, 2, 1, 0), (7, 0, 7, 0)]
)
def test_the_state_offset_changes_only_where_tokens_were_computed(
    make_rows, prefill_len, offset, gained, offset_after
):
    """A chunk leaves its state in candidate 0; no chunk leaves everything as it was."""
    rows = make_rows(
        3,
        [
            {
                "slot": 1,
                "num_computed": 20,
                "state_offset": offset,
                "max_len": 99,
                "prefill_len": 50,
                "last_token": 8,
            }
        ],
    )
    accepted = [3]  # junk: a chunk verifies nothing
    cut, after = step(rows, [[3, NONE, NONE, NONE]], [prefill_len], [False], accepted)
    assert int(cut.num_emitted[0]) == 0
    assert int(after.num_computed[0]) == 20 + gained
    assert int(after.state_offset[0]) == offset_after
    assert int(after.last_token[0]) == 8, "a chunk that does not end its prompt makes no token"


def test_the_ring_keeps_what_stands(make_rows):
    """A window of 5, 3 tokens a step: more than 2 in the ring are folded, and a chunk empties it.

    A row that emits nothing keeps its own.
    """
    fields = [
        {"slot": s, "num_computed": 50, "ring_length": r, "max_len": 999}
        for s, r in [(1, 0), (2, 2), (3, 3), (4, 5), (5, 2)]
    ]
    rows = make_rows(2, fields)
    tokens = [[5, NONE, NONE], [5, 6, 7], [5, 6, NONE], [NONE] * 3, [NONE] * 3]
    emits = [True, True, True, False, False]
    _, after = step(rows, tokens, [4], emits, states=Replay(window=5))
    assert np.asarray(after.ring_length).tolist() == [1, 5, 2, 5, 0]
    _, after = step(rows, tokens, [4], emits)
    assert np.asarray(after.ring_length).tolist() == [0, 2, 3, 5, 2]  # not replayed: not looked at


def test_a_chunk_that_ends_its_prompt_emits_once(make_rows):
    rows = make_rows(2, [{"slot": 1, "num_computed": 20, "max_len": 99, "prefill_len": 27}])
    cut, after = step(rows, [[3, NONE, NONE]], [7])
    assert np.asarray(cut.tokens).tolist() == [[3, NONE, NONE]]
    assert (int(after.num_computed[0]), int(after.last_token[0])) == (27, 3)


@pytest.mark.parametrize(
    ("tokens", "fields", "kept", "finish"),
    [
        ([5, 6, 7, 8], {}, 4, Finish.RUNNING),
        ([5, 6, 7, 8], {"stop_ids": [6]}, 2, Finish.STOP),
        ([5, 6, 7, 8], {"stop_ids": [8, 7]}, 3, Finish.STOP),
        ([6, 6, 6, 6], {"stop_ids": [6]}, 1, Finish.STOP),
        ([5, 6, 7, NONE], {"stop_ids": [8]}, 3, Finish.RUNNING),
        # Tokens have the indices 11..14: a request of at most 13 ends with the second.
        ([5, 6, 7, 8], {"max_len": 13}, 2, Finish.LENGTH),
        ([5, 6, 7, 8], {"max_len": 12}, 1, Finish.LENGTH),
        ([5, 6, 7, 8], {"max_len": 15}, 4, Finish.LENGTH),
        ([5, 6, 7, 8], {"max_len": 16}, 4, Finish.RUNNING),
        ([5, 6, NONE, NONE], {"max_len": 14}, 2, Finish.RUNNING),
        ([5, 6, 7, 8], {"max_len": 13, "stop_ids": [6]}, 2, Finish.STOP),
        ([5, 6, 7, 8], {"max_len": 13, "stop_ids": [7]}, 2, Finish.LENGTH),
        ([5, 6, 7, 8], {"max_len": 14, "stop_ids": [5]}, 1, Finish.STOP),
        # No stop id counts before min_len.
        ([6, 6, 6, 6], {"stop_ids": [6], "min_len": 13}, 3, Finish.STOP),
        ([6, 5, 5, 5], {"stop_ids": [6], "min_len": 12}, 4, Finish.RUNNING),
        ([5, 6, 6, 5], {"stop_ids": [6], "min_len": 12, "max_len": 13}, 2, Finish.STOP),
        # -1 pads the stop ids and is none.
        ([5, NONE, NONE, NONE], {"stop_ids": [-1]}, 1, Finish.RUNNING),
    ],
)
def test_a_row_is_cut_at_its_first_end(make_rows, tokens, fields, kept, finish):
    row = {"slot": 1, "num_computed": 10, "max_len": 99, "last_token": 4} | fields
    cut, after = step(make_rows(3, [row]), [tokens])
    assert np.asarray(cut.tokens)[0].tolist() == tokens[:kept] + [NONE] * (4 - kept)
    assert int(after.finish[0]) == finish
    assert int(after.last_token[0]) == tokens[kept - 1]
    assert int(after.num_computed[0]) == 10 + kept
    # The last token is computed by nobody, a stop no less than the target's own.
    assert int(cut.num_accepted[0]) == int(after.state_offset[0]) == kept - 1


def cut_oracle(tokens, index, stop_ids, min_len, max_len):
    """One token at a time."""
    kept = []
    for token in tokens:
        if token == NONE:
            break
        kept.append(token)
        if token in stop_ids and index >= min_len:
            return kept, Finish.STOP
        if index == max_len - 1:
            return kept, Finish.LENGTH
        index += 1
    return kept, Finish.RUNNING


@pytest.mark.parametrize("seed", range(5))
def test_the_cut_equals_one_token_at_a_time(make_rows, seed):
    random = np.random.default_rng(seed)
    rows, tokens, expected = [], [], []
    for slot in range(1, 41):
        computed = int(random.integers(1, 20))
        num_real = int(random.integers(1, 5))
        row = {
            "slot": slot,
            "num_computed": computed,
            "min_len": int(random.integers(0, 25)),
            "max_len": computed + 1 + int(random.integers(1, 8)),
            "stop_ids": random.integers(0, 6, 2).tolist(),
        }
        real = random.integers(0, 6, num_real).tolist()
        rows.append(row)
        tokens.append(real + [NONE] * (4 - num_real))
        expected.append(
            cut_oracle(real, computed + 1, row["stop_ids"], row["min_len"], row["max_len"])
        )
    cut, after = step(make_rows(3, rows), tokens)
    for row, (kept, finish) in enumerate(expected):
        assert [t for t in np.asarray(cut.tokens)[row] if t != NONE] == kept
        assert int(after.finish[row]) == finish


@pytest.mark.parametrize(
    ("tokens", "num_accepted", "fields", "finish"),
    [
        ([NONE] * 4, 0, {}, Finish.ERROR),
        ([5, 6, NONE, NONE], 2, {}, Finish.ERROR),  # two drafts stood, then NaN
        ([5, 6, NONE, NONE], 2, {"stop_ids": [6]}, Finish.STOP),  # it had ended before
        ([5, 6, NONE, NONE], 2, {"max_len": 13}, Finish.LENGTH),
        ([5, 6, NONE, NONE], 2, {"max_len": 14}, Finish.ERROR),
        ([5, 6, NONE, NONE], 1, {}, Finish.RUNNING),
    ],
)
def test_a_row_without_a_token_to_give_ends_in_an_error(
    make_rows, tokens, num_accepted, fields, finish
):
    row = {"slot": 1, "num_computed": 10, "max_len": 99} | fields
    cut, after = step(make_rows(3, [row]), [tokens], num_accepted=[num_accepted])
    assert int(after.finish[0]) == finish
    assert np.asarray(cut.tokens)[0].tolist() == tokens


def test_nan_at_the_end_of_a_prompt_is_an_error_and_within_it_is_not_looked_at(make_rows):
    row = {"slot": 1, "num_computed": 10, "max_len": 99}
    _, after = step(make_rows(1, [row]), [[NONE, NONE]], [5], emits=[True])
    assert int(after.finish[0]) == Finish.ERROR
    _, after = step(make_rows(1, [row]), [[NONE, NONE]], [5], emits=[False])
    assert int(after.finish[0]) == Finish.RUNNING


@pytest.mark.parametrize("finish", [Finish.STOP, Finish.LENGTH, Finish.ERROR])
def test_a_finished_row_keeps_every_field_and_emits_nothing(make_rows, finish):
    rows = make_rows(
        3,
        [
            {
                "slot": 1,
                "num_computed": 10,
                "max_len": 99,
                "finish": finish,
                "last_token": 3,
                "state_offset": 2,
                "stop_ids": [5],
            }
        ],
    )
    cut, after = step(rows, [[5, 6, 7, 8]], emits=[False])
    assert np.asarray(cut.tokens).tolist() == [[NONE] * 4]
    np.testing.assert_array_equal(after.fields, rows.fields)
    cut, after = step(rows, [[5, 6, 7, 8]], emits=[True])
    assert np.asarray(cut.tokens).tolist() == [[NONE] * 4]
    np.testing.assert_array_equal(after.fields, rows.fields)


def test_an_empty_row_stays_empty(make_rows):
    rows = make_rows(3, [None, None])
    cut, after = step(rows, [[5, 6, 7, 8]] * 2, [0], emits=[False, False])
    assert not np.any(after.fields) and np.all(np.asarray(cut.tokens) == NONE)
