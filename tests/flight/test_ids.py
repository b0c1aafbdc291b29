"""Hashed flights: equal ids stay equal, and the true ones are nowhere."""

import numpy as np
from fake_device import make_buckets

from jaxspec.flight import Flight, Step
from jaxspec.flight.blocks import without_ids
from jaxspec.plan.plan import Program, StepOutput, output_layout, pack_plan, plan_layout
from jaxspec.plan.row import row_layout
from jaxspec.requests.sampling_features import GREEDY

SHAPES = make_buckets(num_drafts=1, path_length=4)
PROGRAM = Program(5, 16, GREEDY)
VOCAB = 10**6  # so large that made-up ids hardly meet by chance


def make_flight():
    row = row_layout(1)
    entry = np.zeros((1, row.size), np.int32)
    fields = row.unpack(entry)
    fields["last_token"][:], fields["seed"][:], fields["slot"][:] = 77, 5, 3
    fields["drafts"][:] = fields["stop_ids"][:] = -1
    fields["stop_ids"][0, 0] = 77
    values = {
        "prev_positions": [-1],
        "new_row_index": [0],
        "new_rows": entry,
        "prefill_tokens": [77, 78, 77],
        "prefill_lens": [3],
        "next_prefill_tokens": [-1],
        "paths": np.array([[78, 77, -1, -1]]),
    }
    tokens = np.full((1, 8, 2), -1, np.int32)
    tokens[0, 5, 0] = 78
    counts = np.zeros((1, 8), np.int32)
    layout = output_layout(1)
    output = StepOutput(tokens, counts, counts, counts, counts, np.full((1, 8, 1), 77, np.int32))
    packed = np.concatenate([layout.bits(name, vars(output)[name]) for name in layout.fields], -1)
    step = Step(PROGRAM, pack_plan(PROGRAM, SHAPES, values), packed)
    return Flight({"vocab_size": VOCAB}, SHAPES, "empty", [step])


def test_equal_ids_stay_equal_and_all_else_stays_as_it_is():
    flight = make_flight()
    before = flight.steps[0].packed.copy()
    hashed = without_ids(flight)
    assert hashed.hashed and np.array_equal(flight.steps[0].packed, before)
    fields, was = (
        plan_layout(PROGRAM, SHAPES).unpack(each.steps[0].packed) for each in (hashed, flight)
    )
    first, second, third = fields["prefill_tokens"][:3].tolist()
    assert first == third != second and not {first, second} & {77, 78}
    assert fields["paths"][0].tolist() == [second, first, -1, -1]
    rows, rows_were = (row_layout(1).unpack(each["new_rows"]) for each in (fields, was))
    assert rows["last_token"][0] == first
    output = StepOutput.unpack(hashed.steps[0].output, output_layout(1))
    assert output.tokens[0, 5].tolist() == [second, -1] and not output.num_accepted.any()
    assert output_layout(1).read(flight.steps[0].output, "tokens")[0, 5].tolist() == [78, -1]
    for name in fields:
        if name not in ("prefill_tokens", "next_prefill_tokens", "paths", "new_rows"):
            assert np.array_equal(fields[name], was[name])
    for name in rows:
        if name not in ("last_token", "proposer_key"):
            assert np.array_equal(rows[name], rows_were[name])


def test_nobody_knows_the_key():
    first, second = (without_ids(make_flight()).steps[0].packed for _ in range(2))
    assert not np.array_equal(first, second)
