"""Flights from files that anybody may have written."""

import dataclasses
import io
import json
import zipfile

import numpy as np
import pytest
from fake_device import make_buckets

from jaxspec.flight import Flight, Step, file
from jaxspec.flight.blocks import without_ids
from jaxspec.flight.file import read, write
from jaxspec.plan.plan import (
    AUTOMATON,
    EXPORT,
    MOVES,
    RESTORE,
    TABLES,
    ForwardPass,
    Program,
    StateExport,
    output_layout,
    pack_export,
    pack_plan,
    plan_layout,
)
from jaxspec.plan.row import row_layout
from jaxspec.requests.sampling_features import FULL, GREEDY

SHAPES = make_buckets(num_drafts=2, path_length=3)
DECODE, PREFILL = Program(2, 0, GREEDY, 1, 2), Program(5, 16, FULL, 1, 2)
HALF = ForwardPass(2, 2)


def make_flight():
    rng = np.random.default_rng(0)

    def output(rows, steps=1):
        return rng.integers(0, 9, (steps, rows, output_layout(2).size), np.int32)

    steps = [
        Step(PREFILL, pack_plan(PREFILL, SHAPES, {"prefill_lens": [3]}), output(8)),
        Step(MOVES, pack_plan(MOVES, SHAPES, {}), output(0, 0)),
        Step(DECODE, pack_plan(DECODE, SHAPES, {"prev_positions": [1, 0]}), output(2)),
        Step(DECODE, pack_plan(DECODE, SHAPES, {"num_decode": 2})),
        Step(HALF, pack_plan(HALF, SHAPES, {"num_decode": 2})),
        Step(HALF.rest, pack_plan(HALF.rest, SHAPES, {"num_decode": 2}), output(2)),
    ]
    about = {
        "options": {"model": None},
        "vocab_size": 9,
        "checkpoint": "0",
        "device": "cpu",
        "versions": {"jax": "1.2"},
    }
    return Flight(about, SHAPES, "empty", steps, failure="RuntimeError: gone", hashed=True)


def test_what_is_written_is_read(tmp_path):
    flight = make_flight()
    write(tmp_path / "a.npz", flight)
    got = read(tmp_path / "a.npz")
    for name in ("about", "shapes", "start", "failure", "hashed", "state"):
        assert getattr(got, name) == getattr(flight, name)
    for step, want in zip(got.steps, flight.steps, strict=True):
        assert step.program == want.program and np.array_equal(step.packed, want.packed)
        assert (step.output is None) == (want.output is None)
        assert want.output is None or np.array_equal(step.output, want.output)
    assert [path.name for path in tmp_path.iterdir()] == ["a.npz"]


def test_a_step_takes_a_few_kilobytes_at_most(tmp_path):
    """A plan of 64 rows is 4 kB, mostly nothing, and its output 3 kB, half of it drafts."""
    shapes = make_buckets(num_drafts=3, max_num_seqs=64, decode_rows=(64,), num_pages=2000)
    program, rng = Program(64, 0, GREEDY), np.random.default_rng(0)
    steps = []
    for _ in range(50):
        values = {"prev_positions": np.arange(64), "num_decode": 64}
        output = rng.integers(0, 4, (1, 64, output_layout(3).size), np.int32)
        output[:, :, :4] = rng.integers(0, 250_000, (1, 64, 4))  # the tokens
        output[:, :, -3:] = rng.integers(0, 250_000, (1, 64, 3))  # the next drafts
        steps.append(Step(program, pack_plan(program, shapes, values), output))
    write(tmp_path / "a.npz", Flight({}, shapes, "empty", steps))
    assert (tmp_path / "a.npz").stat().st_size < 100 * 1024


def mutated(content: bytes, member: str, change) -> bytes:
    """A copy of an archive with one array changed."""
    new = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(content)) as old, zipfile.ZipFile(new, "w") as archive:
        for name in old.namelist():
            data = old.read(name)
            if name == f"{member}.npy":
                array = np.load(io.BytesIO(data))
                buffer = io.BytesIO()
                np.save(buffer, change(array))
                data = buffer.getvalue()
            archive.writestr(name, data)
    return new.getvalue()


def of_header(change):
    def apply(array):
        header = json.loads(array.tobytes())
        change(header)
        return np.frombuffer(json.dumps(header).encode(), np.uint8)

    return apply


def entry(index, value):
    def change(array):
        array = array.copy()
        array[index] = value
        return array

    return change


HEADER_FIELDS = [field.name for field in dataclasses.fields(SHAPES)]
BROKEN = {
    "another format": ("header", of_header(lambda h: h.update(format=1))),
    "no shapes": ("header", of_header(lambda h: h.pop("shapes"))),
    "an unknown start": ("header", of_header(lambda h: h.update(start="anywhere"))),
    "a copy that is not there": (
        "header",
        of_header(lambda h: h.update(start="copy", leaves=[["int32", [2]]])),
    ),
    "a program that its shapes lack": (
        "header",
        of_header(lambda h: h["programs"][0].update(decode_rows=4)),
    ),
    "a program without end": (
        "header",
        of_header(lambda h: h["programs"][2].update(num_steps=10**9)),
    ),
    "half a step that its shapes lack": (
        "header",
        of_header(lambda h: h["programs"][3].update(decode_rows=3)),
    ),
    "half a step with other features": (
        "header",
        of_header(lambda h: h["programs"][4].update(features=[["temperature"]])),
    ),
    "half a step with prompt tokens": (
        "header",
        of_header(lambda h: h["programs"][4].update(decode_rows=5, prefill_tokens=16)),
    ),
    "an unknown sampling feature": (
        "header",
        of_header(lambda h: h["programs"][0].update(features=[["magic"]])),
    ),
    "a program of no integers": (
        "header",
        of_header(lambda h: h["programs"][0].update(decode_rows=True)),
    ),
    "a header of no object": ("header", lambda array: np.frombuffer(b"[1]", np.uint8)),
    "a header of no JSON": ("header", lambda array: array[:-5]),
    "a model of no name": ("header", of_header(lambda h: h["about"]["options"].update(model=5))),
    "no versions": ("header", of_header(lambda h: h["about"].update(versions={}))),
    "a program of nothing": (
        "header",
        of_header(
            lambda h: h["programs"][1].update(
                decode_rows=0, prefill_tokens=0, num_steps=0, features=[["temperature"]]
            )
        ),
    ),
    "nothing of its engine": ("header", of_header(lambda h: h.update(about=[]))),
    "no options": ("header", of_header(lambda h: h["about"].update(options={}))),
    "a vocabulary of no size": ("header", of_header(lambda h: h["about"].update(vocab_size=0))),
    "a step of no program": ("steps", entry(0, 7)),
    "steps of no integers": ("steps", lambda array: array.astype(float)),
    "too few plans": ("plans", lambda array: array[:-1]),
    "too many outputs": ("outputs", lambda array: np.append(array, np.int32(0))),
    "plans of another dtype": ("plans", lambda array: array.astype(np.int64)),
    "steps of another rank": ("steps", lambda array: array[None]),
    "a row that is not there": ("plans", entry(0, 5)),
    "pickles": ("plans", lambda array: array.astype(str)),
    **{
        f"{name} of another type": (
            "header",
            of_header(lambda h, name=name: h["shapes"].update({name: "x"})),
        )
        for name in HEADER_FIELDS
    },
    **{
        f"{name} out of range": (
            "header",
            of_header(lambda h, name=name: h["shapes"].update({name: -7})),
        )
        for name in HEADER_FIELDS
    },
}


@pytest.mark.parametrize("member, change", BROKEN.values(), ids=BROKEN)
def test_a_file_that_no_recorder_wrote_is_refused(tmp_path, member, change):
    path = tmp_path / "a.npz"
    write(path, make_flight())
    path.write_bytes(mutated(path.read_bytes(), member, change))
    with pytest.raises(ValueError, match="A flight must be a whole file") as error:
        read(path)
    assert len(str(error.value)) < 600


def test_indices_of_a_plan_lie_where_they_point(tmp_path):
    """Each field of every plan in turn is set far out."""
    layouts = [file.plan_layout(step.program, SHAPES) for step in make_flight().steps]
    indices = {"prev_positions", "num_decode", "new_row_index", "append_slots", "append_pages"}
    indices |= {"append_indices", "prefill_lens", "source_slots", "target_slots", "target_tables"}
    indices |= {"source_pages", "target_pages", "new_rows", "prefill_tokens"}
    indices |= {"next_prefill_tokens", "paths", "path_from", "path_match"}
    write(tmp_path / "a.npz", make_flight())
    content, start, refused = (tmp_path / "a.npz").read_bytes(), 0, set()
    for layout in layouts:
        for name, where in layout.slices.items():
            if where.start < where.stop:
                changed = mutated(content, "plans", entry(start + where.start, 10**6))
                (tmp_path / "b.npz").write_bytes(changed)
                try:
                    read(tmp_path / "b.npz")
                except ValueError as error:
                    refused.add(name)
                    assert "a plan" in str(error) or "a new row" in str(error)
        start += layout.size
    assert refused == indices


@pytest.mark.parametrize("leaf, value", [(0, 10**6), (1, 10**6), (1, -1)])
def test_a_copied_state_points_into_its_pools(tmp_path, leaf, value):
    """Its first two leaves are the rows and the page tables."""
    rows = np.zeros((SHAPES.max_num_seqs, row_layout(2).size), np.int32)
    tables = np.zeros((SHAPES.num_slots, SHAPES.pages_per_seq), np.int32)
    pool = np.ones((3, 2), np.float16)
    flight = dataclasses.replace(make_flight(), start="copy", state=[rows, tables, pool])
    write(tmp_path / "a.npz", flight)
    assert np.array_equal(read(tmp_path / "a.npz").state[2], pool)
    flight.state[leaf][0, 0] = value
    write(tmp_path / "a.npz", flight)
    with pytest.raises(ValueError, match=r"\((a row|the state) has \w+ outside 0 to"):
        read(tmp_path / "a.npz")


def test_only_known_members_are_unpacked(tmp_path):
    write(tmp_path / "a.npz", make_flight())
    with zipfile.ZipFile(tmp_path / "a.npz", "a") as archive:
        archive.writestr("header", b"{}")
    with pytest.raises(ValueError, match="it has the member 'header'"):
        read(tmp_path / "a.npz")


@pytest.mark.parametrize("content", [b"", b"PK\x03\x04", b"\x93NUMPY" + b"x" * 99, b"text"])
def test_what_is_no_archive_is_refused(tmp_path, content):
    (tmp_path / "a.npz").write_bytes(content)
    with pytest.raises(ValueError, match="A flight must be a whole file"):
        read(tmp_path / "a.npz")
    with pytest.raises(FileNotFoundError, match="and .* is none"):
        read(tmp_path)


def test_a_damaged_file_is_refused_or_read_whatever_bytes_are_hit(tmp_path):
    write(tmp_path / "a.npz", make_flight())
    content, rng = (tmp_path / "a.npz").read_bytes(), np.random.default_rng(0)
    refused = 0
    for _ in range(400):
        damaged = bytearray(content)
        for place in rng.integers(0, len(content), 3):
            damaged[place] = rng.integers(0, 256)
        (tmp_path / "b.npz").write_bytes(damaged)
        try:
            read(tmp_path / "b.npz")
        except ValueError as error:
            refused += "A flight must be a whole file" in str(error)
    assert refused > 300


def test_a_file_that_would_fill_the_memory_is_not_unpacked(tmp_path, monkeypatch):
    write(tmp_path / "a.npz", make_flight())
    monkeypatch.setattr(file, "_MAX_UNPACKED_BYTES", 1000)
    with pytest.raises(ValueError, match="it would unpack to"):
        read(tmp_path / "a.npz")


def with_tables(slot, **fields):
    shapes = dataclasses.replace(SHAPES, vocab_size=9)
    packed = np.zeros(plan_layout(TABLES, shapes).size, np.int32)
    plan = plan_layout(TABLES, shapes).unpack(packed)
    plan["slot"][...] = slot
    for name, value in fields.items():
        plan[name][...] = value
    step = Step(TABLES, packed, np.zeros((0, 0, output_layout(2).size), np.int32))
    return dataclasses.replace(make_flight(), shapes=shapes, steps=[step], hashed=False)


def test_tables_are_read_and_their_ids_are_bounded(tmp_path):
    path, flight = tmp_path / "a.npz", with_tables(5, bad_words=3, bias_ids=-1)
    write(path, flight)
    (step,) = read(path).steps
    assert step.program == TABLES and np.array_equal(step.packed, flight.steps[0].packed)
    for wrong in (
        with_tables(6),
        with_tables(1, bad_words=9),
        with_tables(1, bias_ids=9),
        with_tables(1, more_stop_ids=-2),
    ):
        write(path, wrong)
        with pytest.raises(ValueError, match="A flight must be a whole file"):
            read(path)


def with_export(**fields):
    shapes = dataclasses.replace(SHAPES, num_checkpoints=3)
    kept = pack_export(StateExport(**{"row": 0, "checkpoint": 1} | fields))
    step = Step(EXPORT, kept.packed, np.zeros((0, 0, output_layout(2).size), np.int32))
    restored = pack_plan(RESTORE, shapes, {"source_slots": [3], "target_slots": [1]})
    steps = [step, Step(RESTORE, restored, step.output)]
    return dataclasses.replace(make_flight(), shapes=shapes, steps=steps, hashed=False)


def test_what_was_kept_is_read_and_its_places_are_bounded(tmp_path):
    path, flight = tmp_path / "a.npz", with_export()
    write(path, flight)
    found = read(path)
    assert [step.program for step in found.steps] == [EXPORT, RESTORE]
    assert found.shapes.num_checkpoints == 3
    for wrong in ({"row": 99}, {"checkpoint": 4}, {"source_page": 10**6}, {"target_page": -1}):
        write(path, with_export(**wrong))
        with pytest.raises(ValueError, match="A flight must be a whole file"):
            read(path)


def test_tokens_that_follow_from_a_grammar_or_precede_an_entry_are_not_in_a_hashed_flight():
    shapes = dataclasses.replace(with_tables(2).shapes, processor_params=1, processor_tokens=4)
    flight = dataclasses.replace(with_tables(2), shapes=shapes)
    for program, name in ((AUTOMATON, "forced"), (TABLES, "recent")):
        packed = np.zeros(plan_layout(program, shapes).size, np.int32)
        fields = plan_layout(program, shapes).unpack(packed)
        fields[name][...] = np.arange(fields[name].size) % 9
        given = dataclasses.replace(flight, steps=[Step(program, packed, None)])
        (step,) = without_ids(given).steps
        found = plan_layout(program, shapes).unpack(step.packed)[name]
        assert not np.array_equal(found, fields[name])


def test_bad_words_are_hashed_as_what_was_said_is():
    flight = with_tables(2, bad_words=np.arange(32) % 9)
    (step,) = without_ids(flight).steps
    told, kept = (
        plan_layout(TABLES, flight.shapes).unpack(s.packed) for s in (step, flight.steps[0])
    )
    assert not np.array_equal(told["bad_words"], kept["bad_words"])
    assert told["slot"] == kept["slot"] and np.array_equal(told["allowed"], kept["allowed"])
