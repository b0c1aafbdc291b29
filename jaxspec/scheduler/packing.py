"""Writes a step's decisions into the packed plan."""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxspec.config import Buckets
from jaxspec.plan import MAX_STOP_IDS, Fork, Program, batch_row_layout, pack_plan
from jaxspec.request import Request


def pack_step(
    program: Program,
    buckets: Buckets,
    *,
    rows: Sequence[Request],
    num_decode: int,
    prefills: Sequence[tuple[Request, int]],
    grown: Iterable[Request] = (),
    forks: Sequence[Fork] = (),
) -> np.ndarray:
    """The packed plan for `rows`: `num_decode` that decode, the `prefills`, then idle ones.

    Rows the device has are found by where the last plan put them (`Request.row`). `grown` were
    given pages since the device last heard of theirs (`Request.num_pages_sent`).

    Raises:
        ValueError: two rows have the same slot, or come from the same row: both would write there.
    """
    prev_positions = [request.row for request in rows]
    _refuse_repeated("slot", [request.slot for request in rows])
    _refuse_repeated("row of the last plan", [row for row in prev_positions if row >= 0])
    new_rows = [row for row, before in enumerate(prev_positions) if before < 0]
    entries = np.zeros((len(new_rows), batch_row_layout(buckets.num_drafts).size), np.int32)
    for entry, row in zip(entries, new_rows, strict=True):
        _write_row(entry, rows[row], buckets)
    chunks = [r.tokens[r.num_computed : r.num_computed + n] for r, n in prefills]
    return pack_plan(
        program,
        buckets,
        {
            "prev_positions": prev_positions,
            "num_decode": num_decode,
            "new_row_index": new_rows,
            "new_rows": entries,
            "prefill_tokens": np.array([t for chunk in chunks for t in chunk], np.int32),
            "prefill_lens": [n for _, n in prefills],
            "lookahead_tokens": [_token_after(r, r.num_computed + n) for r, n in prefills],
            **_appends(grown),
            **_moves(forks, buckets.pages_per_seq),
        },
    )


def _refuse_repeated(what: str, places: Sequence[int]) -> None:
    if len(set(places)) < len(places):
        raise ValueError(
            f"Each row of a plan must have its own {what}, but these were planned: {list(places)}. "
            "This is a bug in jaxspec."
        )


def _token_after(request: Request, end: int) -> int:
    """The prompt token after a chunk, which the draft head reads; -1 when the step makes it."""
    return request.tokens[end] if end < request.prefill_len else -1


def _appends(grown: Iterable[Request]) -> dict[str, list[int]]:
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


def _write_row(entry: np.ndarray, request: Request, buckets: Buckets) -> None:
    """Everything the device knows of a request when it enters; drafts and states start empty."""
    fields = batch_row_layout(buckets.num_drafts).unpack(entry)
    params, prompt_len = request.params, len(request.prompt)
    values = {
        "slot": request.slot,
        "prefill_len": request.prefill_len,
        "min_len": prompt_len + params.min_tokens,
        "max_len": request.max_len,
        "num_computed": request.num_computed,
        "last_token": request.tokens[request.prefill_len - 1],
        "seed": np.uint32(request.seed).astype(np.int32),
        "temperature": np.float32(params.temperature).view(np.int32),
        "top_p": np.float32(params.top_p).view(np.int32),
        "top_k": min(params.top_k, np.iinfo(np.int32).max),
        "proposer_key": request.proposer_key,
    }
    for name, value in values.items():
        fields[name][...] = value
    fields["drafts"][...] = -1
    stop_ids = np.full(MAX_STOP_IDS, -1, np.int32)
    stop_ids[: len(request.stop_ids)] = request.stop_ids
    fields["stop_ids"][...] = stop_ids
