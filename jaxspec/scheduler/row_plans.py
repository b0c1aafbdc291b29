"""RowPlans: plans of all rows that run, and what goes in front of them."""

import dataclasses
from collections.abc import Sequence

from jaxspec.config import StepShapes
from jaxspec.plan import RESTORE, Fork, Program, StepPlan, pack_export
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

        States that are to be kept go first: their rows are where the last plan had them. Then come
        requests that enter on a prefix that was kept, and everybody else who enters.
        """
        exports = [pack_export(each) for each in self._prefixes.take_exports()]
        plans = [self._plan(RESTORE, NextStep(0, 0), running, [each]) for each in step.restores]
        plans.append(self._plan(program, step, running, forks))
        in_order = [each for plan in plans for each in (*plan.before, plan)][:-1]
        return dataclasses.replace(plans[-1], before=(*exports, *(_alone(p) for p in in_order)))

    def only_restores(self, step: NextStep, running: Sequence[Request]) -> StepPlan:
        """A plan in which requests enter on prefixes, and nothing is computed."""
        *others, last = step.restores
        only = dataclasses.replace(step, restores=others)
        return self.plan(RESTORE, only, running, [last])

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


def _alone(plan: StepPlan) -> StepPlan:
    return StepPlan(plan.program, plan.packed)
