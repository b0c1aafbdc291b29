"""AutomatonPool: places of the automata of running requests among the states on the device."""

import dataclasses
from collections.abc import Iterable

import numpy as np

from jaxspec.grammar.automaton import Automaton
from jaxspec.plan.automaton_plan import NUM_AUTOMATA, NUM_STATES, pack_automaton
from jaxspec.requests.request import Request


@dataclasses.dataclass
class _Place:
    index: int  # of the automaton
    base: int  # index of its first state
    num_requests: int = 0
    is_written: bool = False


class AutomatonPool:
    """Assigns indices and states to automata; those without requests stay until room is needed."""

    def __init__(self) -> None:
        self._places: dict[Automaton, _Place] = {}  # the least recently used first

    def clear(self) -> None:
        self._places.clear()

    def make_room(self, request: Request) -> bool:
        """Place the automaton of a request; return False if those of running requests fill the pool.

        Automata without requests make room.
        """
        automaton = request.automaton
        if automaton is None:
            return True
        place = self._places.pop(automaton, None) or self._new_place(len(automaton.next))
        if place is not None:
            self._places[automaton] = place
        return place is not None

    def enter(self, request: Request) -> None:
        """Set the state of a request that enters the batch, whose automaton has a place."""
        if request.automaton is not None:
            place = self._places[request.automaton]
            place.num_requests += 1
            request.grammar_state = place.base + request.automaton.after(request.output)

    def leave(self, request: Request) -> None:
        """Count one request less; only plans after those in flight may overwrite its automaton."""
        if request.automaton is not None:
            self._places[request.automaton].num_requests -= 1

    def take_unwritten(self, requests: Iterable[Request]) -> list[np.ndarray]:
        """Return the packed plans (int32) that write the automata which no plan has written."""
        packed = []
        for automaton in filter(None, (request.automaton for request in requests)):
            place = self._places[automaton]
            if not place.is_written:
                place.is_written = True
                packed += pack_automaton(automaton, place.index, place.base)
        return packed

    def _new_place(self, num_states: int) -> _Place | None:
        while True:
            index = self._free_index()
            base = self._free_states(num_states)
            if index is not None and base is not None:
                return _Place(index, base)
            idle = next((a for a, place in self._places.items() if not place.num_requests), None)
            if idle is None:
                return None
            del self._places[idle]

    def _free_index(self) -> int | None:
        used = {place.index for place in self._places.values()}
        return next((index for index in range(1, NUM_AUTOMATA) if index not in used), None)

    def _free_states(self, num_states: int) -> int | None:
        start = 1  # state 0 belongs to rows without an automaton
        used = sorted((place.base, len(a.next)) for a, place in self._places.items())
        for base, size in used:
            if base - start >= num_states:
                return start
            start = base + size
        return start if NUM_STATES - start >= num_states else None
