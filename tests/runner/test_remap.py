import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.plan.row import row_layout
from jaxspec.runner.batch_state import BatchState, empty_rows
from jaxspec.runner.remap import remap, scatter_new_rows

jitted_remap = jax.jit(remap)
jitted_scatter = jax.jit(scatter_new_rows, static_argnums=2)
NUM_ROWS = 7


def random_fields(random, num_drafts):
    """One row's fields, every one with a value of its own."""
    return random.integers(1, 2**31, row_layout(num_drafts).size).astype(np.int32)


def to_state(rows, num_drafts):
    empty = np.zeros(row_layout(num_drafts).size, np.int32)
    return BatchState(np.stack([empty if row is None else row for row in rows]))


def assert_rows_are(state, requests, order, num_drafts):
    """Row i holds every field of the request `order[i]`; None is an empty row."""
    expected = to_state([requests.get(name) for name in order], num_drafts)
    for name, value in fields_of(state).items():
        np.testing.assert_array_equal(value, fields_of(expected)[name], name)


def fields_of(state):
    return state.layout.unpack(np.asarray(state.fields))


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_every_field_follows_its_request(num_drafts):
    """Random arrivals, departures and permutations, against a dict of requests."""
    random = np.random.default_rng(num_drafts)
    requests, order, born = {}, [None] * NUM_ROWS, 0
    state = empty_rows(NUM_ROWS, num_drafts)
    num_moved = 0
    for _ in range(40):
        stay = [name for name in order if name is not None and random.random() < 0.7]
        arrive = list(range(born, born + random.integers(0, NUM_ROWS - len(stay) + 1)))
        born += len(arrive)
        requests |= {name: random_fields(random, num_drafts) for name in arrive}
        names = stay + arrive
        random.shuffle(names)
        now = names + [None] * (NUM_ROWS - len(names))
        previous = [order.index(name) if name in stay else -1 for name in now]
        index = [now.index(name) for name in arrive] + [-1] * (NUM_ROWS - len(arrive))
        entries = to_state(
            [requests[name] for name in arrive] + [None] * index.count(-1), num_drafts
        )
        new_rows = jitted_scatter(np.asarray(index, np.int32), entries, NUM_ROWS)
        assert_rows_are(new_rows, requests, [n if n in arrive else None for n in now], num_drafts)
        previous = np.asarray(previous, np.int32)
        moved = jitted_remap(state, previous, new_rows)
        assert_rows_are(moved, requests, now, num_drafts)
        twice = jitted_remap(moved, previous, new_rows)
        num_moved += not np.array_equal(twice.fields, moved.fields)
        state, order = moved, now
    assert num_moved > 15, "moving rows twice is another map: the walk must be one that tells"


def test_the_case_of_the_docstring(make_rows):
    a, b, c, d = ({"slot": slot, "state_offset": slot} for slot in (1, 2, 3, 4))
    moved = remap(
        make_rows(2, [a, b, c]),
        jnp.array([2, -1, -1], jnp.int32),
        make_rows(2, [None, d, None]),
    )
    np.testing.assert_array_equal(moved.fields, make_rows(2, [c, d, None]).fields)


def test_sampling_parameters_travel_bit_for_bit(make_rows):
    values = np.array([0.1, 1e-45, -0.0, np.inf, 3.4e38, 1 / 3, 1.0, 0.7], np.float32)
    rows = [{"temperature": x, "top_p": y} for x, y in values.reshape(-1, 2)]
    state = jitted_scatter(np.array([3, 2, 1, 0], np.int32), make_rows(1, rows), 4)
    state = jitted_remap(state, np.array([3, 2, 1, 0], np.int32), empty_rows(4, 1))
    assert np.asarray(state.temperature).tobytes() == values[::2].tobytes()
    assert np.asarray(state.top_p).tobytes() == values[1::2].tobytes()


def test_an_empty_row_stays_empty_whatever_stood_there(make_rows):
    full = make_rows(2, [{"slot": s, "num_computed": 9, "state_offset": 2} for s in (1, 2, 3)])
    moved = remap(full, jnp.full((3,), -1, jnp.int32), empty_rows(3, 2))
    assert not np.any(moved.fields)
    again = remap(moved, jnp.arange(3, dtype=jnp.int32), full)
    assert not np.any(again.fields), "a row that stays takes nothing from the new rows"


def test_a_new_row_inherits_no_field_of_its_predecessor(make_rows):
    """A request that enters with tokens computed starts from its own last token and state 0."""
    old = make_rows(
        3,
        [
            {
                "slot": 5,
                "last_token": 77,
                "drafts": [1, 2, 3],
                "num_drafts": 3,
                "state_offset": 3,
                "finish": 2,
                "stop_ids": [9, 8],
                "top_k": 4,
            }
        ],
    )
    new = make_rows(3, [{"slot": 5, "last_token": 42, "num_computed": 10, "prefill_len": 11}])
    moved = remap(old, jnp.array([-1], jnp.int32), new)
    np.testing.assert_array_equal(moved.fields, new.fields)
    assert (int(moved.state_offset[0]), int(moved.num_drafts[0])) == (0, 0)


def test_padding_among_the_new_rows_writes_nowhere(make_rows):
    entries = make_rows(1, [{"slot": 3}, {"slot": 4}, {"slot": 5}])
    rows = scatter_new_rows(jnp.array([2, -1, -1], jnp.int32), entries, 4)
    assert np.asarray(rows.slot).tolist() == [0, 0, 3, 0]


def test_rows_past_the_end_are_read_as_empty_and_written_nowhere(make_rows):
    state = make_rows(1, [{"slot": 1, "seed": 5}, {"slot": 2, "seed": 6}])
    index = jnp.array([1, 2], jnp.int32)
    taken = state.take(index)
    assert np.asarray(taken.slot).tolist() == [2, 0] and not np.any(taken.fields[1])
    put = state.put(index, taken.with_fields(seed=jnp.array([8, 9], jnp.int32)))
    assert np.asarray(put.seed).tolist() == [5, 8]
    assert np.asarray(put.slot).tolist() == [1, 2]


def test_replacing_columns_leaves_all_others(make_rows):
    random = np.random.default_rng(0)
    state = jax.tree.map(jnp.asarray, to_state([random_fields(random, 2) for _ in range(3)], 2))
    drafts = jnp.array([[1, 2], [3, 4], [5, 6]], jnp.int32)
    changed = state.with_fields(drafts=drafts, num_computed=jnp.array([7, 8, 9], jnp.int32))
    np.testing.assert_array_equal(changed.drafts, drafts)
    np.testing.assert_array_equal(changed.num_computed, [7, 8, 9])
    others = set(row_layout(2).shapes) - {"drafts", "num_computed"}
    for name in others | {"temperature", "top_p"}:
        np.testing.assert_array_equal(getattr(changed, name), getattr(state, name), name)


@pytest.mark.parametrize(
    ("column", "error"),
    [
        ({"finsh": jnp.zeros(3, jnp.int32)}, KeyError),
        ({"temperature": jnp.zeros(3, jnp.int32)}, ValueError),
        ({"drafts": jnp.zeros((3, 4), jnp.int32)}, ValueError),
        ({"seed": jnp.zeros(2, jnp.int32)}, ValueError),
    ],
)
def test_what_is_no_column_of_these_rows_is_refused(column, error):
    with pytest.raises(error, match=next(iter(column))):
        empty_rows(3, num_drafts=2).with_fields(**column)
