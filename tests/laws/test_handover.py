"""Laws of requests that travel: two engines give the tokens that one would have given alone.

The engines differ in all that may differ: sizes of pages, drafts, depth, and how states survive.
"""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from harness import GREEDY, HYBRID, REPLAY, SAMPLED, SNAPSHOT
from pairwise import soak
from travellers import Traveller, all_is_free, by_wire, told

from jaxspec.cache import policy, portable
from jaxspec.engine.engine import Engine
from jaxspec.engine.session import Session
from jaxspec.options.draft_methods import AssistantOptions, NgramOptions
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.plan.block_plan import Read
from jaxspec.plan.plan import EXPORT
from jaxspec.prefix.store import PrefixStore
from jaxspec.runner.step import make_step

PROMPT = tuple(np.random.default_rng(5).integers(0, 256, 22).tolist())
OTHER = tuple(np.random.default_rng(6).integers(0, 256, 9).tolist())
NGRAM = {"method": "ngram", "options": NgramOptions(1, 2)}
ASSISTANT = {
    "method": "assistant",
    "options": AssistantOptions("somewhere"),
    "drafter": "gemma4_assistant",
}
BOTH = {"feature_sets": (SAMPLED.features,)}  # greedy requests run in the same programs
SEEDED = dataclasses.replace(SAMPLED, seed=11)
HOST = {"host_bytes": 2**26}
LONG = [dataclasses.replace(params, max_tokens=40) for params in (GREEDY, SEEDED)]

PAIRS = {
    "its head": (
        HYBRID,
        {"drafts": 3, "method": "mtp", "states": SNAPSHOT, "max_in_flight": 2},
        {
            "drafts": 3,
            "method": "mtp",
            "states": REPLAY,
            "max_in_flight": 0,
            "page_size": 8,
            **HOST,
        },
    ),
    "with drafts and without": (
        HYBRID,
        {"drafts": 0, "states": REPLAY, "max_in_flight": 0, "page_size": 8},
        {"drafts": 3, "method": "mtp", "states": SNAPSHOT, "max_in_flight": 2},
    ),
    "Mamba2 and experts": (
        "nemotron_h",
        {"drafts": 3, "states": REPLAY, **NGRAM},
        {"drafts": 1, "states": SNAPSHOT, "page_size": 8, "max_in_flight": 1, **NGRAM},
    ),
    "attention": (
        "qwen3",
        {"prefixes": "pages", "drafts": 0, "max_in_flight": 0},
        {"prefixes": "pages", "drafts": 2, "page_size": 8, **NGRAM},
    ),
    "latents and an index": (
        "deepseek_v32",
        {"prefixes": "pages", "drafts": 0, "max_in_flight": 0},
        {"prefixes": "pages", "drafts": 2, "page_size": 8, **NGRAM},
    ),
    "short convolutions": (
        "lfm2",
        {"drafts": 2, **NGRAM},
        {"drafts": 0, "page_size": 8, "max_in_flight": 0},
    ),
    "windows": (
        "qwen2",
        {"drafts": 3, **NGRAM},
        {"drafts": 0, "page_size": 8, "max_in_flight": 0},
    ),
    "shared windows": (
        "gemma4_shared",
        {"drafts": 3, **NGRAM},
        {"drafts": 0, "page_size": 8, "max_in_flight": 0},
    ),
    "an assistant": (
        "gemma4_shared",
        {"drafts": 3, **ASSISTANT},
        {"drafts": 3, "page_size": 8, "max_in_flight": 0, **ASSISTANT},
    ),
    "side by side": (
        "falcon_h1",
        {"drafts": 2, "states": REPLAY, **NGRAM},
        {"drafts": 0, "page_size": 8, "states": SNAPSHOT},
    ),
    "decays by channel": (
        "kimi_linear",
        {"drafts": 2, "states": REPLAY, **NGRAM},
        {"drafts": 0, "page_size": 8, "states": SNAPSHOT},
    ),
}
WAYS = pytest.mark.parametrize(
    "params, way",
    [(GREEDY, 1), (SEEDED, -1), soak(GREEDY, -1), soak(SEEDED, 1)],
    ids=["greedy, there", "sampled, back", "greedy, back", "sampled, there"],
)
QUICK = ("its head",)
EXACT = {"its head", "an assistant"}  # both draft in the same way


@pytest.fixture(
    scope="module", params=[*QUICK, *(soak(name) for name in PAIRS if name not in QUICK)]
)
def pair(request):
    fixture, *both = PAIRS[request.param]
    pair = [Traveller(fixture, **BOTH, **options) for options in both]
    pair[0].name = request.param
    return pair


@pytest.fixture
def engines(pair):
    """The pair, without prefixes; whatever a test does, nothing is lost in the end."""
    for engine in pair:
        engine.prefixes.clear()
    yield pair
    for engine in pair:
        all_is_free(engine)


def kept(engine, length):
    """How many of so many tokens an engine keeps."""
    has_states = engine.harness.buckets.num_checkpoints > 0
    return length if has_states else length - length % engine.harness.buckets.page_size


@pytest.mark.few(1)
@WAYS
def test_a_prompt_computed_here_goes_on_there_as_if_it_had_been_there(engines, params, way):
    """At every length: tokens, and where both draft alike the drafts that stood, too."""
    sender, receiver = engines[::way]
    for length in range(1, len(PROMPT)):
        state = by_wire(sender.prefill(PROMPT[:length], params))
        assert state.num_computed == kept(sender, length - 1)
        receiver.prefixes.clear()
        hits = receiver.prefixes.counts.num_hits
        got = receiver.finish(state)
        assert receiver.prefixes.counts.num_hits - hits == kept(receiver, state.num_computed)
        assert receiver.check(state, got.tokens) == 0 and got.finish == "length"
        if engines[0].name in EXACT:
            alone = receiver.run(PROMPT[:length], params)
            assert got.draft_positions == alone.draft_positions
            assert vars(got.metrics)["accepted_per_position"] == alone.metrics.accepted_per_position
            assert got.metrics.drafted_per_position == alone.metrics.drafted_per_position
    with pytest.raises(ValueError, match="runs or waits"):
        sender.export_request("x")


@pytest.mark.few(3)
@WAYS
def test_a_request_may_leave_after_any_number_of_steps(engines, params, way):
    """Before its first one, in the middle of its prompt, and behind drafts that stood or did not.

    Who reads it here gets all tokens that go with it.
    """
    sender, receiver = engines[::way]
    lengths = set()
    for num_steps in range(20):
        for engine in engines:
            engine.prefixes.clear()
        sample = sender.sample(PROMPT, params)
        sender.session.add([sample])
        for _ in range(num_steps):
            sender.session.step()
        try:
            state = by_wire(sender.export_request("x"))
        except ValueError:  # it has ended, in these steps or in those that were in flight
            break
        last = sample.take()
        assert last.finish_reason == "abort" and tuple(last.token_ids) == state.token_ids
        assert num_steps == 0 or state.num_computed > 0
        got = receiver.finish(state)
        assert receiver.check(state, got.tokens) == 0 and got.finish == "length"
        assert len(state.token_ids) + len(got.tokens) == params.max_tokens
        lengths.add(len(state.token_ids))
    assert sample.request.finish and len(lengths) > 5


@pytest.mark.few(3)
def test_a_request_may_come_back_and_leave_again(engines):
    """A chain: the state of each engine is the next one's beginning."""
    here, there = engines
    for params in LONG:
        state = by_wire(here.prefill(PROMPT, params, request_id="x"))
        for count, engine in enumerate([there, here, there, here]):
            if engine is here:
                engine.prefixes.clear()
            pieces = engine.import_request(state)
            came = next(pieces).token_ids
            state = by_wire(engine.export_request("x"))
            assert told(pieces).finish == "abort" and came
            assert len(state.token_ids) > count
        last = there.finish(state)
        assert there.check(state, last.tokens) == 0 and last.finish == "length"


@pytest.mark.few(3)
def test_neighbours_of_both_go_on_as_if_nobody_came_or_went(engines):
    sender, receiver = engines
    for params in LONG:
        beside = [each.stream(OTHER, params, "beside") for each in engines]
        first = [next(pieces) for _, pieces in beside]
        state = by_wire(sender.prefill(PROMPT, params))
        going = [sender.stream(PROMPT[:n], params, f"go {n}") for n in (5, 8)]
        for _, pieces in going:
            next(pieces)
        states = [by_wire(sender.export_request(f"go {n}")) for n in (5, 8)]
        arrived = [(each, receiver.import_request(each)) for each in (state, *states)]
        begun = [[next(pieces)] for _, pieces in arrived]  # all of them are in the batch together
        for (each, pieces), piece in zip(arrived, begun, strict=True):
            assert receiver.check(each, told([*piece, *pieces]).tokens) == 0
        for engine, (request, pieces), piece in zip(engines, beside, first, strict=True):
            whole = told([piece, *pieces])
            assert whole.finish == "length"
            kept = dataclasses.replace(
                state, prompt_token_ids=OTHER, seed=request.seed, params=params, token_ids=()
            )
            assert engine.check(kept, whole.tokens) == 0
        assert all(told(pieces).finish == "abort" for _, pieces in going)


def and_push_it_out(engine, sample, *brought):
    """Others need all pages before its request enters; a host tier gets what they held."""
    Session.bring(engine.session, sample, *brought)
    pool = engine.harness.scheduler.pages
    pool.release(pool.allocate(pool.num_free))


def test_what_others_need_room_for_comes_back_from_the_host_or_is_computed_anew(
    engines, monkeypatch
):
    sender, receiver = engines
    monkeypatch.setattr(receiver.session, "bring", functools.partial(and_push_it_out, receiver))
    for params in (GREEDY, SEEDED):
        state = by_wire(sender.prefill(PROMPT, params))
        receiver.prefixes.clear()
        hits = receiver.prefixes.counts.num_hits
        assert receiver.check(state, receiver.finish(state).tokens) == 0
        has_tier = receiver.prefixes.tier is not None
        assert receiver.prefixes.counts.num_hits - hits == has_tier * (len(PROMPT) - 1)


def and_lose_it(engine, sample, *brought):
    """What came is evicted before its request enters."""
    Session.bring(engine.session, sample, *brought)
    engine.prefixes.clear()


def test_what_was_given_up_before_it_was_read_is_computed_anew(engines, monkeypatch):
    sender, receiver = engines
    for params in (GREEDY, SEEDED):
        state = by_wire(sender.prefill(PROMPT, params))
        monkeypatch.setattr(receiver.session, "bring", functools.partial(and_lose_it, receiver))
        assert receiver.check(state, receiver.finish(state).tokens) == 0
        monkeypatch.undo()
        bare = dataclasses.replace(state, arrays={})
        assert receiver.check(bare, receiver.finish(bare).tokens) == 0


# Bugs that others shipped, planted on the way.

real_rows, real_take, real_out = portable._rows, PrefixStore.take_copies, Engine.copy_out


def inputs_turned_by_one(position, sample_streams, ring):
    return real_rows(position + 1, sample_streams, ring)


def state_of_the_neighbour(store):
    count = store._shapes.num_checkpoints
    return [
        copy._replace(checkpoint=copy.checkpoint % count + 1)
        if isinstance(copy, Read) and copy.checkpoint
        else copy
        for copy in real_take(store)
    ]


def one_token_fewer_is_told(engine, request):
    copied = real_out(engine, request)
    return copied._replace(num_tokens=copied.num_tokens - 1)


def another_candidate(snapshot, mixer, pool, rows, layer):
    wrong = dataclasses.replace(rows, state_offset=rows.state_offset + 1)
    return state_select_reference(pool.states, layer, wrong)


def ring_not_folded(replay, mixer, pool, rows, layer):
    return state_select_reference(pool.states, layer, rows)


BUGS = {
    "inputs turned by one": (portable, "_rows", inputs_turned_by_one),
    "the state of the neighbour": (PrefixStore, "take_copies", state_of_the_neighbour),
    "counts one off": (Engine, "copy_out", one_token_fewer_is_told),
    "another candidate": (policy.Snapshot, "states", another_candidate),
    "a ring that is not folded": (policy.Replay, "states", ring_not_folded),
}


def travels(engines):
    """Requests that leave both engines in the middle of their output, and go on in the other."""
    for sender, receiver in (engines, engines[::-1]):
        for params in (GREEDY, SEEDED):
            for engine in engines:
                engine.prefixes.clear()
            samples = [sender.sample(p, params, f"{len(p)}") for p in (PROMPT, OTHER)]
            sender.session.add(samples)
            for _ in range(5):
                sender.session.step()
            for state in [by_wire(sender.export_request(each.request_id)) for each in samples]:
                receiver.check(state, receiver.finish(state).tokens)


@pytest.mark.few(2)
@pytest.mark.parametrize("pair", ["its head"], indirect=True)
@pytest.mark.parametrize("bug", [None, *BUGS])
def test_a_planted_bug_is_seen(bug, pair, monkeypatch):
    if bug is None:
        return travels(pair)
    where, name, planted = BUGS[bug]
    monkeypatch.setattr(where, name, planted)
    for engine in pair if where in (policy.Snapshot, policy.Replay) else ():
        runner = engine._runner
        step = jax.jit(make_step(runner._config, EXPORT), donate_argnums=2)
        monkeypatch.setitem(runner._programs, EXPORT, step.lower(*runner._args(EXPORT)).compile())
    with pytest.raises(AssertionError):
        travels(pair)
