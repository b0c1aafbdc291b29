"""Writes a step's decisions into the packed plan, and what must come before it."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxspec.config import StepShapes
from jaxspec.plan import TABLES, Fork, Program, StepPlan, pack_plan
from jaxspec.request import Request
from jaxspec.row import row_layout, write_row
from jaxspec.scheduler.host_drafter import HostDrafter, path_fields
from jaxspec.table_plan import pack_tables


def pack_step(
    program: Program,
    shapes: StepShapes,
    *,
    rows: Sequence[Request],
    num_decode: int,
    prefills: Sequence[tuple[Request, int]],
    drafter: HostDrafter,
    grown: Iterable[Request] = (),
    forks: Sequence[Fork] = (),
) -> StepPlan:
    """The plan for `rows`: `num_decode` that decode, the `prefills`, then idle ones.

    The device finds a row that it has by its index in the last plan (`Request.row`). The pages that
    `grown` were given since the device last heard of theirs (`Request.num_pages_sent`) go into the
    plan; and so do the paths that the `drafter` expects of the rows that work. The tables of rows
    that enter come in plans before it.

    Raises:
        ValueError: two rows have the same slot, or come from the same row: both would write there.
    """
    prev_positions = [request.row for request in rows]
    _refuse_repeated("slot", [request.slot for request in rows])
    _refuse_repeated("row of the last plan", [row for row in prev_positions if row >= 0])
    new_rows = [row for row, before in enumerate(prev_positions) if before < 0]
    layout = row_layout(shapes.num_drafts)
    entries = np.zeros((len(new_rows), layout.size), np.int32)
    for entry, row in zip(entries, new_rows, strict=True):
        write_row(entry, rows[row], layout)
    chunks = [r.tokens[r.num_computed : r.num_computed + n] for r, n in prefills]
    packed = pack_plan(
        program,
        shapes,
        {
            "prev_positions": prev_positions,
            "num_decode": num_decode,
            "new_row_index": new_rows,
            "new_rows": entries,
            "prefill_tokens": np.array([t for chunk in chunks for t in chunk], np.int32),
            "prefill_lens": [n for _, n in prefills],
            "next_prefill_tokens": [_token_after(r, r.num_computed + n) for r, n in prefills],
            **_unsent_pages(grown),
            **_moves(forks, shapes.pages_per_seq),
            **path_fields(drafter, rows[: num_decode + len(prefills)], shapes, program),
        },
    )
    entering = [rows[row] for row in new_rows if rows[row].has_tables]
    tables = [StepPlan(TABLES, pack_tables(each, shapes.vocab_size)) for each in entering]
    return StepPlan(program, packed, tuple(tables))


def _refuse_repeated(name: str, values: Sequence[int]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(
            f"Each row of a plan must have its own {name}, but these were planned: {list(values)}. "
            "This is a bug in jaxspec."
        )


def _token_after(request: Request, end: int) -> int:
    """The prompt token after a chunk, which the draft head reads; -1: the step makes it."""
    return request.tokens[end] if end < request.prefill_len else -1


def _unsent_pages(grown: Iterable[Request]) -> dict[str, list[int]]:
    """The pages that the device does not know of."""
    slots, indices, pages = [], [], []
    for request in grown:
        for index in range(request.num_pages_sent, len(request.pages)):
            slots.append(request.slot)
            indices.append(index)
            pages.append(request.pages[index])
    return {"append_slots": slots, "append_indices": indices, "append_pages": pages}


def _moves(forks: Sequence[Fork], pages_per_seq: int) -> dict[str, Any]:
    tables = np.zeros((len(forks), pages_per_seq), np.int32)
    for table, fork in zip(tables, forks, strict=True):
        table[: len(fork.target_table)] = fork.target_table
    return {
        "source_slots": [fork.source_slot for fork in forks],
        "target_slots": [fork.target_slot for fork in forks],
        "source_pages": [fork.source_page for fork in forks],
        "target_pages": [fork.target_page for fork in forks],
        "target_tables": tables,
    }
