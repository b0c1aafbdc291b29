"""Laws of prefix caching: what was kept changes no token, and is what a cold run would compute.

Bugs of the books are planted in tests/prefix/test_cache.py, on a device that checks every
page; those of what the device copies are planted here.
"""

import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, HYBRID, REPLAY, SAMPLED, SNAPSHOT, oracle, prompts
from kept_prefixes import ask, keeping
from walk import PROMPTS as WALKED
from walk import random_walk, walk_harness

from jaxspec.cache import policy, recurrent
from jaxspec.options.draft_methods import (
    AssistantOptions,
    DraftModelOptions,
    Eagle3Options,
    NgramOptions,
    SuffixOptions,
)
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.plan.plan import EXPORT, RESTORE, StateExport
from jaxspec.prefix import cache as prefix_cache
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_features import join
from jaxspec.runner.step import make_step
from jaxspec.scheduler import packing

(PROMPT,) = [tuple(np.random.default_rng(5).integers(0, 256, 22).tolist())]
LONGER = (*PROMPT[:9], 7, 8, 9, 10, 11)
ONE = dataclasses.replace(GREEDY, max_tokens=1)
FP8 = np.dtype("float8_e4m3fn")


def make(*args, **options):
    """An engine with room for all that it can keep."""
    sizes = {"num_pages": 120, "num_checkpoints": 40}
    return keeping((PROMPT, LONGER), *args, **sizes | options)


def check_all_is_free(engine):
    scheduler, shapes = engine.scheduler, engine.buckets
    assert scheduler.pages.num_free == shapes.num_pages - 1
    scheduler.prefixes.clear()
    assert sorted(scheduler.pages._free) == list(range(1, shapes.num_pages))
    free_slots = scheduler.prefixes.store.free_slots
    assert sorted(free_slots) == list(range(1, 1 + shapes.num_checkpoints))


ENGINES = {
    "snapshot": {},
    "replay": {"states": REPLAY, "depth": 0},
    "no drafts": {"drafts": 0, "depth": 1, "states": REPLAY},
    "its head": {"drafts": 2, "method": "mtp", "states": REPLAY},
    "Mamba2 and experts": {"fixture": "nemotron_h", "drafts": 1},
    "Mamba2, replayed": {"fixture": "nemotron_h", "drafts": 3, "states": REPLAY},
    "attention": {"fixture": "qwen3", "drafts": 3, "mode": "pages"},
    "attention, in twos": {"fixture": "llama_draft", "mode": "pages", "steps_per_dispatch": 2},
    "short convolutions": {"fixture": "lfm2", "drafts": 2},
    "latents": {"fixture": "deepseek_v3", "drafts": 2, "method": "mtp", "mode": "pages"},
    "an index": {"fixture": "deepseek_v32", "drafts": 2, "mode": "pages"},
    "side by side": {"fixture": "falcon_h1", "drafts": 2, "states": REPLAY},
    "decays by channel": {"fixture": "kimi_linear", "drafts": 2, "states": REPLAY},
    "bounded decays": {"fixture": "bailing_hybrid", "drafts": 2, "method": "mtp", "states": REPLAY},
}


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ENGINES)
def test_a_hit_gives_the_tokens_of_a_cold_run_at_every_position(name):
    """Behind every number of tokens, in a page and at its end; then at ends of outputs.

    The position is where another request ended, whose output was one token long.
    """
    engine = make(**ENGINES[name])
    has_states = engine.buckets.num_checkpoints > 0
    for length in range(1, len(PROMPT)):
        engine.scheduler.prefixes.clear()
        ask(engine, PROMPT[:length], ONE)
        want = length if has_states else length - length % 4
        assert ask(engine, PROMPT).num_cached_tokens == want
    for stop in engine.requests[-1].output[1:8:2]:  # within accepted drafts, or behind them
        engine.scheduler.prefixes.clear()
        first = ask(engine, PROMPT, stop_ids=(stop,))
        then = ask(engine, (*first.tokens, 3, 1))
        end = len(first.tokens) - 1
        assert then.num_cached_tokens == (end if has_states else end - end % 4)
    assert engine.check() <= 2
    check_all_is_free(engine)


@pytest.mark.soak
def test_a_hit_over_8_bit_keys_and_values_gives_the_tokens_of_a_cold_run():
    engine = make(kv_dtype=FP8, states=REPLAY)
    cold = ask(engine, PROMPT).output
    for length in range(1, len(PROMPT)):
        engine.scheduler.prefixes.clear()
        ask(engine, PROMPT[:length], ONE)
        hit = ask(engine, PROMPT)
        assert (hit.num_cached_tokens, hit.output) == (length, cold)


def test_a_prompt_that_parts_from_another_is_found_there_by_the_third():
    """And one sample's prefix serves others, whatever their noise."""
    engine = make(states=REPLAY, feature_sets=(SAMPLED.features,))
    first = ask(engine, PROMPT)
    second = ask(engine, LONGER)  # pages of 8 tokens are there, and no state behind them
    third = ask(engine, (*PROMPT[:8], 200, 201))
    assert [r.num_cached_tokens for r in (first, second, third)] == [0, 0, 8]
    params = dataclasses.replace(SAMPLED, n=3)
    group = engine.add(PROMPT, params, 5)
    for each in group:
        each.params = SAMPLED
    engine.run()
    assert [r.num_cached_tokens for r in group] == [len(PROMPT) - 1, 0, 0]
    assert engine.check() <= 1
    figures = engine.engine.stats()["prefix_cache"]
    assert figures["num_without_state"] == 8 and figures["num_hits"] >= 8 + len(PROMPT) - 1


def test_states_at_an_interval_are_found_at_multiples_of_it():
    engine = make(mode="align", interval=8)
    ask(engine, PROMPT)
    assert ask(engine, PROMPT).num_cached_tokens == 16
    assert ask(engine, LONGER).num_cached_tokens == 8
    assert engine.check() == 0
    assert engine.engine.stats()["prefix_cache"]["num_checkpoints"] == 2


def kept_states(engine):
    """What the device keeps, `[layers, ...]`, by the tokens in front of it.

    Not what the next plan would copy first.
    """
    copies = engine.scheduler.prefixes.store.copies
    coming = {copy.checkpoint for copy in copies if isinstance(copy, StateExport)}
    checkpoints = engine.runner.state.checkpoints["recurrent"]
    states = np.asarray(checkpoints.states)
    found = {}
    for node in engine.scheduler.prefixes.store.states:
        slot, text = node.checkpoint, ()
        while node.parent is not None:
            text, node = node.tokens + text, node.parent
        if slot not in coming:
            found[text] = states[:, slot]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize("fixture", [HYBRID, "nemotron_h"])
@pytest.mark.parametrize("states", [SNAPSHOT, REPLAY], ids=["snapshot", "replay"])
def test_what_is_kept_is_the_oracle_s_state(fixture, states):
    """At ends of prompts, of outputs that stop inside accepted drafts, and of what is preempted."""
    engine = make(fixture, states=states, chunk=7)
    for stop in ask(engine, PROMPT).output[1:7]:
        ask(engine, PROMPT, stop_ids=(stop,))
    for num_steps in (2, 5, 7):
        (request,) = engine.add((*LONGER, num_steps), GREEDY)
        for _ in range(num_steps):
            engine.step()
        engine.scheduler.preempt(request)
        engine.run()
    assert engine.scheduler.prefixes.counts.num_resumed > 20
    found = kept_states(engine)
    assert len(found) > 8
    for text, got in found.items():
        run = oracle(fixture).start()
        for token in text:
            run.feed(token)
        want = np.stack([memory["state"] for memory in run.memory if "state" in memory])
        np.testing.assert_allclose(got, want, atol=2e-5, rtol=1e-4)


def test_salts_share_nothing():
    engine = make()
    cached = [ask(engine, PROMPT, salt=salt).num_cached_tokens for salt in (None, "a", "b", "a")]
    assert cached == [0, 0, 0, len(PROMPT) - 1]


def test_prompts_whose_every_token_must_be_seen_are_computed():
    """Log-probabilities of a prompt, and counts of its tokens; the output is as ever."""
    reported = dataclasses.replace(GREEDY, prompt_logprobs=0)
    counted = dataclasses.replace(GREEDY, presence_penalty=0.5)
    kinds = [GREEDY, reported, counted]
    engine = make(drafts=0, feature_sets=[join(params.features for params in kinds)])
    cached = [ask(engine, PROMPT, params).num_cached_tokens for params in (*kinds, GREEDY)]
    assert cached == [0, 0, 0, len(PROMPT) - 1]
    assert engine.check() == 0
    skipped = engine.engine.stats()["prefix_cache"]["skipped"]
    assert skipped["prompt_logprobs"] == skipped["penalties"] == 1


DRAFTERS = {
    "n-gram": (HYBRID, "ngram", NgramOptions(1, 3), None),
    "suffix": (HYBRID, "suffix", SuffixOptions(), None),
    "EAGLE-3": ("llama", "eagle3", Eagle3Options("somewhere"), "llama_eagle3"),
    "assistant": ("gemma4_shared", "assistant", AssistantOptions("a/b"), "gemma4_assistant"),
    "hybrid drafter": ("llama_draft", "draft_model", DraftModelOptions("somewhere"), HYBRID),
}


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("name", DRAFTERS)
def test_whoever_drafts_a_hit_changes_no_token(name):
    fixture, method, options, drafter = DRAFTERS[name]
    has_states = name != "EAGLE-3"
    engine = make(
        fixture,
        method=method,
        options=options,
        drafter=drafter,
        states=REPLAY,
        mode="all" if has_states else "pages",
    )
    for length in (3, 8, 14, 21):
        engine.scheduler.prefixes.clear()
        ask(engine, PROMPT[:length], ONE)
        cached = ask(engine, PROMPT).num_cached_tokens
        assert cached == (length if has_states else length - length % 4)
        ask(engine, (*engine.requests[-1].tokens, 4))
    assert engine.check() <= 1


@pytest.mark.soak
def test_a_model_that_drafts_for_itself_is_right_behind_a_hit():
    """So its own states came from the checkpoint, too."""
    options = {"method": "draft_model", "options": DraftModelOptions("somewhere")}
    engine = make(states=REPLAY, drafter=HYBRID, **options)
    for length in (3, 8, 14, 21):
        engine.scheduler.prefixes.clear()
        ask(engine, PROMPT[:length], ONE)
        assert ask(engine, PROMPT).num_cached_tokens == length
    assert engine.check() == 0
    for request in engine.requests:
        assert request.metrics.num_accepted_tokens == request.metrics.num_draft_tokens


def test_the_step_s_programs_are_the_same_with_and_without():
    """What is kept is no argument of theirs, so that it costs them nothing."""
    engines = [make(mode="off"), make()]
    for program in engines[0].runner._programs:
        arguments = [engine.runner._args(program) for engine in engines]
        structures = [jax.tree.structure(args) for args in arguments]
        assert structures[0] == structures[1]
        chex.assert_trees_all_equal_shapes_and_dtypes(*arguments)
    added = engines[1].runner._programs.keys() - engines[0].runner._programs.keys()
    assert added == {EXPORT, RESTORE}


def test_a_hit_compiles_nothing_and_adds_no_dispatch_to_wait_for():
    engine, heard = make(states=REPLAY), []
    ask(engine, PROMPT)

    def listen(event, duration, **_):
        if "compile" in event or "trace" in event:
            heard.append(event)

    plans, dispatch = [], engine.runner.dispatch
    engine.runner.dispatch = lambda plan: (plans.append(plan), dispatch(plan))[1]
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for end in range(3, 20, 4):
            ask(engine, (*PROMPT[:end], 1, 2, 3))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    before = [each.program for plan in plans for each in plan.before]
    assert before.count(RESTORE) >= 3 and before.count(EXPORT) >= 4
    assert len(before) == sum(not plan.num_steps for plan in plans)  # none by itself
    assert heard == []


SHARED = [(*WALKED[0][:n], *tail) for n in (5, 8, 12) for tail in prompts(3, seed=n, longest=9)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("states", "depth", "options"),
    [
        (SNAPSHOT, 2, {"num_pages": 30, "num_checkpoints": 5}),
        (REPLAY, 3, {"num_pages": 60, "num_checkpoints": 30, "chunk": 7}),
        (REPLAY, 0, {"num_pages": 24, "num_checkpoints": 3, "steps_per_dispatch": 2}),
    ],
    ids=["short of all", "deep, with room", "synchronous, in twos"],
)
def test_whatever_happens_among_shared_prefixes_every_request_gives_its_own_tokens(
    states, depth, options
):
    """Hits, junctions, evictions and preemptions between accepts and rejects."""
    engine = walk_harness(
        (0.8, 0.6, 0.5), vary=True, states=states, max_in_flight=depth, prefixes="all", **options
    )
    engine.scheduler.prefixes.min_uncached = 6
    happened = random_walk(engine, 400, seed=depth, among=[*WALKED[:4], *SHARED])
    assert engine.check() <= 3 and min(happened.values()) > 2
    figures = engine.engine.stats()["prefix_cache"]
    assert figures["num_hits"] > 0.2 * figures["num_queries"] and figures["num_resumed"] > 10
    assert figures["num_evicted_checkpoints"] > 10 and figures["num_checkpoints"] > 50
    check_all_is_free(engine)


# Bugs that others shipped, planted in what the device copies.

real_restore, real_write_row = recurrent.Recurrent.restore, packing.write_row


def nothing_restored(spec, pool, checkpoints, sources, slots):
    return pool


def convolution_not_restored(spec, pool, checkpoints, sources, slots):
    return dataclasses.replace(
        real_restore(spec, pool, checkpoints, sources, slots), conv=pool.conv
    )


def ring_not_folded(replay, mixer, pool, rows, layer):
    return state_select_reference(pool.states, layer, rows)


def ring_length_left(entry, request, layout):
    real_write_row(entry, request, layout)
    layout.read(entry, "ring_length")[...] = 2 * (request.num_computed > 0)


def any_page_is_a_hit(self, request):
    nodes, _ = self.store.tree.match(None, request.tokens, len(request.tokens) - 1)
    pages = tuple(node.page for node in nodes)
    return prefix_cache.PrefixHit(4 * len(nodes), pages, 0, 0, nodes[-1] if nodes else None)


BUGS = {
    "a state of a former request": (recurrent.Recurrent, "restore", nothing_restored),
    "a convolution of a former request": (recurrent.Recurrent, "restore", convolution_not_restored),
    "a ring that is not folded": (policy.Replay, "states", ring_not_folded),
    "a ring that is counted twice": (packing, "write_row", ring_length_left),
    "pages without a state": (prefix_cache.PrefixCache, "find", any_page_is_a_hit),
}


def hits(engine):
    for seed, tokens in enumerate((PROMPT, LONGER)):
        first = ask(engine, tokens, seed=seed)
        ask(engine, (*first.tokens, 5, 6), seed=seed)
        ask(engine, tokens, seed=seed)


@pytest.fixture(scope="module")
def victim():
    engine = make(states=REPLAY)
    hits(engine)
    assert engine.check() == 0
    return engine


@pytest.mark.few(1)
@pytest.mark.parametrize("bug", BUGS)
def test_a_planted_bug_is_seen(bug, victim, monkeypatch):
    monkeypatch.setattr(*BUGS[bug])
    runner = victim.runner
    for program in (EXPORT, RESTORE):
        step = jax.jit(make_step(runner._config, program), donate_argnums=2)
        compiled = step.lower(*runner._args(program)).compile()
        monkeypatch.setitem(runner._programs, program, compiled)
    victim.requests.clear()
    victim.scheduler.prefixes.clear()
    with pytest.raises(AssertionError):
        hits(victim)
        victim.check()
    victim.scheduler.prefixes.clear()
    assert all(request.finish is not Finish.RUNNING for request in victim.requests)
    assert jnp.isfinite(victim.runner.state.pools["recurrent"].states).all()
