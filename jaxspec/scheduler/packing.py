"""Packs the decisions for a step into plans, and copies its logprobs to the requests."""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from jaxspec.plan.mask_plan import pack_masks
from jaxspec.plan.plan import (
    AUTOMATON,
    MASKS,
    PROCESSOR_ARGS,
    RESTORE,
    TABLES,
    ForwardPass,
    PlacesRows,
    SlotCopy,
    StateExport,
    StepOutput,
    StepPlan,
    pack_copy,
    pack_export,
    pack_plan,
    plan_layout,
)
from jaxspec.plan.processor_plan import pack_processor_args
from jaxspec.plan.row import row_layout, write_row
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.plan.table_plan import pack_tables
from jaxspec.prefix.cache import PrefixCache
from jaxspec.requests.request import Request
from jaxspec.scheduler.automaton_pool import AutomatonPool
from jaxspec.scheduler.host_drafter import HostDrafter, path_fields
from jaxspec.scheduler.scheduled_step import ScheduledStep, StepBuilder


def pack_step(
    program: PlacesRows,
    shapes: StepShapes,
    *,
    rows: Sequence[Request],
    num_decode: int,
    prefills: Sequence[tuple[Request, int]],
    drafter: HostDrafter | None,
    automata: AutomatonPool,
    grown: Iterable[Request] = (),
    copies: Sequence[SlotCopy] = (),
) -> StepPlan:
    """Return the plan for `rows`: `num_decode` rows that decode, the `prefills`, then idle rows.

    The device finds an existing row by its index in the last plan (`Request.row`). The plan has the
    pages of `grown` that the device's page table lacks (`PageTable.unsent`), and the paths of the
    `drafter` for the active rows. Plans before it write the sampling tables and automata of rows
    that enter, and the masks of rows that produce a token and are masked by the host. Those of a
    `ForwardPass` are in the plan of its second half.

    Raises:
        ValueError: two rows have the same slot or the same row in the last plan, so both would
            write to it.
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
            **_moves(copies, shapes.pages_per_seq),
            **path_fields(drafter, rows[: num_decode + len(prefills)], shapes, program),
        },
    )
    entering = [rows[row] for row in new_rows if rows[row].has_tables]
    sizes = shapes.vocab_size, shapes.recent_tokens
    tables = [StepPlan(TABLES, pack_tables(each, *sizes)) for each in entering]
    if shapes.processor_tokens:
        written = (pack_processor_args(each, shapes) for each in entering)
        tables += [StepPlan(PROCESSOR_ARGS, packed) for packed in written]
    tables += [StepPlan(AUTOMATON, packed) for packed in automata.take_unwritten(entering)]
    ending = (request for request, n in prefills if request.num_computed + n == request.prefill_len)
    if isinstance(program, ForwardPass):
        return StepPlan(program, packed, tuple(tables))
    masked = [each for each in (*rows[:num_decode], *ending) if each.is_masked_by_host]
    return StepPlan(program, packed, (*tables, *_mask_plans(masked, shapes)))


def _mask_plans(requests: Sequence[Request], shapes: StepShapes) -> list[StepPlan]:
    return [StepPlan(MASKS, packed) for packed in pack_masks(requests, shapes)]


def _refuse_repeated(name: str, values: Sequence[int]) -> None:
    if len(set(values)) < len(values):
        raise ValueError(
            f"Each row of a plan must have its own {name}, but these were planned: {list(values)}. "
            "This is a bug in jaxspec."
        )


def _token_after(request: Request, end: int) -> int:
    """Return the prompt token after a chunk for the draft head; -1 at the end of the prompt."""
    return request.tokens[end] if end < request.prefill_len else -1


def _unsent_pages(grown: Iterable[Request]) -> dict[str, list[int]]:
    """Return the fields for pages that the device's page table lacks."""
    slots, indices, pages = [], [], []
    for request in grown:
        for index, page in request.pages.unsent():
            slots.append(request.slot)
            indices.append(index)
            pages.append(page)
    return {"append_slots": slots, "append_indices": indices, "append_pages": pages}


def _moves(copies: Sequence[SlotCopy], pages_per_seq: int) -> dict[str, Any]:
    tables = np.zeros((len(copies), pages_per_seq), np.int32)
    for table, copy in zip(tables, copies, strict=True):
        table[: len(copy.target_table)] = copy.target_table
    return {
        "source_slots": [copy.source_slot for copy in copies],
        "target_slots": [copy.target_slot for copy in copies],
        "source_pages": [copy.source_page for copy in copies],
        "target_pages": [copy.target_page for copy in copies],
        "target_tables": tables,
    }


def record_logprobs(step: ScheduledStep, output: StepOutput) -> None:
    """Copy the logprobs in `output` to their requests; called before the tokens are recorded.

    A program reports logprobs for all rows if one requests them, so only the rows that requested
    them get them. Prompt logprobs are stored by prompt index: a request that is prefilled again
    after a preemption overwrites the same entries.
    """
    if output.logprobs is not None:
        _record_output(step, output)
    if output.prompt_logprobs is not None:
        (reported,), start = output.prompt_logprobs, 0
        for entry in step.prefills:
            request, chunk = entry.request, entry.chunk
            rows = reported[start : start + len(chunk)]
            start += len(chunk)
            if request.params.prompt_logprobs is not None and entry.is_current:
                end = min(chunk.stop + 1, len(request.prompt))  # exclude output tokens
                count = max(end - chunk.start - 1, 0)
                # Copied, because the runtime owns the array.
                request.prompt_logprobs[chunk.start + 1 : end] = rows[:count].copy()


def _record_output(step: ScheduledStep, output: StepOutput) -> None:
    """Copy the rows of all emitted tokens at once: the runtime owns the array."""
    assert output.logprobs is not None
    asked = [
        (row, entry.request)
        for row, entry in step.rows
        if entry.request.params.logprobs is not None and entry.is_awaited
    ]
    if not asked:
        return
    rows = np.array([row for row, _ in asked])
    is_emitted = output.tokens[:, rows].swapaxes(0, 1) >= 0
    index, steps, places = np.nonzero(is_emitted)
    fields = list(output.logprobs[steps, rows[index], places])
    ends = np.cumsum(is_emitted.sum(axis=(1, 2))).tolist()
    for (_, request), start, end in zip(asked, [0, *ends], ends, strict=False):
        request.logprobs += fields[start:end]


class PlanPacker:
    """Packs plans of the running requests and records the rows and pages sent to the device."""

    def __init__(
        self,
        shapes: StepShapes,
        drafter: HostDrafter | None,
        prefixes: PrefixCache,
        automata: AutomatonPool,
    ):
        self._shapes, self._drafter = shapes, drafter
        self._prefixes, self._automata = prefixes, automata

    def pack(
        self,
        program: PlacesRows,
        step: StepBuilder,
        running: Sequence[Request],
        copies: Sequence[SlotCopy] = (),
    ) -> StepPlan:
        """Pack a plan of all running requests, and record their rows and pages as sent.

        The copies of the prefix cache come before it, in their order. The first copy that restores
        a cached prefix already places the rows of all requests that enter.
        """
        return _joined([*self._copies(running), self._pack(program, step, running, copies)])

    def pack_rest(self, step: ScheduledStep) -> StepPlan:
        """Return the plan of the second half of a step, whose rows await no earlier result.

        Its masks and paths follow from all tokens of the rows.
        """
        first = step.plan
        assert isinstance(first.program, ForwardPass)
        rows = {row: e.request for row, e in enumerate(step.decodes) if e.is_awaited}
        masked = [request for request in rows.values() if request.is_masked_by_host]
        masks = tuple(_mask_plans(masked, self._shapes))
        program, packed = first.program.rest, first.packed
        if paths := path_fields(self._drafter, [*rows.values()], self._shapes, program):
            packed = packed.copy()
            fields = plan_layout(program, self._shapes).unpack(packed)
            for name, values in paths.items():
                fields[name][[*rows]] = values
        return StepPlan(program, packed, masks)

    def pack_copies(self, running: Sequence[Request]) -> StepPlan:
        """Return a plan of the pending copies, at least one, that computes nothing."""
        return _joined(self._copies(running))

    def _copies(self, running: Sequence[Request]) -> list[StepPlan]:
        plans = list[StepPlan]()
        for copy in self._prefixes.store.take_copies():
            if isinstance(copy, SlotCopy):
                plans.append(self._pack(RESTORE, StepBuilder(0, 0), running, [copy]))
            elif isinstance(copy, StateExport):
                plans.append(pack_export(copy))
            else:
                plans.append(pack_copy(copy, self._shapes))
        return plans

    def _pack(
        self,
        program: PlacesRows,
        step: StepBuilder,
        running: Sequence[Request],
        copies: Sequence[SlotCopy],
    ) -> StepPlan:
        rows = step.decodes + [request for request, _ in step.prefills]
        if len(rows) < len(running):
            active = set(rows)
            rows += [request for request in running if request not in active]
        plan = pack_step(
            program,
            self._shapes,
            rows=rows,
            num_decode=len(step.decodes),
            prefills=step.prefills,
            grown=step.grown,
            copies=copies,
            drafter=self._drafter,
            automata=self._automata,
        )
        for row, request in enumerate(rows):
            request.row = row
        for request in step.grown:
            request.pages.mark_sent()
        return plan


def _joined(plans: Sequence[StepPlan]) -> StepPlan:
    """Return the last plan, with all others before it."""
    *others, last = (each for plan in plans for each in (*plan.before, plan))
    return dataclasses.replace(
        last, before=tuple(dataclasses.replace(each, before=()) for each in others)
    )
