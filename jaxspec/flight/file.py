"""Flight files: plans and outputs of every step, concatenated and compressed.

The file is a NumPy archive (`.npz`) without pickles: a header in JSON, the plans, the outputs, and
the leaves of the device's state if the flight starts from a copy. Files are untrusted: `read`
checks sizes, programs and indices before they reach a device.
"""

import dataclasses
import json
import math
import os
import re
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers the 16-bit and 8-bit floats with NumPy, by name
import numpy as np

from jaxspec.checks import shown
from jaxspec.flight import Flight, Step
from jaxspec.flight.blocks import bounds_of_copy
from jaxspec.grammar.automaton import MAX_CLASSES
from jaxspec.plan.automaton_plan import NUM_AUTOMATA, NUM_MASKS, NUM_STATES
from jaxspec.plan.plan import (
    AfterForwardPass,
    AnyProgram,
    CopyBlock,
    ExportState,
    ForwardPass,
    MoveRows,
    Program,
    WriteAutomaton,
    WriteMasks,
    WriteProcessorArgs,
    WriteTables,
    entry_of,
    output_layout,
    plan_layout,
    program_of,
)
from jaxspec.plan.row import row_layout
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.sampling.processors import PROCESSORS

FORMAT = 7  # file format; `read` refuses others
MAX_BYTES = 2**36  # limit for an unpacked file; a copy of the state is most of it
_MAX_HEADER_BYTES = 2**20
_MAX_UNPACKED_BYTES = 2**30  # limit for compressed members: plans and outputs, which are small
_IDS_OF_TABLES = "bias_ids", "bad_words", "more_stop_ids", "recent"
_MEMBER = re.compile(r"(header|steps|has_output|plans|outputs|leaf_\d{1,4})\.npy")


def write(path: Path, flight: Flight) -> None:
    """Write `flight` atomically; only the user can read the file.

    Raises:
        OSError: it can't be written.
    """
    programs = list(dict.fromkeys(step.program for step in flight.steps))
    outputs = [step.output for step in flight.steps if step.output is not None]
    header = {
        "format": FORMAT,
        **{name: getattr(flight, name) for name in ("about", "start", "failure", "hashed")},
        "shapes": dataclasses.asdict(flight.shapes),
        "programs": [entry_of(program) for program in programs],
        "leaves": [[leaf.dtype.name, leaf.shape] for leaf in flight.state or ()],
    }
    arrays = {
        "header": np.frombuffer(json.dumps(header).encode(), np.uint8),
        "steps": np.array([programs.index(step.program) for step in flight.steps], np.int32),
        "has_output": np.array([step.output is not None for step in flight.steps], bool),
        "plans": _end_to_end([step.packed for step in flight.steps]),
        "outputs": _end_to_end(outputs),
    }
    for index, leaf in enumerate(flight.state or ()):
        arrays[f"leaf_{index}"] = np.frombuffer(leaf.tobytes(), np.uint8)
    # A state is hardly compressible, and compressing gigabytes takes minutes.
    save = np.savez_compressed if flight.state is None else np.savez
    handle, name = tempfile.mkstemp(prefix=f"{path.name}.", dir=path.parent)  # mode 0600
    new = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            save(file, allow_pickle=False, **arrays)
        new.replace(path)
    finally:
        new.unlink(missing_ok=True)


def read(path: Path) -> Flight:
    """Read the flight in a file.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is incomplete, has another format, or holds an impossible plan.
    """
    if not path.is_file():
        raise FileNotFoundError(
            f"A flight must be a file that a flight recorder wrote, and {path} is none."
        )
    if not os.access(path, os.R_OK):
        raise ValueError(f"A flight must be a file that can be read. Check the rights of {path}.")
    try:
        arrays = _arrays(path)
        header = json.loads(arrays["header"].tobytes())
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']}, and this version reads {FORMAT}")
        return _flight(header, arrays)
    except Exception as error:  # a damaged archive can raise anything
        why = f"no {error}" if isinstance(error, KeyError) else str(error) or type(error).__name__
        raise ValueError(
            f"A flight must be a whole file as a flight recorder wrote it, and {path} is not "
            f"({why:.200}). Copy it again, or read it with the version that wrote it."
        ) from error


def _end_to_end(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int32), *(array.ravel() for array in arrays)])


def _arrays(path: Path) -> dict[str, np.ndarray]:
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    sizes = {entry.filename: entry.file_size for entry in entries}
    packed = sum(e.file_size for e in entries if e.compress_type != zipfile.ZIP_STORED)
    if wrong := [name for name in sizes if not _MEMBER.fullmatch(name)]:
        raise ValueError(f"it has the member {shown(wrong[0])}")
    if (
        sizes.get("header.npy", 0) > _MAX_HEADER_BYTES
        or packed > _MAX_UNPACKED_BYTES
        or sum(sizes.values()) > MAX_BYTES
    ):
        raise ValueError(f"it would unpack to {sum(sizes.values()):,} bytes")
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def _flight(header: dict[str, Any], arrays: dict[str, np.ndarray]) -> Flight:
    about = _about(header["about"])
    sizes = {**header["shapes"]}
    for name in ("decode_rows", "prefill_tokens", "draft_buckets"):
        sizes[name] = tuple(sizes[name])
    shapes = StepShapes(**sizes)
    programs = [_program(entry, shapes) for entry in header["programs"]]
    plans = _split(
        arrays["plans"], [plan_layout(p, shapes).size for p in programs], arrays["steps"]
    )
    row_size = output_layout(shapes.num_drafts).size
    output_sizes = [math.prod(_output_shape(p, shapes)) * row_size for p in programs]
    told = arrays["has_output"].astype(bool)
    outputs = iter(_split(arrays["outputs"], output_sizes, arrays["steps"][told]))
    steps = []
    for index, packed, has_output in zip(arrays["steps"], plans, told, strict=True):
        program = programs[index]
        _check_plan(program, packed, shapes, about["vocab_size"])
        shape = *_output_shape(program, shapes), row_size
        output = next(outputs).reshape(shape) if has_output else None
        steps.append(Step(program, packed, output))
    state = None
    if header["start"] == "copy":
        state = [
            np.frombuffer(arrays[f"leaf_{index}"].tobytes(), np.dtype(dtype)).reshape(shape)
            for index, (dtype, shape) in enumerate(header["leaves"])
        ]
        _check_state(state, shapes, about["vocab_size"])
    elif header["start"] not in ("empty", "idle"):
        raise ValueError(f"it starts from {header['start']!r:.40}")
    return Flight(
        about=about,
        shapes=shapes,
        start=header["start"],
        steps=steps,
        state=state,
        failure=None if header["failure"] is None else str(header["failure"]),
        hashed=bool(header["hashed"]),
    )


def _about(entries: dict[str, Any]) -> dict[str, Any]:
    kinds = {"options": dict, "vocab_size": int, "checkpoint": str, "device": str, "versions": dict}
    wrong = [name for name, kind in kinds.items() if not isinstance(entries[name], kind)]
    model = entries["options"].get("model", 0)
    if (
        wrong
        or not (model is None or isinstance(model, str))
        or not isinstance(entries["versions"].get("jax"), str)
        or not 0 < entries["vocab_size"] < 2**31
    ):
        raise ValueError(f"it says nothing sensible of its engine ({wrong or 'options'})")
    return entries


def _program(entry: dict[str, Any], shapes: StepShapes) -> AnyProgram:
    program = program_of(entry)
    if isinstance(program, ForwardPass):
        _check_program(program.rest, shapes)
    elif isinstance(program, Program):
        _check_program(program, shapes)
    return program


def _check_program(program: Program, shapes: StepShapes) -> None:
    if not set(program.features.processors) <= PROCESSORS.keys():
        raise ValueError(f"it has the program {program}")
    if program.shape not in shapes.compiled() or program.num_steps not in shapes.num_steps(
        program.prefill_tokens
    ):
        raise ValueError(f"its shapes have no program of {program.shape}")
    is_half = isinstance(program, AfterForwardPass)
    if is_half and program != ForwardPass(program.decode_rows, program.num_drafts).rest:
        raise ValueError(f"it has the program {program}")


def _output_shape(program: AnyProgram, shapes: StepShapes) -> tuple[int, int]:
    if not isinstance(program, Program):
        return 0, 0
    rows = program.decode_rows + shapes.prefill_seqs(program.prefill_tokens)
    return program.num_steps, rows


def _split(flat: np.ndarray, sizes: list[int], which: np.ndarray) -> list[np.ndarray]:
    """Split `flat` into arrays, the i-th of which has `sizes[which[i]]` entries."""
    if which.ndim != 1 or flat.ndim != 1 or flat.dtype != np.int32:
        raise ValueError("an array has another rank or dtype")
    if len(which) and not 0 <= which.min() <= which.max() < len(sizes):
        raise ValueError("a step has no program")
    ends = np.cumsum(np.array(sizes, np.int64)[which]) if len(which) else np.zeros(0, np.int64)
    if len(flat) != (ends[-1] if len(ends) else 0):
        raise ValueError(f"it has {len(flat)} numbers where {ends[-1:]} are due")
    return np.split(flat, ends[:-1]) if len(which) else []


def _check_plan(
    program: AnyProgram, packed: np.ndarray, shapes: StepShapes, vocab_size: int
) -> None:
    """Raise ValueError if an index of the plan is out of range."""
    fields = plan_layout(program, shapes).unpack(packed)
    if isinstance(program, WriteTables):
        bounds = dict.fromkeys(_IDS_OF_TABLES, (-1, vocab_size - 1))
        _check_bounds("tables", fields, bounds | {"slot": (0, shapes.num_slots - 1)})
        return
    if isinstance(program, WriteMasks):
        _check_bounds("masks", fields, {"slots": (0, shapes.num_slots - 1)})
        return
    if isinstance(program, WriteProcessorArgs):
        if not shapes.processor_tokens:
            raise ValueError("a plan has arguments of processors, and the engine has no processors")
        _check_bounds("arguments of processors", fields, {"slot": (0, shapes.num_slots - 1)})
        return
    if isinstance(program, WriteAutomaton):
        _check_bounds("an automaton", fields, {"automaton": (0, NUM_AUTOMATA - 1)})
        states, masks = (0, NUM_STATES - 1), (0, NUM_MASKS - 1)
        bounds = {"states": states, "state_masks": masks, "limited": states, "masks": masks}
        bounds["forced"] = (-1, vocab_size - 1)
        _check_bounds("an automaton", fields, bounds)
        halves = {name: fields[name].view(np.int16) for name in ("classes", "next")}
        bounds = {"classes": (0, MAX_CLASSES - 1), "next": (-1, NUM_STATES - 1)}
        _check_bounds("an automaton", halves, bounds)
        return
    if isinstance(program, ExportState | CopyBlock):
        _check_bounds("a plan that copies a prefix", fields, bounds_of_copy(program, shapes))
        return
    _check_rows(
        program.rest if isinstance(program, ForwardPass) else program, fields, shapes, vocab_size
    )


def _check_rows(
    program: Program | MoveRows, fields: dict[str, np.ndarray], shapes: StepShapes, vocab_size: int
) -> None:
    last_row, last_slot = shapes.max_num_seqs - 1, shapes.num_slots - 1
    last_page = shapes.num_pages - 1
    is_step = isinstance(program, Program)
    num_decode, num_prompt_tokens = program.shape[:2] if is_step else (0, 0)
    num_sources = last_slot if is_step or not program.restores else shapes.num_checkpoints
    bounds = {
        "prev_positions": (-1, last_row),
        "new_row_index": (-1, last_row),
        "num_decode": (0, num_decode),
        "append_indices": (0, shapes.pages_per_seq - 1),
        "prefill_lens": (0, num_prompt_tokens),
        **dict.fromkeys(("append_slots", "target_slots"), (0, last_slot)),
        "source_slots": (0, num_sources),
        **dict.fromkeys(("append_pages", "source_pages", "target_pages"), (0, last_page)),
        "target_tables": (0, last_page),
        "prefill_tokens": (0, vocab_size - 1),
        "next_prefill_tokens": (-1, vocab_size - 1),
        "paths": (-1, vocab_size - 1),
        **dict.fromkeys(("path_from", "path_match"), (0, shapes.max_model_len)),
    }
    _check_bounds("a plan", fields, {name: bounds[name] for name in bounds.keys() & fields.keys()})
    if fields["prefill_lens"].sum() > num_prompt_tokens:
        raise ValueError("the chunks of a plan are longer than its program")
    if fields["num_decode"] + np.count_nonzero(fields["prefill_lens"]) > shapes.max_num_seqs:
        raise ValueError("a plan has more rows than its engine")
    none = dict.fromkeys(("ring_length", "num_drafts"), (0, 0)) | {"drafts": (-1, 0)}
    rows = row_layout(shapes.num_drafts).unpack(fields["new_rows"])
    _check_bounds("a new row", rows, _row_bounds(shapes, vocab_size) | none)
    if np.any((rows["slot"] > 0) & (rows["num_computed"] >= rows["max_len"])):
        raise ValueError("a new row is over before it begins")


def _check_state(leaves: list[np.ndarray], shapes: StepShapes, vocab_size: int) -> None:
    """Raise ValueError if rows or page tables, the first leaves, have an index out of range."""
    rows, tables = leaves[:2]
    layout = row_layout(shapes.num_drafts)
    if rows.dtype != np.int32 or rows.shape != (shapes.max_num_seqs, layout.size):
        raise ValueError("its state has no such rows as its engine")
    _check_bounds("a row", layout.unpack(rows), _row_bounds(shapes, vocab_size))
    _check_bounds("the state", {"page_tables": tables}, {"page_tables": (0, shapes.num_pages - 1)})


def _row_bounds(shapes: StepShapes, vocab_size: int) -> dict[str, tuple[int, int]]:
    lengths = (
        "prefill_len",
        "max_len",
        "num_computed",
        "min_len",
        "ring_length",
        "prompt_len",
    )
    return {
        **dict.fromkeys(("slot", "table_slot"), (0, shapes.num_slots - 1)),
        "state_offset": (0, shapes.num_drafts),
        "max_drafts": (0, 2**31 - 1),
        "num_drafts": (0, shapes.num_drafts),
        **dict.fromkeys(lengths, (0, shapes.max_model_len)),
        "last_token": (0, vocab_size - 1),
        "drafts": (-1, vocab_size - 1),
        "proposer_key": (0, 2**31 - 1),
        "grammar_state": (0, 2**31 - 1),
    }


def _check_bounds(
    what: str, fields: Mapping[str, np.ndarray], bounds: Mapping[str, tuple[int, int]]
) -> None:
    for name, (low, high) in bounds.items():
        if np.any((fields[name] < low) | (fields[name] > high)):
            raise ValueError(f"{what} has {name} outside {low} to {high}")
