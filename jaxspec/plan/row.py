"""The fields of a batch row: the complete state of a running request between steps.

This table defines the layout of a packed row, the values that the host writes when a request enters
the batch, and the columns of `runner.batch_state.BatchState`. Imports no JAX.

A new sampling parameter takes three parts: its definition in `sampling_params.SamplingParams` (the
field, its check, and in `features` the requests that need its processor), its line in
`SAMPLING_FIELDS`, and its processor in `sampling/processors.py`. No other module of the engine
names it; `tests/sampling/test_new_parameter.py` adds one in this way.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import numpy as np

from jaxspec.layout import Field, PackedLayout
from jaxspec.requests.request import INT32_MAX, ROW_STOP_IDS, Request
from jaxspec.requests.sampling_params import PROCESSED


@dataclasses.dataclass(frozen=True)
class RowField(Field):
    """A column of the batch state."""

    # Value when a request enters the batch; a constant if only the device changes the field. A
    # sequence shorter than the field is padded with -1.
    value: Callable[[Request], Any] | int


def _seed_bits(request: Request) -> np.int32:
    return np.uint32(request.seed).view(np.int32)


def _stop_ids(request: Request) -> tuple[int, ...]:
    return request.stop_ids[:ROW_STOP_IDS]


def _table_slot(request: Request) -> int:
    return request.slot if request.has_tables else 0


def _real(name: str, meaning: str) -> RowField:
    return RowField(name, meaning, lambda r: getattr(r.params, name), dtype=np.float32)


def _min_len(request: Request) -> int:
    # Capped at `max_len`, where the request ends anyway.
    return min(len(request.prompt) + request.params.min_tokens, request.max_len)


# Read by `jaxspec.sampling`; greedy rows ignore temperature, top_k and top_p.
SAMPLING_FIELDS = (
    RowField("seed", "Noise depends on it and on the position.", _seed_bits),
    RowField("temperature", "0 means greedy.", lambda r: r.params.temperature, dtype=np.float32),
    RowField("top_k", "Ids kept; below 1 means all.", lambda r: min(r.params.top_k, INT32_MAX)),
    RowField("top_p", "Probability mass kept.", lambda r: r.params.top_p, dtype=np.float32),
    RowField("stop_ids", "Ids that end the request, then -1.", _stop_ids, shape=(ROW_STOP_IDS,)),
    RowField("min_len", "Length, with the prompt, before which no stop id may end it.", _min_len),
    RowField("prompt_len", "Number of prompt tokens.", lambda r: len(r.prompt)),
    RowField("table_slot", "Slot of its sampling tables; 0 means none.", _table_slot),
    RowField(
        "grammar_state",
        "State of its automaton, 0 without, and its count (`automaton_plan`).",
        lambda r: r.grammar_state,
    ),
    RowField(
        "num_reported",
        "1 + the number of likeliest ids whose logprobs are reported; 0 for no logprobs.",
        lambda r: 0 if r.params.logprobs is None else 1 + r.params.logprobs,
    ),
    RowField(
        "reports_processed",
        "1 if its logprobs are those of processed logits, else 0.",
        lambda r: r.params.logprobs_mode == PROCESSED,
    ),
    _real("min_p", "Least probability kept, as a fraction of the largest."),
    _real("presence_penalty", "Subtracted from logits of ids in the output."),
    _real("frequency_penalty", "Subtracted per occurrence of the id in the output."),
    _real("repetition_penalty", "Divides logits above 0 of ids in prompt or output."),
)

FIELDS = (
    RowField("slot", "Index into every pool; 0 means an empty row.", lambda r: r.slot),
    RowField("prefill_len", "Number of tokens at its entry.", lambda r: r.prefill_len),
    RowField("max_len", "Length, with the prompt, at which it ends.", lambda r: r.max_len),
    RowField("num_computed", "Tokens that the pools hold.", lambda r: r.num_computed),
    RowField("last_token", "The first token not computed.", lambda r: r.tokens[r.prefill_len - 1]),
    RowField("state_offset", "Drafts accepted last; index of the valid candidate state.", 0),
    RowField("ring_length", "Tokens in the ring after the base state.", 0),
    RowField("finish", "A `Finish`; once set, the row emits no more tokens.", 0),
    *SAMPLING_FIELDS,
    RowField("proposer_key", "Index in the proposer's tables.", lambda r: r.proposer_key),
    RowField("max_drafts", "Most drafts per verify step.", lambda r: r.max_drafts),
    RowField("num_drafts", "Number of proposed drafts.", 0),
    RowField("drafts", "Drafts to verify next, then -1.", -1, shape=("drafts",)),
)


@functools.cache
def row_layout(num_drafts: int) -> PackedLayout:
    """Return the layout of a packed row; the rows of a batch state are `[rows, size]`."""
    return PackedLayout(FIELDS, num_drafts)


def write_row(entry: np.ndarray, request: Request, layout: PackedLayout) -> None:
    """Write the fields of a request that enters the batch into `entry` (int32 `[size]`).

    Raises:
        ValueError: a sequence is longer than its field.
    """
    for field in FIELDS:
        column = layout.read(entry, field.name)
        value = field.value(request) if callable(field.value) else field.value
        if isinstance(value, tuple | list):
            if len(value) > len(column):
                raise ValueError(
                    f"A row has room for {len(column)} {field.name}, got {len(value)}. Give fewer."
                )
            column[...] = -1
            column[: len(value)] = value
        else:
            column[...] = value
