"""L14: the experts that an engine returns are those that its tokens were routed to.

Replayed in the differentiable forward they give the sampler's logprobs. However a token was
computed (in a prompt, from a cached prefix, as an accepted draft, again after a preemption, in a
fork), its experts are those of an engine that computes one token after the other.
"""

import asyncio
import dataclasses
import gc

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import FIXTURES
from pairwise import soak
from tokenizer_folders import with_bytes

import jaxspec
from jaxspec import LLM, AsyncLLM, SamplingParams, transfer
from jaxspec.cache import RoutedExperts
from jaxspec.pallas.moe import routes
from jaxspec.requests.request import RoutedTokens
from jaxspec.runner.page_reader import RouteRecorder

pytestmark = pytest.mark.soak

LONG = True
LENGTH = 96
SIZES = {
    "dtype": "float32",
    "max_num_seqs": 4,
    "decode_buckets": [4],
    "prefill_buckets": [32],
    "max_model_len": LENGTH,
    "page_size": 4,
    "show_progress": False,
    "enable_return_routed_experts": True,
}
PLAIN = {"speculative_config": None, "enable_prefix_caching": False, "max_in_flight": 0}
DRAFTS = {"method": "suffix", "num_speculative_tokens": 3}  # from earlier outputs
RANDOM = np.random.default_rng(1)
PROMPTS = [RANDOM.integers(5, 250, n).tolist() for n in (21, 9, 13, 4, 30, 17)]
COUNTS = "num_accepted_tokens", "num_draft_tokens"
GREEDY = SamplingParams(temperature=0.0, max_tokens=40, logprobs=0)
SAMPLED = SamplingParams(temperature=0.7, seed=5, max_tokens=24, logprobs=0)


@pytest.fixture(scope="module")
def plain():
    """One token after the other."""
    with LLM(FIXTURES / "qwen3_5_moe", **SIZES | PLAIN) as llm:
        yield llm


@pytest.fixture(scope="module")
def busy():
    """Drafts, cached prefixes, host memory, and too few pages."""
    options = {"speculative_config": DRAFTS, "num_pages": 42, "kv_offloading_size": 0.01}
    with LLM(FIXTURES / "qwen3_5_moe", **SIZES | options) as llm:
        llm.session.scheduler.prefixes.min_uncached = 1
        yield llm


@pytest.fixture(scope="module")
def replay(plain):
    made = jaxspec.differentiable(plain)
    logprobs = jax.jit(made.logprobs)
    return lambda text, experts: replayed(made.params, logprobs, text, experts)


def replayed(params, logprobs, text, experts):
    tokens = np.zeros((1, LENGTH), np.int32)
    tokens[0, : len(text)] = text
    wide = np.zeros((1, LENGTH - 1, *experts.shape[1:]), experts.dtype)
    wide[0, : len(experts)] = experts
    found = logprobs(params, tokens, np.array([len(text)]), routed_experts=wide)
    return np.asarray(found)[0, : len(text) - 1]


def asked(llm, prompts, params):
    return llm.generate([{"prompt_token_ids": each} for each in prompts], params, use_tqdm=False)


def samples(outputs):
    """The text, the output and its logprobs of each sample."""
    for output in outputs:
        for sample in output.outputs:
            yield [*output.prompt_token_ids, *sample.token_ids], sample


def check(llm, plain, prompts, params):
    """Both engines have the same texts and experts."""
    found, want = asked(llm, prompts, params), asked(plain, prompts, params)
    for (text, sample), (other, wanted) in zip(samples(found), samples(want), strict=True):
        assert text == other
        assert sample.routed_experts.dtype == np.uint8
        np.testing.assert_array_equal(sample.routed_experts, wanted.routed_experts)
    return found


FAMILIES = [
    "nemotron_h_latent",
    *map(soak, ("qwen3_moe", "qwen3_next", "granitemoehybrid", "deepseek_v3", "glm4_moe")),
]


def check_replay(llm, replay, spec):
    for text, sample in samples(asked(llm, PROMPTS[:3], SAMPLED)):
        experts = sample.routed_experts
        assert experts.shape == (len(text) - 1, spec.layers, spec.top_k)
        start, want = len(text) - len(sample.token_ids) - 1, sample.token_logprobs
        np.testing.assert_allclose(replay(text, experts)[start:], want, rtol=0, atol=2e-5)
        others = (experts + 1) % spec.num_experts
        assert np.abs(replay(text, others)[start:] - want).max() > 1e-3


def test_replayed_experts_give_the_logprobs_of_the_sampler(plain, replay):
    check_replay(plain, replay, plain._runner.model().routes_spec())


def test_an_expert_that_the_model_lacks_gives_nan(plain, replay):
    ((text, sample),) = samples(asked(plain, PROMPTS[:1], SAMPLED))
    experts = sample.routed_experts.copy()
    experts[10, 0, 1] = plain._runner.model().routes_spec().num_experts
    assert np.isnan(replay(text, experts)[10:]).all()


def test_gradients_reach_the_router_through_replayed_experts():
    """They are those without a replay if the experts are the same."""
    with LLM(FIXTURES / "qwen3_moe", **SIZES | PLAIN) as llm:
        ((text, sample),) = samples(asked(llm, PROMPTS[:1], SAMPLED))
        made = jaxspec.differentiable(llm)
        tokens, lengths = np.array([text]), np.array([len(text)])

        @jax.jit
        def gradient(params, experts):
            def total(params):
                found = made.logprobs(params, tokens, lengths, routed_experts=experts)
                return found.sum()

            return jax.grad(total)(params)

        replayed = gradient(made.params, sample.routed_experts[None])
        own = gradient(made.params, None)
        jax.tree.map(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-4), replayed, own
        )
        routers = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(replayed)
            if "router" in jax.tree_util.keystr(path)
        ]
        assert routers and all(np.abs(leaf).max() > 1e-3 for leaf in routers)


@pytest.mark.parametrize("family", FAMILIES)
def test_each_family_with_experts_returns_them(family):
    with LLM(FIXTURES / family, **SIZES | PLAIN) as llm:
        made = jaxspec.differentiable(llm)
        logprobs = jax.jit(made.logprobs)
        check_replay(
            llm,
            lambda text, experts: replayed(made.params, logprobs, text, experts),
            llm._runner.model().routes_spec(),
        )


def test_accepted_drafts_have_the_experts_of_tokens_and_rejected_ones_leave_none(busy, plain):
    check(busy, plain, PROMPTS, GREEDY)  # no text is like an earlier one
    found = check(busy, plain, PROMPTS, GREEDY)
    counts = [sample.metrics for _, sample in samples(found)]
    assert sum(each.num_accepted_tokens for each in counts) > 50
    found = check(busy, plain, PROMPTS, dataclasses.replace(SAMPLED, temperature=0.2))
    counts = [sample.metrics for _, sample in samples(found)]
    accepted, drafted = (sum(getattr(each, name) for each in counts) for name in COUNTS)
    assert 0 < accepted < drafted


def test_cached_prefixes_forks_and_preempted_requests_keep_theirs(busy, plain):
    before = busy.metrics()
    params = dataclasses.replace(SAMPLED, n=3)
    for _ in range(2):
        check(busy, plain, [PROMPTS[4], PROMPTS[4] + PROMPTS[1], PROMPTS[0]], params)
    after = busy.metrics()
    assert after["num_preemptions"] > before["num_preemptions"]
    hits = [each["prefix_cache"]["num_hits"] for each in (before, after)]
    assert hits[1] > hits[0]


def test_pages_that_come_back_from_host_memory_bring_them(busy, plain):
    host = [busy.metrics()["prefix_cache"]["host"]]
    check(busy, plain, PROMPTS, SAMPLED)
    check(busy, plain, PROMPTS, dataclasses.replace(SAMPLED, seed=6))
    check(busy, plain, PROMPTS, SAMPLED)
    host.append(busy.metrics()["prefix_cache"]["host"])
    assert host[1] != host[0], host


def test_an_exported_request_takes_them_along(busy, plain):
    prompt = {"prompt_token_ids": PROMPTS[0]}
    ((sample,),) = busy.prepare([prompt], [GREEDY])
    stream = busy.session.stream(sample)
    next(stream)
    state = transfer.RequestState.from_bytes(busy.export_request(sample.request_id).to_bytes())
    *_, last = busy.import_request(state)
    ((want,),) = [each.outputs for each in asked(plain, PROMPTS[:1], GREEDY)]
    np.testing.assert_array_equal(last.routed_experts, want.routed_experts)


def test_an_aborted_sample_has_those_of_its_tokens(busy, plain):
    ((sample,),) = busy.prepare([{"prompt_token_ids": PROMPTS[0]}], [GREEDY])
    assert sample.output().routed_experts is None
    busy.session.add([sample])
    while sample.request.num_output < 8:
        busy.session.step()
    assert sample.output().routed_experts is None
    busy.session.abort([sample])
    found, (output,) = sample.output(), asked(plain, PROMPTS[:1], GREEDY)
    want = output.outputs[0]
    count = len(PROMPTS[0]) + len(found.token_ids) - 1
    assert found.finish_reason == "abort" and 8 <= len(found.token_ids) < len(want.token_ids)
    np.testing.assert_array_equal(found.routed_experts, want.routed_experts[:count])


@pytest.mark.parametrize("start", [0, 3, 8, 12, 20, 21, 500])
def test_a_request_chooses_from_which_token_of_the_prompt_on_it_has_them(plain, start):
    """The page that the prompt ends in, pages before it, and none of the prompt."""
    params = dataclasses.replace(SAMPLED, routed_experts_prompt_start=start)
    (want,), (found,) = (asked(plain, PROMPTS[:1], each)[0].outputs for each in (SAMPLED, params))
    first = min(start, len(PROMPTS[0]))
    np.testing.assert_array_equal(found.routed_experts, want.routed_experts[first:])
    ((sample,),) = plain.prepare([{"prompt_token_ids": PROMPTS[0][:20]}], [params])
    plain.session.add([sample])
    while sample.request.is_prefilling or not sample.request.slot:
        plain.session.step()
    plain.session.abort([sample])
    experts, count = sample.output().routed_experts, len(sample.request.tokens) - 1
    assert len(experts) == max(0, count - min(start, 20))


def test_copies_on_the_host_are_counted_until_their_requests_are_dropped(plain):
    outputs = asked(plain, PROMPTS[:1], SAMPLED)
    page = plain.shapes.page_size * outputs[0].outputs[0].routed_experts[0].nbytes
    gc.collect()
    before = plain.metrics()["routed_experts_host_bytes"]
    ((sample,),) = plain.prepare([{"prompt_token_ids": PROMPTS[0]}], [SAMPLED])
    deltas = list(plain.session.stream(sample))
    held = plain.metrics()["routed_experts_host_bytes"] - before
    assert held >= len(deltas[-1].routed_experts) // plain.shapes.page_size * page
    del sample
    gc.collect()
    assert plain.metrics()["routed_experts_host_bytes"] == before


def test_steps_go_on_while_the_experts_of_one_sample_are_copied(plain, monkeypatch):
    """Its last delta follows once they are there, or with the last step."""
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in (2, 12)]
    groups = plain.prepare([{"prompt_token_ids": each} for each in PROMPTS[:2]], params)
    samples, ends, steps = [sample for group in groups for sample in group], [], []
    step = plain.session.engine.step
    monkeypatch.setattr(RoutedTokens, "is_ready", property(lambda self: len(steps) > 8))
    monkeypatch.setattr(plain.session.engine, "step", lambda: steps.append(1) or step())
    for delta in plain.session.stream(*samples):
        if delta.finish_reason:
            ends.append((len(steps), delta.routed_experts))
    (first, experts), (last, _) = ends
    assert 8 < first < last
    assert len(experts) == len(PROMPTS[0]) + 1


def preempted(llm, num_output):
    """A sample with about so many tokens, back in the queue."""
    ((sample,),) = llm.prepare([{"prompt_token_ids": PROMPTS[4]}], [GREEDY])
    llm.session.add([sample])
    while sample.request.num_output < num_output:
        llm.session.step()
    llm.session.in_turn(lambda: llm.session.scheduler.preempt(sample.request))
    return sample


def test_one_that_ends_while_it_is_computed_again_has_those_of_its_tokens(plain):
    sample = preempted(plain, 20)
    plain.session.step()
    assert sample.request.generation == 2 and sample.request.is_prefilling
    plain.session.abort([sample])
    found, (output,) = sample.output(), asked(plain, PROMPTS[4:5], GREEDY)
    count = len(PROMPTS[4]) + len(found.token_ids) - 1
    assert found.finish_reason == "abort"
    np.testing.assert_array_equal(found.routed_experts, output.outputs[0].routed_experts[:count])


def test_copies_of_before_a_failed_step_are_not_read(plain, monkeypatch):
    def fails(*_):
        raise RuntimeError("planted")

    sample = preempted(plain, 20)
    with monkeypatch.context() as planted:
        planted.setattr(RoutedTokens, "between", fails)  # as a copy that waits for a failed step
        planted.setattr(plain._runner, "dispatch", fails)
        with pytest.raises(RuntimeError):
            plain.session.step()
        found = sample.output()
    assert found.finish_reason == "error" and found.routed_experts is None


@pytest.mark.parametrize("stop", [None, "text"])
def test_a_stream_has_them_in_the_last_delta_of_each_sample(tmp_path, plain, stop):
    """Also if a stop string ends it, which the reader finds and not the engine."""
    folder = with_bytes("qwen3_5_moe", tmp_path)
    params = dataclasses.replace(SAMPLED, n=2)
    ((*wants,),) = [each.outputs for each in asked(plain, PROMPTS[:1], params)]

    async def run():
        async with AsyncLLM(folder, **SIZES | {"speculative_config": DRAFTS}) as llm:
            own = dataclasses.replace(params)
            if stop is not None:
                text = llm.tokenizer.decode(wants[0].token_ids)
                own.stop = [text[5:8]]
            stream = await llm.submit({"prompt_token_ids": PROMPTS[0]}, own)
            return [delta async for delta in stream]

    deltas = asyncio.run(run())
    tokens = {0: [], 1: []}
    for delta in deltas:
        tokens[delta.index] += delta.token_ids
        assert (delta.routed_experts is None) == (delta.finish_reason is None)
        if delta.finish_reason is not None:
            want = wants[delta.index]
            count = len(tokens[delta.index])
            assert tokens[delta.index] == want.token_ids[:count]
            experts = want.routed_experts[: len(PROMPTS[0]) + count - 1]
            np.testing.assert_array_equal(delta.routed_experts, experts)
    reasons = [delta.finish_reason for delta in deltas if delta.finish_reason]
    assert len(reasons) == 2 and ("stop" in reasons) == (stop is not None)


@pytest.mark.devices
@pytest.mark.parametrize("whole", [False, True])
def test_devices_that_share_the_experts_return_them_once(plain, whole):
    options = {"tensor_parallel_size": 2, "enable_expert_parallel": whole}
    with LLM(FIXTURES / "qwen3_5_moe", **SIZES | PLAIN | options) as llm:
        check(llm, plain, PROMPTS[:2], SAMPLED)


def test_replicas_send_them(tmp_path, plain):
    """Also of samples that the reader ends by a stop string."""
    folder = with_bytes("qwen3_5_moe", tmp_path)
    wants = [sample for _, sample in samples(asked(plain, PROMPTS[:3], SAMPLED))]
    with LLM(folder, **SIZES | {"speculative_config": None, "data_parallel_size": 2}) as llm:
        stop = llm.tokenizer.decode(wants[0].token_ids)[5:8]
        found = asked(llm, PROMPTS[:3], dataclasses.replace(SAMPLED, stop=[stop]))
    reasons = []
    for (text, sample), want in zip(samples(found), wants, strict=True):
        reasons.append(sample.finish_reason)
        assert sample.token_ids == want.token_ids[: len(sample.token_ids)]
        np.testing.assert_array_equal(sample.routed_experts, want.routed_experts[: len(text) - 1])
    assert "stop" in reasons


def test_an_engine_without_the_option_has_no_pool_and_no_experts():
    options = SIZES | PLAIN | {"enable_return_routed_experts": False}
    with LLM(FIXTURES / "qwen3_5_moe", **options) as llm:
        assert RoutedExperts.name not in llm._runner.state.pools
        assert RoutedExperts.name not in llm._runner.memory()
        assert not any(isinstance(each, RouteRecorder) for each in llm.session.scheduler.observers)


def test_dense_models_have_none():
    with pytest.raises(ValueError):
        LLM(FIXTURES / "qwen3_5", **SIZES)


# Planted bugs


def by_row_of_the_step(pools, kv_slots, layers):
    return written(pools, kv_slots, [jnp.roll(experts, 1, axis=0) for experts in layers])


def layers_reversed(pools, kv_slots, layers):
    return written(pools, kv_slots, layers[::-1])


def drafts_have_none(pools, kv_slots, layers):
    """Of a decode row the first token alone."""
    place = jnp.arange(kv_slots.shape[0])
    is_draft = (place < 4 * SIZES["max_num_seqs"]) & (place % 4 > 0)
    return written(pools, jnp.where(is_draft, -1, kv_slots), layers)


written = RoutedExperts.write


@pytest.mark.parametrize(
    "bug", [by_row_of_the_step, *map(soak, (layers_reversed, drafts_have_none))]
)
def test_a_planted_bug_is_seen(bug, plain, monkeypatch, fresh_programs):
    wanted = [sample for _, sample in samples(asked(plain, PROMPTS[:2], GREEDY))]
    monkeypatch.setattr(RoutedExperts, "write", staticmethod(bug))
    with LLM(FIXTURES / "qwen3_5_moe", **SIZES | {"speculative_config": DRAFTS}) as llm:
        asked(llm, PROMPTS[:2], GREEDY)
        found = samples(asked(llm, PROMPTS[:2], GREEDY))  # with drafts, and on cached prefixes
        for (_, sample), want in zip(found, wanted, strict=True):
            assert sample.token_ids == want.token_ids
            assert (sample.routed_experts != want.routed_experts).any()


def test_experts_are_recorded_where_they_are_wanted_alone():
    with routes.recorded() as found:
        routes.record(jnp.zeros((2, 3), jnp.int32), 2)
    routes.record(jnp.zeros((2, 3), jnp.int32), 2)
    assert [each.shape for each in found] == [(2, 2)]
