"""RowPlans: plans of all rows that run, and what goes in front of them."""

import dataclasses
from collections.abc import Sequence

from jaxspec.config import StepShapes
from jaxspec.plan import RESTORE, Export, Fork, Program, StepPlan, pack_copy, pack_export
from jaxspec.request import Request
from jaxspec.scheduler.host_drafter import HostDrafter
from jaxspec.scheduler.packing import pack_step
from jaxspec.scheduler.prefix_cache import PrefixCache
from jaxspec.scheduler.scheduled_step import NextStep


class RowPlans:
    """Knows of each running request what the device knows: its row, and how many of its pages."""

    def __init__(self, shapes: StepShapes, drafter: HostDrafter, prefixes: PrefixCache):
        """Write plans of `shapes`, with the paths of `drafter` and what `prefixes` has to keep."""
        self._shapes, self._drafter, self._prefixes = shapes, drafter, prefixes

    def plan(
        self,
        program: Program,
        step: NextStep,
        running: Sequence[Request],
        forks: Sequence[Fork] = (),
    ) -> StepPlan:
        """Pack a plan of every running request; from then on the device knows its row and pages.

        What is to be copied goes first, in its order. Every request that enters has its row from
        the first copy on that lets one in on a prefix.
        """
        return _joined([*self._copies(running), self._plan(program, step, running, forks)])

    def only_copies(self, running: Sequence[Request]) -> StepPlan:
        """A plan of what is to be copied, which there is, and nothing is computed."""
        return _joined(self._copies(running))

    def _copies(self, running: Sequence[Request]) -> list[StepPlan]:
        plans = list[StepPlan]()
        for copy in self._prefixes.take_copies():
            if isinstance(copy, Fork):
                plans.append(self._plan(RESTORE, NextStep(0, 0), running, [copy]))
            elif isinstance(copy, Export):
                plans.append(pack_export(copy))
            else:
                plans.append(pack_copy(copy, self._shapes))
        return plans

    def _plan(
        self,
        program: Program,
        step: NextStep,
        running: Sequence[Request],
        forks: Sequence[Fork],
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
            forks=forks,
            drafter=self._drafter,
        )
        for row, request in enumerate(rows):
            request.row = row
        for request in step.grown:
            request.num_pages_sent = len(request.pages)
        return plan


def _joined(plans: Sequence[StepPlan]) -> StepPlan:
    """The last of the plans, with all others in front of it."""
    *others, last = (each for plan in plans for each in (*plan.before, plan))
    return dataclasses.replace(
        last, before=tuple(dataclasses.replace(each, before=()) for each in others)
    )
