"""Places of automata: running requests keep theirs, and no two overlap."""

import numpy as np
from random_automata import random_automaton

from jaxspec.plan.automaton_plan import NUM_AUTOMATA, NUM_STATES, automaton_layout
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.scheduler.automaton_pool import AutomatonPool

VOCAB = 40


def request_of(automaton, output=()):
    request = Request((1, 2), SamplingParams(), 0)
    request.automaton = automaton
    request.tokens += output
    return request


def indices(packed, name):
    fields = automaton_layout(VOCAB).unpack(packed)
    return {int(index) for index in fields[name].ravel() if index > 0}


def test_places_of_running_requests_never_overlap_nor_move():
    """A random walk of requests that enter and leave, with automata that fill the pool."""
    random = np.random.default_rng(0)
    pool, running, held = AutomatonPool(), [], {}
    sizes = [int(random.integers(1, NUM_STATES // 4)) for _ in range(60)]
    automata = [random_automaton(random, VOCAB, states=size, classes=2) for size in sizes]
    num_refused = 0
    for _ in range(600):
        if running and random.random() < 0.5:
            gone = running.pop(random.integers(len(running)))
            pool.leave(gone)
            continue
        request = request_of(automata[random.integers(len(automata))])
        if not pool.make_room(request):
            num_refused += 1
            assert running
            continue
        pool.enter(request)
        running.append(request)
        plans = pool.take_unwritten([request])
        if plans:
            held[request.automaton] = set()
        for packed in plans:
            written = indices(packed, "states")
            others = {r.automaton for r in running} - {request.automaton}
            assert not any(written & held[other] for other in others)
            held = {a: states - written for a, states in held.items()}
            held[request.automaton] |= written
        for each in running:
            assert held[each.automaton] == set(
                range(each.grammar_state, each.grammar_state + len(each.automaton.next))
            )
    assert num_refused > 10


def test_a_request_without_an_automaton_needs_no_room():
    pool, request = AutomatonPool(), request_of(None)
    assert pool.make_room(request)
    pool.enter(request)
    pool.leave(request)
    assert request.grammar_state == 0 and pool.take_unwritten([request]) == []


def test_an_automaton_is_written_once_and_the_longest_unused_makes_room():
    random = np.random.default_rng(1)
    automata = [random_automaton(random, VOCAB) for _ in range(NUM_AUTOMATA)]
    pool = AutomatonPool()

    def run(automaton):
        request = request_of(automaton)
        assert pool.make_room(request)
        pool.enter(request)
        packed = pool.take_unwritten([request, request])
        pool.leave(request)
        return len(packed)

    for automaton in automata[:-1]:
        assert run(automaton) == 1 and run(automaton) == 0
    assert run(automata[0]) == 0  # the second is the longest unused now
    assert run(automata[-1]) == 1
    assert run(automata[0]) == 0 and run(automata[1]) == 1
    pool.clear()
    assert run(automata[0]) == 1


def test_a_request_that_comes_back_begins_after_its_output():
    automaton = random_automaton(np.random.default_rng(2), VOCAB, states=5, classes=3)
    allowed = [t for t in range(VOCAB) if automaton.next[0, automaton.classes[t]] >= 0]
    output = allowed[:1]
    pool, first, again = AutomatonPool(), request_of(automaton), request_of(automaton, output)
    for request in (first, again):
        assert pool.make_room(request)
        pool.enter(request)
    assert again.grammar_state - first.grammar_state == automaton.after(output)
