"""Laws of the host tier: what went to the host and came back changes no token.

Bugs of the books are planted in tests/prefix/test_host_tier.py, on a device that checks every
page; those of what is copied are planted here.
"""

import dataclasses
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import GREEDY, REPLAY, SNAPSHOT, prompts
from kept_prefixes import ask, keeping, push_out
from pairwise import soak
from walk import PROMPTS as WALKED
from walk import random_walk, walk_harness

from jaxspec.cache import copies
from jaxspec.plan.plan import BLOCK_COPIES, READ, READ_STATE, RESTORE, WRITE, WRITE_STATE
from jaxspec.prefix import disk_tier
from jaxspec.requests.request import Finish
from jaxspec.runner import blocks

(PROMPT,) = [tuple(np.random.default_rng(5).integers(0, 256, 22).tolist())]
OTHERS = prompts(4, seed=11, longest=40)
ONE = dataclasses.replace(GREEDY, max_tokens=1)
FP8 = np.dtype("float8_e4m3fn")
MIB = 2**20


def make(*args, **options):
    """An engine with a little room on the device and a lot on the host."""
    sizes = {"num_pages": 40, "num_checkpoints": 4, "host_bytes": 64 * MIB}
    engine = keeping((PROMPT, *OTHERS), *args, **sizes | options)
    engine.scheduler.prefixes.min_uncached = 1  # no state is on trial: those leave no copy
    return engine


def check_all_is_free(engine):
    scheduler, shapes, prefixes = engine.scheduler, engine.buckets, engine.scheduler.prefixes
    mover, tier = engine.runner.blocks, prefixes.tier
    assert scheduler.pages.num_free == shapes.num_pages - 1
    assert tier.index.num_bytes == sum(
        mover.num_bytes(is_state=p.is_state) for p in tier.index.blocks
    )
    assert tier.index.num_bytes <= engine.limits.host_bytes and not mover._staged
    prefixes.clear()
    assert sorted(scheduler.pages._free) == list(range(1, shapes.num_pages))
    assert sorted(prefixes.store.free_slots) == list(range(1, 1 + shapes.num_checkpoints))
    assert (len(tier.index.blocks), tier.index.num_bytes) == (0, 0)


ENGINES = {
    "snapshot": {},
    "replay": {"states": REPLAY, "depth": 0},
    "no drafts": {"drafts": 0, "states": REPLAY},
    "synchronous, without drafts": {"drafts": 0, "depth": 0},
    "its head": {"drafts": 2, "method": "mtp", "states": REPLAY},
    "Mamba2, replayed": {"fixture": "nemotron_h", "drafts": 3, "states": REPLAY},
    "attention": {"fixture": "qwen3", "drafts": 3, "mode": "pages"},
    "short convolutions": {"fixture": "lfm2", "drafts": 2},
    "windows": {"fixture": "gpt_oss", "drafts": 2},
    "latents and an index": {"fixture": "deepseek_v32", "drafts": 2, "mode": "pages"},
    "decays by channel": {"fixture": "kimi_linear", "drafts": 2, "states": REPLAY},
}


QUICK = "snapshot", "no drafts", "its head", "Mamba2, replayed", "attention", "short convolutions"


@pytest.mark.few(1)
@pytest.mark.parametrize("name", [*QUICK, *(soak(name) for name in ENGINES if name not in QUICK)])
def test_a_hit_from_the_host_gives_the_tokens_of_a_cold_run_at_every_position(name):
    engine = make(**ENGINES[name])
    has_states = engine.buckets.num_checkpoints > 0
    for length in range(1, len(PROMPT)):
        engine.scheduler.prefixes.clear()
        ask(engine, PROMPT[:length], ONE)
        push_out(engine)
        want = length if has_states else length - length % 4
        assert ask(engine, PROMPT).num_cached_tokens == want
        push_out(engine)
        again = ask(engine, (*engine.requests[-1].tokens, 3, 1))
        assert again.num_cached_tokens >= want
    assert engine.check() <= 2
    host = engine.engine.stats()["prefix_cache"]["host"]
    assert host["num_hits"] > 200 and host["num_evicted_pieces"] == 0
    check_all_is_free(engine)


@pytest.mark.soak
def test_a_hit_from_the_host_over_8_bit_keys_and_values_gives_the_tokens_of_a_cold_run():
    engine = make(kv_dtype=FP8, states=REPLAY)
    cold = ask(engine, PROMPT).output
    for length in range(1, len(PROMPT)):
        engine.scheduler.prefixes.clear()
        ask(engine, PROMPT[:length], ONE)
        push_out(engine)
        hit = ask(engine, PROMPT)
        assert (hit.num_cached_tokens, hit.output) == (length, cold)


def test_salts_share_nothing_on_the_host():
    engine, cached = make(), []
    for salt in (None, "a", "b", "a", None):
        cached.append(ask(engine, PROMPT, salt=salt).num_cached_tokens)
        push_out(engine)
    assert cached == [0, 0, 0, len(PROMPT) - 1, len(PROMPT) - 1]


@pytest.mark.soak
def test_no_step_s_program_is_another_one_and_a_hit_from_the_host_compiles_nothing():
    engines = [make(host_bytes=0, drafts=1), make(drafts=1)]
    added = engines[1].runner._programs.keys() - engines[0].runner._programs.keys()
    assert not added
    assert not any(map(engines[0].runner.is_warm, BLOCK_COPIES))
    assert all(map(engines[1].runner.is_warm, BLOCK_COPIES))
    engine, heard, plans = engines[1], [], []
    ask(engine, PROMPT)
    dispatch = engine.runner.dispatch
    engine.runner.dispatch = lambda plan: (plans.append(plan), dispatch(plan))[1]

    def listen(event, duration, **_):
        if "compile" in event or "trace" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        for end in range(3, 20, 4):
            push_out(engine)
            ask(engine, (*PROMPT[:end], 1, 2, 3))
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    before = [each.program for plan in plans for each in plan.before]
    kinds = READ, READ_STATE, WRITE, WRITE_STATE, RESTORE
    assert min(before.count(kind) for kind in kinds) >= 2, Counter(before)
    assert len(before) == sum(not plan.num_steps for plan in plans)  # none by itself
    assert heard == []


SHARED = [(*WALKED[0][:n], *tail) for n in (5, 8, 12) for tail in prompts(3, seed=n, longest=9)]


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("states", "depth", "options"),
    [
        (SNAPSHOT, 2, {"num_pages": 24, "num_checkpoints": 3, "block_pages": 3}),
        (REPLAY, 3, {"num_pages": 30, "num_checkpoints": 4, "chunk": 7, "block_pages": 1}),
        (REPLAY, 0, {"num_pages": 24, "num_checkpoints": 3, "steps_per_dispatch": 2}),
    ],
    ids=["short of all", "deep", "synchronous, in twos"],
)
def test_whatever_happens_where_both_tiers_give_up_every_request_gives_its_own_tokens(
    states, depth, options
):
    engine = walk_harness(
        (0.8, 0.6, 0.5),
        vary=True,
        states=states,
        max_in_flight=depth,
        prefixes="all",
        host_bytes=64 * MIB,
        **options,
    )
    prefixes, mover = engine.scheduler.prefixes, engine.runner.blocks
    prefixes.min_uncached = 6
    prefixes.tier.max_bytes = 20 * sum(mover.num_bytes(is_state=kind) for kind in (True, False))
    random_walk(engine, 400, seed=depth, among=[*WALKED[:4], *SHARED])
    assert engine.check() <= 3
    host = engine.engine.stats()["prefix_cache"]["host"]
    # How many depends on how fast the host copies: 33 were seen on busy cores.
    assert host["num_hits"] > 20 and host["num_evicted_pieces"] > 10
    check_all_is_free(engine)


def settle(disk):
    disk.poll()
    while disk._jobs:
        disk._jobs[-1][0].exception()
        disk.poll()


@pytest.mark.soak
def test_what_went_to_the_disk_is_found_by_the_next_engine_and_changes_no_token(
    tmp_path, monkeypatch
):
    """Where host and device have room for next to nothing; a file that is damaged is not used."""
    monkeypatch.setattr(disk_tier, "MAX_WAITING", 100)
    engine = make(states=REPLAY, folder=tmp_path, num_pages=30, num_checkpoints=2)
    tier, disk = engine.scheduler.prefixes.tier, engine.scheduler.prefixes.tier.disk
    tier.max_bytes = 2 * engine.runner.blocks.num_bytes(is_state=True)
    asked = [PROMPT, *OTHERS]
    for turn in range(3):
        for prompt in asked:
            request = ask(engine, prompt)
            settle(disk)
            if len(prompt) > 8:  # others leave no state at their end
                assert request.num_cached_tokens == (len(prompt) - 1) * (turn > 0)
        push_out(engine)
        engine.engine._dispatch_copies()  # a file is found once it is written
        settle(disk)
    figures = disk.stats()
    assert figures["num_written"] > 8 and figures["num_read"] > 10 and not figures["num_failed"]
    assert engine.check() <= 2
    engine.engine.close()
    tier.max_bytes = 0
    other = make(states=REPLAY, folder=tmp_path)
    disk = other.scheduler.prefixes.tier.disk
    settle(disk)
    for path in sorted(tmp_path.iterdir())[::3]:
        content = bytearray(path.read_bytes())
        content[-1 - len(content) // 3] ^= 1
        path.write_bytes(content)
    cached = [ask(other, prompt).num_cached_tokens for prompt in asked]
    assert any(cached) and other.check() <= 2
    settle(disk)
    assert 0 < disk.stats()["num_failed"] < disk.stats()["num_read"]
    other.scheduler.prefixes.clear()
    settle(disk)
    assert not list(tmp_path.iterdir())


@pytest.mark.soak
def test_a_piece_never_changes():
    """Whatever becomes of its pages; it is the same at its end as when it was filled."""
    engine = make(states=REPLAY, num_pages=30)
    kept, tier = {}, engine.scheduler.prefixes.tier
    for turn in range(3):
        for prompt in (PROMPT, *OTHERS, *SHARED):
            ask(engine, (*prompt, turn))
            for piece in tier.index.blocks:
                if piece.arrays is not None:
                    now = [np.array(array) for array in piece.arrays]
                    for before, after in zip(kept.setdefault(piece, now), now, strict=True):
                        np.testing.assert_array_equal(before.view(np.uint8), after.view(np.uint8))
    assert len(kept) > 20 and engine.check() <= 2


# Bugs, planted in what is copied.

real_read, real_write = copies.read_pages, copies.write_pages
real_state = copies.write_checkpoint


def pages_of_the_neighbour(specs, pools, pages):
    return real_read(specs, pools, jnp.maximum(pages - 1, 0))


def places_in_the_wrong_order(specs, pools, pieces, sources, targets):
    return real_write(specs, pools, pieces, sources[::-1], targets)


def inputs_of_another_position(specs, checkpoints, copy, slot):
    moved = copy["recurrent"].replace(conv=jnp.roll(copy["recurrent"].conv, 1, axis=1))
    return real_state(specs, checkpoints, copy | {"recurrent": moved}, slot)


def no_state(specs, checkpoints, copy, slot):
    return checkpoints


BUGS = {
    "pages of the neighbour": ("read_pages", pages_of_the_neighbour),
    "places in the wrong order": ("write_pages", places_in_the_wrong_order),
    "inputs of another position": ("write_checkpoint", inputs_of_another_position),
    "no state": ("write_checkpoint", no_state),
}


def hits(engine):
    for seed, tokens in enumerate((PROMPT, OTHERS[0])):
        first = ask(engine, tokens, seed=seed)
        push_out(engine)
        ask(engine, (*first.tokens, 5, 6), seed=seed)
        push_out(engine)
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
    monkeypatch.setattr(blocks, *BUGS[bug])
    runner = victim.runner
    for program in BLOCK_COPIES:
        compiled = runner.blocks.lower(program, runner.state).compile()
        monkeypatch.setitem(runner.blocks._programs, program, compiled)
    victim.requests.clear()
    victim.scheduler.prefixes.clear()
    with pytest.raises(AssertionError):
        hits(victim)
        victim.check()
    victim.scheduler.prefixes.clear()
    assert all(request.finish is not Finish.RUNNING for request in victim.requests)
