"""The laws of the whole engine, against the one-request oracle of `oracle.py`.

1 speculation never changes output; 2 (in tests/sampling, and here in distribution); 3 neighbours,
rows, chunking and preemption change nothing; 4 depth of flight changes nothing; 5 a state rolled
back equals a state never advanced; 7 padding changes nothing, new rows inherit nothing; 8 nothing
compiles after warm-up. 6 and 9 are in tests/pallas and tests/models.
"""

import dataclasses
import itertools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import (
    FIXTURES,
    GREEDY,
    HYBRID,
    REPLAY,
    ROWS,
    SAMPLED,
    SNAPSHOT,
    Harness,
    continuations,
    expected,
    model,
    prompts,
)
from pairwise import pairwise, soak
from safetensors import safe_open

from jaxspec.models.layers.mamba2 import Mamba2
from jaxspec.options.draft_methods import MTPOptions
from jaxspec.pallas.gated_delta.replay import replayed_states
from jaxspec.pallas.mamba2.heads import Mamba2Ring
from jaxspec.pallas.mamba2.replay import replayed_states as mamba2_states
from jaxspec.pallas.recurrent.conv_ring import past_rows
from jaxspec.plan.plan import plan_layout
from jaxspec.regions import DecodeRegion
from jaxspec.requests.request import Finish
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.runner import model_runner
from jaxspec.runner.step import make_step

PROMPTS = prompts(6)
PREFIXED = dataclasses.replace(SAMPLED, presence_penalty=0.5, logit_bias={5: 1.0})
POLICIES = pytest.mark.parametrize("states", [SNAPSHOT, REPLAY], ids=["snapshot", "replay"])
HYBRIDS = pytest.mark.parametrize(
    ("fixture", "states"),
    [
        (name, policy)
        for name in (HYBRID, "qwen3_5_moe", "nemotron_h")
        for policy in (SNAPSHOT, REPLAY)
    ],
    ids=[
        *("snapshot", "replay", "experts", "experts replayed"),
        *("Mamba2 and experts", "Mamba2 and experts replayed"),
    ],
)
MIXED = (0.8, 0.5, 0.5)
SOME_IDS = tuple(np.random.default_rng(2).permutation(264)[:64].tolist())
RATES = {
    "mtp": None,
    "oracle-never": (0.0,) * 3,
    "oracle-mixed": MIXED,
    "oracle-always": (1.0,) * 3,
}


def requests_of(params):
    return [(prompt, params, seed) for seed, prompt in enumerate(PROMPTS)]


def harness(fixture, method, drafts, params, **options):
    accuracy = RATES[method]
    return Harness(
        fixture,
        drafts=drafts,
        accuracy=accuracy and accuracy[:drafts],
        continuations=continuations(fixture, requests_of(params)) if accuracy else (),
        vary=method == "oracle-mixed",
        feature_sets=(params.features,),
        **options,
    )


def run_with_arrivals(engine, params, arrivals_seed):
    """The requests arrive one by one while others run; rows move, chunks and verifies mix."""
    rng = np.random.default_rng(arrivals_seed)
    for prompt, _, seed in requests_of(params):
        engine.add(prompt, params, seed)
        for _ in range(rng.integers(0, 4)):
            engine.step()
    return engine.run()


def accepted(engine):
    return sum(request.metrics.num_accepted_tokens for request in engine.requests)


EVERY = [
    (*way, params)
    for way in [("mtp", 0), *itertools.product(RATES, (1, 3))]
    for params in (GREEDY, SAMPLED)
]
QUICK = [EVERY[0], *pairwise([*RATES], (1, 3), (GREEDY, SAMPLED))]
DEPTHS, CHUNKS = (0, 1, 2, 3), (1, 7, 64)


def name_of(value):
    return {id(GREEDY): "greedy", id(SAMPLED): "sampled"}.get(id(value), str(value))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    "method, drafts, params",
    [*QUICK, *(soak(*way) for way in EVERY if way not in QUICK)],
    ids=name_of,
)
def test_speculation_never_changes_output(method, drafts, params):
    """Laws 1, 3 and 4 on one hybrid, with random arrivals, each depth of flight and chunk size.

    Which depth meets which chunk size turns by the row, so that all of them meet.
    """
    number = EVERY.index((method, drafts, params))
    for depth in DEPTHS:
        pair = depth, CHUNKS[(depth + number) % 3]
        check_speculation(method, drafts, params, *pair)


@pytest.mark.soak
@pytest.mark.parametrize("method", RATES)
@pytest.mark.parametrize("depth, chunk", [*itertools.product(DEPTHS, CHUNKS)])
def test_speculation_never_changes_output_at_any_depth_with_any_chunk(method, depth, chunk):
    check_speculation(method, 3, GREEDY, depth, chunk)


def check_speculation(method, drafts, params, depth, chunk):
    engine = harness(HYBRID, method, drafts, params, max_in_flight=depth, chunk=chunk)
    run_with_arrivals(engine, params, 3 * depth + CHUNKS.index(chunk))
    assert engine.check() <= 1
    if method == "oracle-always":
        steps = sum(request.metrics.num_drafts for request in engine.requests)
        assert accepted(engine) > 0.8 * drafts * steps
    elif method == "oracle-never":
        assert accepted(engine) == 0
    elif method == "oracle-mixed" and drafts == 3:
        per_position = np.sum(
            [[*r.metrics.accepted_per_position, 0, 0, 0][:3] for r in engine.requests], axis=0
        )
        assert per_position.min() > 0


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method, drafts, params",
    [
        ("mtp", 3, SAMPLED),
        ("oracle-mixed", 3, GREEDY),
        ("oracle-always", 3, GREEDY),
        soak("mtp", 0, GREEDY),
        soak("mtp", 3, GREEDY),
        soak("oracle-never", 3, GREEDY),
    ],
    ids=name_of,
)
def test_speculation_never_changes_output_where_states_are_replayed(method, drafts, params):
    """The same, with folds every few tokens, each row's its own."""
    for depth, chunk in ((0, 7), (3, 1), (2, 64))[: 2 + (method == "oracle-mixed")]:
        engine = harness(
            HYBRID, method, drafts, params, max_in_flight=depth, chunk=chunk, states=REPLAY
        )
        run_with_arrivals(engine, params, depth)
        assert engine.check() <= 1


OTHERS = [
    ("qwen3_5_tied", "mtp", 3, SAMPLED),
    ("qwen3_5_vl", "oracle-mixed", 1, GREEDY),
    ("qwen3", "oracle-mixed", 3, GREEDY),
    ("qwen3_5_moe", "oracle-mixed", 3, GREEDY),
    ("llama", "oracle-mixed", 3, GREEDY),
    ("nemotron_h", "mtp", 3, GREEDY),
    ("mamba2", "oracle-mixed", 3, GREEDY),
    ("granitemoehybrid", "oracle-mixed", 3, GREEDY),
    ("deepseek_v3", "oracle-mixed", 3, GREEDY),
    ("deepseek_v32", "mtp", 3, SAMPLED),
    soak("deepseek_v3", "mtp", 3, SAMPLED),
    soak("deepseek_v32", "oracle-mixed", 3, GREEDY),
    soak("glm4_moe", "mtp", 3, SAMPLED),
    soak("bailing_hybrid", "mtp", 3, SAMPLED),
    soak("bailing_hybrid", "oracle-mixed", 3, GREEDY),
    soak("glm4_moe_lite", "oracle-mixed", 3, GREEDY),
    soak("granitemoehybrid", "oracle-mixed", 3, SAMPLED),
    soak("granite", "oracle-mixed", 3, SAMPLED),
    soak("qwen3_5_tied", "oracle-mixed", 3, SAMPLED),
    soak("qwen3_5_vl", "mtp", 1, SAMPLED),
    soak("qwen3", "oracle-always", 1, SAMPLED),
    soak("qwen3", "mtp", 0, GREEDY),
    soak("qwen3_5_moe", "mtp", 3, SAMPLED),
    soak("nemotron_h", "oracle-mixed", 3, SAMPLED),
]


@pytest.mark.soak
@pytest.mark.parametrize("fixture, method, drafts, params", OTHERS, ids=name_of)
def test_speculation_never_changes_output_of_other_models(fixture, method, drafts, params):
    """Each way of drafting with every depth and every chunk size; which meet turns by the row."""
    for depth in DEPTHS:
        chunk = CHUNKS[(depth + len(fixture)) % 3]
        engine = harness(fixture, method, drafts, params, max_in_flight=depth, chunk=chunk)
        run_with_arrivals(engine, params, depth)
        assert engine.check() <= 1


@pytest.mark.soak
def test_speculation_never_changes_output_over_8_bit_keys_and_values():
    """Nor do neighbours, chunks and depth: each request as plain decoding gives it alone."""
    kv_dtype = np.dtype("float8_e4m3fn")
    plain = Harness(HYBRID, max_in_flight=0, kv_dtype=kv_dtype)
    for prompt, params, seed in requests_of(GREEDY):
        plain.add(prompt, params, seed)
        plain.run()
    for depth, chunk in ((0, 7), (2, 1), (3, 64)):
        engine = harness(
            HYBRID, "oracle-mixed", 3, GREEDY, max_in_flight=depth, chunk=chunk,
            kv_dtype=kv_dtype,
        )  # fmt: skip
        run_with_arrivals(engine, GREEDY, depth)
        outputs = [[r.output for r in each.requests] for each in (plain, engine)]
        assert outputs[0] == outputs[1]
        assert accepted(engine) > 0


RUNS = [  # fixture, drafts, policy
    ("qwen3_5", "mtp", 3, "snapshot"),
    ("qwen3_moe", "mtp", 0, "snapshot"),
    ("llama", "oracle-mixed", 3, "snapshot"),
    ("qwen3_5_moe", "oracle-mixed", 3, "replay"),
    ("qwen3_next", "mtp", 0, "snapshot"),
    ("nemotron_h", "oracle-mixed", 3, "replay"),
    ("nemotron_h_latent", "mtp", 0, "snapshot"),
    ("mamba2", "oracle-mixed", 3, "snapshot"),
    ("granitemoehybrid", "oracle-mixed", 3, "snapshot"),
    ("deepseek_v3", "mtp", 3, "snapshot"),
    ("deepseek_v32", "mtp", 3, "snapshot"),
    ("glm4_moe", "mtp", 3, "snapshot"),
    ("glm4_moe_lite", "mtp", 3, "snapshot"),
    ("bailing_hybrid", "mtp", 3, "replay"),
]
OTHER_RUNS = [
    ("qwen3_5_tied", "mtp", 3, "snapshot"),
    ("qwen3_5_vl", "mtp", 3, "snapshot"),
    ("qwen3_5_moe_vl", "mtp", 3, "replay"),
    ("qwen3", "mtp", 0, "snapshot"),
    ("llama", "mtp", 0, "snapshot"),
    ("llama_draft", "mtp", 0, "snapshot"),
    ("granite", "oracle-mixed", 3, "snapshot"),
    *itertools.product(("deepseek_v3", "deepseek_v32"), ("mtp",), (0,), ("snapshot",)),
    *itertools.product(("glm4_moe", "glm4_moe_lite"), ("mtp",), (0,), ("snapshot",)),
    *itertools.product(("mamba2", "granitemoehybrid"), ("mtp",), (0,), ("snapshot", "replay")),
    *itertools.product(
        ("qwen3_5_moe", "qwen3_next", "nemotron_h", "nemotron_h_latent", "bailing_hybrid"),
        ("mtp",),
        (0, 3),
        ("snapshot", "replay"),
    ),
]


def reference_of(fixture):
    """The prompt of a fixture, and the greedy ids that transformers gave."""
    with safe_open(FIXTURES / fixture / "reference.safetensors", "np") as file:
        return [file.get_tensor(name).tolist() for name in ("prompt_ids", "greedy_ids")]


@pytest.mark.parametrize("fixture", dict.fromkeys(name for name, *_ in RUNS + OTHER_RUNS))
def test_the_oracle_gives_the_ids_of_the_reference(fixture):
    prompt, greedy = reference_of(fixture)
    params = SamplingParams(temperature=0.0, max_tokens=len(greedy))
    assert not expected(fixture, tuple(prompt), params, 0).check(greedy)


@pytest.mark.soak
@pytest.mark.parametrize(
    "fixture, method, drafts, policy",
    [*RUNS, *(soak(*run) for run in OTHER_RUNS if run not in RUNS)],
)
def test_greedy_ids_equal_the_reference(fixture, method, drafts, policy):
    """What transformers gave, through chunked prefill, with drafts of the head or of the oracle."""
    prompt, greedy = reference_of(fixture)
    states = SNAPSHOT if policy == "snapshot" else REPLAY
    rates = RATES[method] and {
        "accuracy": RATES[method],
        "continuations": [(*prompt, *greedy)],
        "vary": True,
    }
    engine = Harness(fixture, drafts=drafts, chunk=33, states=states, **(rates or {}))
    params = SamplingParams(temperature=0.0, max_tokens=len(greedy))
    engine.add(prompt, params)
    engine.run()
    assert engine.requests[0].output == greedy


@pytest.mark.soak
def test_the_widest_verify_changes_no_output():
    """K = 8, drafts right often enough that whole verifies stand."""
    known = continuations(HYBRID, requests_of(GREEDY))
    engine = Harness(HYBRID, drafts=8, accuracy=(0.95,) * 8, continuations=known)
    run_with_arrivals(engine, GREEDY, 0)
    assert engine.check() <= 1
    assert max(len(r.metrics.accepted_per_position) for r in engine.requests) == 8


@pytest.mark.soak
def test_a_draft_vocabulary_never_changes_output():
    """Laws 1, 3 and 4, with drafts from 64 of 264 ids, the first ones or a list.

    Few stand, by a head that was not trained: test_llm.py has one that was, and greedy text.
    """
    for depth, chunk, vocab in ((0, 1, SOME_IDS), (1, 7, 64), (2, 64, SOME_IDS), (3, 7, SOME_IDS)):
        engine = harness(
            HYBRID,
            "mtp",
            3,
            SAMPLED,
            max_in_flight=depth,
            chunk=chunk,
            options=MTPOptions(vocab),
        )
        assert run_with_arrivals(engine, SAMPLED, depth).check() <= 1
        # Each id brings a column of 64 float32, and itself.
        assert engine.runner.memory()["proposer_tables"] == 64 * (64 + 1) * 4


@pytest.mark.soak
def test_a_draft_head_in_8_bits_never_changes_output():
    """Laws 1, 3 and 4, with drafts from a copy of the head that is rounded, or of a part of it."""
    for depth, chunk, vocab in ((0, 7, None), (2, 64, SOME_IDS)):
        engine = harness(
            HYBRID, "mtp", 3, SAMPLED, max_in_flight=depth, chunk=chunk,
            options=MTPOptions(vocab, "float8_e4m3fn"),
        )  # fmt: skip
        assert run_with_arrivals(engine, SAMPLED, depth).check() <= 1
        # A scale, and for each id a column of 64 bytes, and itself where they are chosen.
        ids, own = (264, 0) if vocab is None else (64, 4)
        assert engine.runner.memory()["proposer_tables"] == 4 + ids * (64 + own)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "method, drafts, params, options",
    [
        ("mtp", 0, GREEDY, {"max_in_flight": 0}),
        ("oracle-mixed", 3, SAMPLED, {"states": REPLAY, "chunk": 7}),
        ("mtp", 3, GREEDY, {"num_pages": 16}),
    ],
    ids=["plain", "drafts", "head"],
)
def test_several_steps_at_once_change_no_output(method, drafts, params, options):
    params = dataclasses.replace(params, max_tokens=24)
    engine = harness(HYBRID, method, drafts, params, steps_per_dispatch=2, **options)
    engine.engine.trace = []
    assert run_with_arrivals(engine, params, 2).check() <= 1
    dispatched = [times.program.num_steps for times in engine.engine.trace]
    assert set(dispatched) == {1, 2} and dispatched.count(2) >= 3
    assert engine.engine.metrics.num_steps == sum(dispatched)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "depth, chunk, num_pages, vocab",
    [(0, 1, 400, None), (3, 7, 400, None), (2, 64, 16, None), (3, 7, 400, SOME_IDS)],
    ids=["chunks", "flight", "preemption", "vocabulary"],
)
def test_what_the_head_drafts_depends_on_the_request_alone(depth, chunk, num_pages, vocab):
    """The draft head's keys and values survive rejection, chunking and preemption: same drafts."""
    params = SAMPLED if vocab else GREEDY
    alone = harness(HYBRID, "mtp", 3, params, max_in_flight=0, options=MTPOptions(vocab))
    engine = harness(
        HYBRID, "mtp", 3, params, max_in_flight=depth, chunk=chunk, num_pages=num_pages,
        options=MTPOptions(vocab),
    )  # fmt: skip
    drafts = []
    for each in (alone, engine):
        drafts.append({})
        for prompt, _, seed in requests_of(params):
            request = each.add(prompt, params, seed)[0]
            while not request.finish:
                each.step()
                rows = jax.tree.map(np.asarray, each.runner.state.rows)
                for row in np.flatnonzero(rows.slot == request.slot) if request.slot else ():
                    if rows.num_drafts[row] and not rows.finish[row]:
                        place = (prompt, int(rows.num_computed[row]))
                        drafts[-1][place] = rows.drafts[row].tolist()
    shared = set(drafts[0]) & set(drafts[1])
    assert len(shared) > 30
    wrong = [place for place in shared if drafts[0][place] != drafts[1][place]]
    assert len(wrong) <= 1  # a tie of the head's scores
    drafted = {token for each in drafts for tokens in each.values() for token in tokens}
    assert drafted <= set(vocab or range(264)) and len(drafted) > 10


@pytest.mark.soak
def test_top_k_and_top_p_never_depend_on_speculation():
    params = SamplingParams(temperature=0.9, top_k=20, top_p=0.9, max_tokens=12)
    engine = harness(HYBRID, "mtp", 3, params)
    assert run_with_arrivals(engine, params, 0).check() <= 1


@pytest.mark.few(1)
@POLICIES
@pytest.mark.parametrize("accuracy", [MIXED, None], ids=["oracle", "mtp"])
def test_samples_of_one_prompt_fork_and_equal_requests_of_their_own(accuracy, states):
    """Rows that begin with num_computed > 0: prompt 11, computed 10, in a verify of width 1 + K."""
    params = dataclasses.replace(SAMPLED, n=3)
    single = dataclasses.replace(SAMPLED, n=1)
    prompt = tuple(range(100, 111))
    known = continuations(HYBRID, [(prompt, single, seed) for seed in (5, 6, 7)])
    engine = Harness(
        drafts=3,
        accuracy=accuracy,
        continuations=known,
        feature_sets=(SAMPLED.features,),
        states=states,
    )
    forks, dispatch = [], engine.runner.dispatch

    def spy(plan):
        values = plan_layout(plan.program, engine.buckets).unpack(plan.packed)
        forks.extend(zip(values["target_tables"], values["source_pages"], strict=True))
        return dispatch(plan)

    engine.runner.dispatch = spy
    engine.add(PROMPTS[0], SAMPLED, 1)
    engine.add(prompt, params, 5)
    engine.add(PROMPTS[1], SAMPLED, 2)
    engine.run()
    forks = [(np.count_nonzero(table), page) for table, page in forks if table.any()]
    assert len(forks) == 2 and all(pages == 3 and page for pages, page in forks)
    for request in engine.requests:
        request.params = single
    assert engine.check() <= 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fixture", "states"),
    [(HYBRID, SNAPSHOT), (HYBRID, REPLAY), ("nemotron_h", REPLAY)],
    ids=["snapshot", "replay", "Mamba2 and experts replayed"],
)
def test_preemption_changes_no_token(fixture, states):
    """Too few pages for all: requests lose theirs, wait for what is in flight, and start again."""
    for depth in (0, 2):
        engine = harness(
            fixture,
            "oracle-mixed",
            3,
            GREEDY,
            num_pages=16,
            max_in_flight=depth,
            states=states,
        )
        run_with_arrivals(engine, GREEDY, depth)
        assert engine.scheduler.num_preemptions > 0
        assert engine.check() <= 1
        assert engine.scheduler.pages.num_free == 15


def replayed_of_mamba2(model):
    """`replayed_states` of Mamba2's layers, each with the rates of its own."""
    mixers = (layer.mixer for layer in model.trunk.layers)
    rates = [-jnp.exp(mixer.rates[:, 0]) for mixer in mixers if isinstance(mixer, Mamba2)]
    return lambda states, ring, layer, rows: mamba2_states(states, ring, rates[layer], layer, rows)


def true_states(engine, row):
    """A row's recurrent states, of every layer, as the next step would start from them."""
    state = engine.runner.state
    pool, rows = state.pools["recurrent"], state.rows
    slot, offset = int(rows.slot[row]), int(rows.state_offset[row])
    if pool.ring is None:
        return np.asarray(pool.states[:, slot, offset])
    fields = rows.slot, rows.num_computed, rows.num_drafts, rows.state_offset, rows.ring_length
    region = DecodeRegion(*(x[row : row + 1] for x in fields))
    is_mamba2 = isinstance(pool.ring, Mamba2Ring)
    replayed = replayed_of_mamba2(model(engine.fixture)) if is_mamba2 else replayed_states
    layers = range(pool.states.shape[0])
    return np.stack([replayed(pool.states, pool.ring, layer, region)[0] for layer in layers])


@pytest.mark.few(1)
@HYBRIDS
def test_a_state_rolled_back_equals_a_state_never_advanced(fixture, states):
    """Law 5: the state that acceptance selected is the one plain decoding has at that length."""
    plain = Harness(fixture)
    drafted = harness(fixture, "oracle-mixed", 3, GREEDY, states=states)
    histories = []
    for engine in (plain, drafted):
        engine.add(PROMPTS[2], GREEDY, 2)
        history, specs = {}, {spec.name: spec for spec in engine.runner._holdings.specs}
        while engine.engine.has_work:
            engine.step()
            state = engine.runner.state
            rows = jax.tree.map(np.asarray, state.rows)
            for row in range(ROWS):
                slot, computed = int(rows.slot[row]), int(rows.num_computed[row])
                if slot and not rows.finish[row]:
                    conv, taps = state.pools["recurrent"].conv, specs["recurrent"].conv.taps
                    read = past_rows(jnp.array([computed]), taps - 1, conv.shape[2])[0]
                    inputs = np.asarray(conv[:, slot, read])
                    history[computed] = true_states(engine, row), inputs
        histories.append(history)
    shared = sorted(set(histories[0]) & set(histories[1]))
    assert len(shared) >= 4 and len(shared) < len(histories[0])
    for length in shared:
        chex.assert_trees_all_close(histories[0][length], histories[1][length], atol=2e-5)


@pytest.mark.few(1)
@POLICIES
def test_after_a_stop_inside_accepted_drafts_the_true_state_is_still_known(states):
    """What was accepted behind the stop is no part of the row: its state stands at its counts."""
    plain = Harness(HYBRID)
    plain.add(PROMPTS[2], GREEDY, 2)
    history = {}
    while plain.engine.has_work:
        plain.step()
        state = plain.runner.state
        if int(state.rows.slot[0]):
            history[int(state.rows.num_computed[0])] = true_states(plain, 0)
    output = plain.requests[0].output
    stops = [stop for i, stop in enumerate(output) if stop not in output[:i]][1:]
    engine, num_inside = harness(HYBRID, "oracle-always", 3, GREEDY, states=states), 0
    for stop in stops:
        (request,) = engine.add(PROMPTS[2], GREEDY, 2, stop_ids=(stop,))
        engine.run()
        state = engine.runner.state
        computed = int(state.rows.num_computed[0])
        assert request.finish is Finish.STOP and computed == len(request.tokens) - 1
        chex.assert_trees_all_close(true_states(engine, 0), history[computed], atol=2e-5)
        num_inside += len(request.output) % 4 != 1  # a prompt gives one token, each verify 4
    assert num_inside >= 3


@pytest.mark.few(1)
@HYBRIDS
def test_a_reused_slot_and_padding_leave_no_trace(fixture, states):
    """Law 7, bit for bit: after other requests, and among padding, a request gives the same."""
    is_first = fixture == HYBRID
    method, params = ("mtp", SAMPLED) if is_first else ("oracle-mixed", GREEDY)
    engine = harness(fixture, method, 3, params, states=states)
    engine.add(PROMPTS[3], params, 3)
    fresh = engine.run().requests[0].output
    state = engine.runner.state
    poisoned = jax.tree.map(
        lambda x: x if x.dtype == np.int32 else np.full(x.shape, 77.0, x.dtype), state.pools
    )
    engine.runner._state = state.replace(pools=poisoned)
    run_with_arrivals(engine, params, 9)
    engine.add(PROMPTS[3], params, 3)
    assert engine.run().requests[-1].output == fresh
    assert engine.check() <= 1


@pytest.mark.few(1)
@HYBRIDS
def test_a_row_that_turns_nan_ends_with_an_error_and_harms_no_other(fixture, states):
    engine = harness(fixture, "oracle-mixed", 3, GREEDY, states=states)
    victim = engine.add(PROMPTS[0], GREEDY, 0)[0]
    engine.add(PROMPTS[1], GREEDY, 1)
    for _ in range(5):
        engine.step()
    state = engine.runner.state
    pool = state.pools["recurrent"]
    poison = pool.replace(states=pool.states.at[:, victim.slot].set(np.nan))
    engine.runner._state = state.replace(pools=state.pools | {"recurrent": poison})
    engine.run()
    assert victim.finish is Finish.ERROR
    assert all(0 <= token < engine.vocab_size for token in victim.output)
    engine.requests.remove(victim)
    engine.add(PROMPTS[0], GREEDY, 0)  # in the slot that held the NaN
    engine.run()
    assert engine.check() <= 1


@pytest.mark.few(1)
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_stop_id_ends_at_the_same_token(params):
    """On the device, inside a verify: what was accepted behind it is dropped."""
    wanted = continuations(HYBRID, [(PROMPTS[2], params, 2)])[0][len(PROMPTS[2]) :]
    stop = wanted[6]
    for method in ("mtp", "oracle-always"):
        engine = harness(HYBRID, method, 3, params)
        request = engine.add(PROMPTS[2], params, 2, stop_ids=(stop,))[0]
        engine.run()
        assert request.finish is Finish.STOP
        assert request.output == list(wanted[: wanted.index(stop) + 1])
        waits = dataclasses.replace(params, min_tokens=9)
        late = engine.add(PROMPTS[2], waits, 2, stop_ids=(stop,))[0]
        engine.run()
        assert len(late.output) >= 9 and stop not in late.output[:8]
        assert engine.check() <= 1


REPORTED = dataclasses.replace(GREEDY, logprobs=2, prompt_logprobs=0)
RICH = dataclasses.replace(PREFIXED, top_k=5, logprobs=2, prompt_logprobs=0)
FOUR_KINDS = [GREEDY, dataclasses.replace(SAMPLED, top_k=5), PREFIXED, REPORTED]


@pytest.mark.parametrize(
    "kinds", [[GREEDY, RICH], soak(FOUR_KINDS)], ids=["a plain and a rich kind", "four kinds"]
)
def test_after_warm_up_nothing_compiles(kinds, monkeypatch):
    """Law 8: no compilation is heard over a random walk, and no step is traced again."""
    chex.clear_trace_counter()
    monkeypatch.setattr(
        model_runner,
        "jitted_step",
        lambda config, program: jax.jit(
            chex.assert_max_traces(make_step(config, program), n=1), donate_argnums=2
        ),
    )
    feature_sets = [params.features for params in kinds]
    engine = Harness(HYBRID, drafts=3, feature_sets=feature_sets, num_pages=24)
    heard = []

    def listen(event, duration, **_):
        if "compile" in event or "trace" in event:
            heard.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        rng = np.random.default_rng(0)
        for number in range(30):
            params = dataclasses.replace(kinds[number % len(kinds)], n=1 + number % 2)
            engine.add(PROMPTS[number % len(PROMPTS)], params, number)
            for _ in range(rng.integers(0, 6)):
                engine.step()
            if number % 10 == 9:
                engine.scheduler.end(engine.scheduler.running[0], Finish.ABORT)
        engine.run()
        assert engine.scheduler.num_preemptions > 0
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    assert heard == []
