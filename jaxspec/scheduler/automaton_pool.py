"""AutomatonPool: places of the automata of requests among the states and masks on the device."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxspec.grammar.automaton import Automaton
from jaxspec.plan.automaton_plan import (
    NUM_AUTOMATA,
    NUM_MASKS,
    NUM_STATES,
    Place,
    grammar_state,
    pack_automaton,
)
from jaxspec.requests.request import Request


@dataclasses.dataclass
class _Tenant:
    place: Place
    num_requests: int = 0
    is_written: bool = False


class AutomatonPool:
    """Assigns places to automata; those without requests stay until others need room."""

    def __init__(self) -> None:
        self._tenants: dict[Automaton, _Tenant] = {}  # the least recently used first

    def clear(self) -> None:
        self._tenants.clear()

    def make_room(self, request: Request) -> bool:
        """Place the automaton of a request; return False if running requests fill the pool."""
        automaton = request.automaton
        if automaton is None:
            return True
        tenant = self._tenants.pop(automaton, None) or self._new_tenant(automaton)
        if tenant is not None:
            self._tenants[automaton] = tenant
        return tenant is not None

    def enter(self, request: Request) -> None:
        """Set the state of a request that enters the batch, whose automaton has a place."""
        if request.automaton is not None:
            tenant = self._tenants[request.automaton]
            tenant.num_requests += 1
            budget = request.grammar.thinking_budget if request.grammar else None
            position = request.automaton.position(request.output, budget)
            # Synthetic acceptance emits refused tokens; what follows them is free.
            is_known = position.state >= 0
            request.grammar_state = grammar_state(tenant.place, position) if is_known else 0

    def leave(self, request: Request) -> None:
        """Count one request less; only plans after those in flight may overwrite its automaton."""
        if request.automaton is not None:
            self._tenants[request.automaton].num_requests -= 1

    def take_unwritten(self, requests: Iterable[Request]) -> list[np.ndarray]:
        """Return the packed plans (int32) that write the automata which no plan has written."""
        packed = []
        for automaton in filter(None, (request.automaton for request in requests)):
            tenant = self._tenants[automaton]
            if not tenant.is_written:
                tenant.is_written = True
                packed += pack_automaton(automaton, tenant.place)
        return packed

    def _new_tenant(self, automaton: Automaton) -> _Tenant | None:
        while (place := self._free_place(automaton)) is None:
            idle = (other for other, tenant in self._tenants.items() if not tenant.num_requests)
            oldest = next(idle, None)
            if oldest is None:
                return None
            del self._tenants[oldest]
        return _Tenant(place)

    def _free_place(self, automaton: Automaton) -> Place | None:
        held = [(tenant.place, other) for other, tenant in self._tenants.items()]
        index = _free_range(1, NUM_AUTOMATA, [(place.index, 1) for place, _ in held])
        states = [(place.state, len(other.next)) for place, other in held]
        state = _free_range(len(automaton.next), NUM_STATES, states)
        masks = [(place.mask, len(other.masks.allowed)) for place, other in held]
        mask = _free_range(len(automaton.masks.allowed), NUM_MASKS, masks)
        if index is None or state is None or mask is None:
            return None
        return Place(index, state, mask)


def _free_range(size: int, end: int, used: list[tuple[int, int]]) -> int | None:
    """Return the first start, from 1 on, of `size` free indices below `end`; None if none is."""
    start = 1
    for first, length in sorted(used):
        if first - start >= size:
            break
        start = first + length
    return start if start + size <= end else None
