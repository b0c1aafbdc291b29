"""A step as the scheduler sees it: gathered, dispatched, and what came of it."""

import dataclasses
from typing import NamedTuple

from jaxspec.plan import RowOutput, StepPlan
from jaxspec.request import Request


@dataclasses.dataclass
class NextStep:
    """What one call of `Scheduler.schedule` has gathered so far."""

    budget: int  # prompt tokens still to give away
    num_steps: int  # that the dispatch makes
    decodes: list[Request] = dataclasses.field(default_factory=list)
    prefills: list[tuple[Request, int]] = dataclasses.field(default_factory=list)
    grown: list[Request] = dataclasses.field(default_factory=list)  # given pages
    num_new: int = 0  # rows that enter

    @property
    def has_work(self) -> bool:
        """Whether anything is computed."""
        return bool(self.decodes or self.prefills)


class Entry(NamedTuple):
    """A request's part in one dispatched step."""

    request: Request
    generation: int
    bound: int  # most tokens the dispatch can emit for it; 0: a chunk that does not end its prompt
    chunk: range = range(0)  # the indices of the tokens that it reads in the prefill region

    @staticmethod
    def launch(request: Request, num_steps: int, bound: int, num_read: int = 0) -> "Entry":
        """Count steps that emit for a request as in flight, and the most tokens they can give.

        `num_read`: tokens of its chunk, which `num_computed` counts already.
        """
        request.in_flight += num_steps
        request.in_flight_bound += bound
        chunk = range(request.num_computed - num_read, request.num_computed)
        return Entry(request, request.generation, bound, chunk)

    @property
    def is_current(self) -> bool:
        """Whether the request still runs, and has not left the batch and come back."""
        return not self.request.finish and self.generation == self.request.generation

    @property
    def is_awaited(self) -> bool:
        """Whether the dispatch gives the request a token or its end."""
        return self.bound > 0 and self.is_current


def launch(step: NextStep, num_drafts: int) -> tuple[tuple[Entry, ...], tuple[Entry, ...]]:
    """Count a step that is planned as in flight: the entries of its decode rows, and of its chunks.

    `num_drafts`: that a row verifies.
    """
    decodes, prefills = list[Entry](), list[Entry]()
    for request in step.decodes:
        is_last_prompt_token = request.is_prefilling  # it has no drafts
        request.num_computed += is_last_prompt_token
        bound = 1 if is_last_prompt_token else step.num_steps * (1 + num_drafts)
        decodes.append(Entry.launch(request, step.num_steps, bound))
    for request, length in step.prefills:
        request.num_computed += length
        ends_prompt = int(not request.is_prefilling)
        prefills.append(Entry.launch(request, ends_prompt, ends_prompt, length))
    return tuple(decodes), tuple(prefills)


class DraftChoice(NamedTuple):
    """Why a dispatch verifies as many drafts as it does."""

    num_known: int = 0  # that rows have at most when it begins
    is_trial: bool = False  # of a number that is not thought to be the best one


@dataclasses.dataclass(frozen=True)
class ScheduledStep:
    """A plan, and whose rows its output will hold; nobody's, if it only moves."""

    plan: StepPlan
    decodes: tuple[Entry, ...]  # their output rows come first
    prefills: tuple[Entry, ...]  # theirs follow all rows that the program decodes
    num_prompt_tokens: int  # of all prefills; the program may have room for more
    drafts: DraftChoice = DraftChoice()

    @property
    def rows(self) -> list[tuple[int, Entry]]:
        """Each entry, behind the number of its output row."""
        return [*enumerate(self.decodes), *enumerate(self.prefills, self.plan.program.decode_rows)]


class Progress(NamedTuple):
    """What a collected step gave one request."""

    request: Request
    given: RowOutput
