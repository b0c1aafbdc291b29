"""Steps in the scheduler: gathered (`StepBuilder`), dispatched, and collected (`Progress`)."""

import dataclasses
from typing import NamedTuple

from jaxspec.plan.plan import Program, RowOutput, StepPlan
from jaxspec.requests.request import Request


@dataclasses.dataclass
class StepBuilder:
    """Contents of the step that `Scheduler.schedule` is gathering."""

    budget: int  # prompt tokens that may still be added
    num_steps: int  # decode steps of the dispatch
    decodes: list[Request] = dataclasses.field(default_factory=list)
    # Rows that could decode, but whose masks of the host depend on results in flight.
    awaiting: list[Request] = dataclasses.field(default_factory=list)
    prefills: list[tuple[Request, int]] = dataclasses.field(default_factory=list)
    num_new: int = 0  # requests that enter the batch

    @property
    def has_work(self) -> bool:
        """True if the step computes any token."""
        return bool(self.decodes or self.prefills)

    @property
    def grown(self) -> list[Request]:
        """Requests of the step with pages that the device's page table lacks."""
        rows = (*self.decodes, *(request for request, _ in self.prefills))
        return [request for request in rows if request.pages.is_unsent]


class Entry(NamedTuple):
    """Part of a request in one dispatched step."""

    request: Request
    generation: int
    bound: int  # most tokens the dispatch can emit; 0 for a chunk before the end of its prompt
    chunk: range = range(0)  # indices in the request of the tokens that are prefilled

    @staticmethod
    def in_flight(request: Request, num_steps: int, bound: int, num_read: int = 0) -> "Entry":
        """Count the steps and tokens of a request as in flight, and return its entry.

        `num_read`: tokens of its chunk, which `num_computed` already includes.
        """
        request.in_flight += num_steps
        request.in_flight_bound += bound
        chunk = range(request.num_computed - num_read, request.num_computed)
        return Entry(request, request.generation, bound, chunk)

    @property
    def is_current(self) -> bool:
        """True if the request still runs and has not left and re-entered the batch."""
        return not self.request.finish and self.generation == self.request.generation

    @property
    def is_awaited(self) -> bool:
        """True if the dispatch emits a token for the request or ends it."""
        return self.bound > 0 and self.is_current


def set_in_flight(
    step: StepBuilder, num_drafts: int
) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Count a planned step as in flight; return the entries of its decode rows and of its chunks.

    `num_drafts` is the number of drafts that each row verifies.
    """
    decodes, prefills = list[Entry](), list[Entry]()
    for request in step.decodes:
        is_last_prompt_token = request.is_prefilling  # it has no drafts
        request.num_computed += is_last_prompt_token
        bound = 1 if is_last_prompt_token else step.num_steps * (1 + num_drafts)
        decodes.append(Entry.in_flight(request, step.num_steps, bound))
    for request, length in step.prefills:
        request.num_computed += length
        ends_prompt = int(not request.is_prefilling)
        prefills.append(Entry.in_flight(request, ends_prompt, ends_prompt, length))
    return tuple(decodes), tuple(prefills)


class DraftChoice(NamedTuple):
    """Reason for the number of drafts of a dispatch."""

    num_known: int = 0  # most drafts that rows have at its start
    is_trial: bool = False  # True if the number is not expected to be the best


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """A plan and the requests of its output rows; without entries if it only copies."""

    plan: StepPlan
    decodes: tuple[Entry, ...]  # in the order of their output rows, the first ones
    prefills: tuple[Entry, ...]  # their output rows follow the program's decode rows
    num_prompt_tokens: int  # total of the prefills, at most the size of the program
    drafts: DraftChoice = DraftChoice()
    weight_version: str = ""  # that runs it; "" if it only copies

    @property
    def rows(self) -> list[tuple[int, Entry]]:
        """The index of the output row of each entry, and the entry."""
        program = self.plan.program
        if not isinstance(program, Program):
            return []
        return [*enumerate(self.decodes), *enumerate(self.prefills, program.decode_rows)]


class Progress(NamedTuple):
    """Result of a collected step for one request."""

    request: Request
    given: RowOutput
