"""The laws for models that several devices share: their tokens are those of the oracle, too."""

import dataclasses
import importlib

import harness
import jax.numpy as jnp
import numpy as np
import pytest
from fused_sums import run_fused_sums
from harness import (
    FIXTURES,
    GREEDY,
    HYBRID,
    REPLAY,
    SAMPLED,
    SNAPSHOT,
    Harness,
    continuations,
    prompts,
)
from kept_prefixes import ask, keeping
from pairwise import soak

from jaxspec import LLM, parallel
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.options.draft_methods import (
    AssistantOptions,
    DraftModelOptions,
    Eagle3Options,
    MTPOptions,
)
from jaxspec.pallas.moe import feed_forward
from jaxspec.pallas.norm.mailbox import Mailbox
from jaxspec.parallel import Group
from jaxspec.requests.sampling_params import SamplingParams

pytestmark = pytest.mark.devices
own_choices, local_sizes = feed_forward.own_choices, MoEConfig.local
MOE = "qwen3_5_moe"
SHARDS = importlib.import_module("jaxspec.models.shards")  # the package has a function of it
PROMPTS = prompts(5, seed=3)
PAIR, FOUR = Group(2), Group(4)
NUCLEUS = SamplingParams(temperature=0.8, top_k=40, top_p=0.9, max_tokens=12)
MIXED = (0.8, 0.5, 0.5)


def sharing(fixture, group, params=GREEDY, *, drafts=3, **options) -> Harness:
    """An engine whose drafts are right now and then, and whose devices share experts by width."""
    wanted = [(prompt, params, seed) for seed, prompt in enumerate(PROMPTS)]
    oracle = {"accuracy": MIXED, "continuations": continuations(fixture, wanted), "vary": True}
    given = {"chunk": 7, "feature_sets": (params.features,), "whole_experts": False}
    given |= oracle if drafts else {}
    return Harness(fixture, group=group, drafts=drafts, **given | options)


def served(engine: Harness, params: SamplingParams) -> Harness:
    """Add a request now and then, and run them all."""
    rng = np.random.default_rng(0)
    for number, prompt in enumerate(PROMPTS):
        engine.add(prompt, params, number)
        for _ in range(rng.integers(0, 4)):
            engine.step()
            assert_equal_on_all_devices(engine)
    return engine.run()


def assert_equal_on_all_devices(engine: Harness) -> None:
    for array in (engine.runner.state.rows.fields, engine.runner.state.page_tables):
        first, *others = np.split(np.asarray(array), array.sharding.mesh.size)
        for other in others:
            np.testing.assert_array_equal(first, other)


@pytest.mark.parametrize(
    ("fixture", "group", "states", "drafts", "params"),
    [
        (HYBRID, PAIR, REPLAY, 3, NUCLEUS),
        ("nemotron_h", FOUR, REPLAY, 3, GREEDY),
        ("deepseek_v32", PAIR, SNAPSHOT, 3, GREEDY),
        *(
            soak(*case)
            for case in [
                (HYBRID, PAIR, SNAPSHOT, 3, GREEDY),
                (HYBRID, PAIR, REPLAY, 0, SAMPLED),
                (MOE, PAIR, REPLAY, 3, GREEDY),
                ("qwen3_5_moe_wide", FOUR, REPLAY, 0, SAMPLED),
                ("qwen3_next", PAIR, SNAPSHOT, 3, GREEDY),
                ("nemotron_h_latent", FOUR, SNAPSHOT, 0, GREEDY),
                ("falcon_h1", PAIR, SNAPSHOT, 3, SAMPLED),
                ("granitemoehybrid", FOUR, SNAPSHOT, 0, GREEDY),
                ("granite", FOUR, SNAPSHOT, 3, GREEDY),
                ("gpt_oss", FOUR, SNAPSHOT, 3, GREEDY),
                ("gemma4", FOUR, SNAPSHOT, 3, GREEDY),
                ("gemma4_moe", PAIR, SNAPSHOT, 0, GREEDY),
                ("gemma4_shared", PAIR, SNAPSHOT, 3, GREEDY),
                ("mamba2", FOUR, REPLAY, 3, SAMPLED),
                ("lfm2", FOUR, SNAPSHOT, 3, GREEDY),
                ("deepseek_v3", FOUR, SNAPSHOT, 3, SAMPLED),
                ("kimi_linear", FOUR, REPLAY, 3, GREEDY),
                ("bailing_hybrid", FOUR, REPLAY, 3, GREEDY),
                ("qwen3", FOUR, SNAPSHOT, 3, NUCLEUS),
                ("qwen3_moe", FOUR, SNAPSHOT, 0, GREEDY),
            ]
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, SamplingParams) else str(each),
)
def test_tokens_are_those_of_one_device(fixture, group, states, drafts, params):
    engine = sharing(fixture, group, params, drafts=drafts, states=states)
    assert served(engine, params).check() <= 1


@pytest.mark.parametrize(
    ("fixture", "group", "drafts", "params"),
    [
        (MOE, PAIR, 3, GREEDY),
        *(
            soak(*case)
            for case in [
                ("qwen3_5_moe_wide", FOUR, 0, SAMPLED),
                ("nemotron_h", FOUR, 3, GREEDY),
                ("nemotron_h_latent", PAIR, 3, SAMPLED),
                ("granitemoehybrid", FOUR, 0, GREEDY),
                ("gpt_oss", PAIR, 3, GREEDY),
                ("gemma4_moe", PAIR, 3, GREEDY),
                ("deepseek_v3", FOUR, 3, GREEDY),
                ("qwen3_moe", FOUR, 3, NUCLEUS),
            ]
        ),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, SamplingParams) else str(each),
)
def test_tokens_of_whole_experts_are_those_of_one_device(fixture, group, drafts, params):
    engine = sharing(fixture, group, params, drafts=drafts, whole_experts=True)
    assert served(engine, params).check() <= 1


METHODS = {
    "mtp": (HYBRID, None, MTPOptions()),
    "mtp of some ids": (HYBRID, None, MTPOptions(draft_vocab=201)),  # shared by two: 202
    "mtp of whole experts": (MOE, None, MTPOptions()),
    "eagle3": ("llama", "llama_eagle3", Eagle3Options("somewhere")),
    "draft_model": ("llama", "llama_draft", DraftModelOptions("somewhere")),
    "assistant": ("gemma4_shared", "gemma4_assistant", AssistantOptions("somewhere")),
}


@pytest.mark.parametrize(
    ("name", "params", "is_drawn"),
    [
        ("mtp of some ids", GREEDY, False),
        *(
            soak(*case)
            for case in [
                ("mtp", NUCLEUS, True),
                ("mtp of whole experts", GREEDY, False),
                ("mtp of some ids", SAMPLED, True),
                ("eagle3", GREEDY, False),
                ("assistant", GREEDY, False),
                ("draft_model", SAMPLED, True),
            ]
        ),
    ],
    ids=str,
)
def test_every_drafter_is_shared_too(name, params, is_drawn):
    fixture, drafter, options = METHODS[name]
    shared, alone = (
        Harness(
            fixture,
            group=group,
            drafts=2,
            method=name.partition(" ")[0],
            options=options,
            drafter=drafter,
            probabilistic=is_drawn,
            feature_sets=(params.features,),
            whole_experts="whole experts" in name,
        )
        for group in (PAIR, harness.ALONE)
    )
    for engine in (shared, alone):
        for seed, prompt in enumerate(PROMPTS):
            engine.add(prompt, params, seed)
        engine.run()
    assert [r.output for r in shared.requests] == [r.output for r in alone.requests]
    drafts = [sum(r.metrics.num_draft_tokens for r in e.requests) for e in (shared, alone)]
    assert drafts[0] == drafts[1] > 0


def test_forks_and_preemption_and_several_steps_a_dispatch():
    params = SamplingParams(temperature=0.8, max_tokens=12, n=2)
    engine = sharing(HYBRID, PAIR, SAMPLED, states=REPLAY, num_pages=16, steps_per_dispatch=2)
    samples = [sample for prompt in PROMPTS for sample in engine.add(prompt, params, 5)]
    for sample in samples:
        sample.params = SAMPLED
    assert engine.run().check() <= 1
    assert engine.scheduler.num_preemptions > 0


def test_mailboxes_are_arguments_of_every_program(monkeypatch):
    """As on GPUs; here no kernel exchanges rows through them."""
    monkeypatch.setattr(Mailbox, "of", staticmethod(lambda group, _: Mailbox(group.size, 512)))
    engine = sharing(HYBRID, PAIR, steps_per_dispatch=2)
    assert served(engine, GREEDY).check() <= 1
    assert engine.runner.memory()["mailboxes"] == 4 * 2 * 3 + Mailbox(2, 512).num_bytes


@pytest.mark.parametrize(
    ("fixture", "group", "drafts", "params"),
    [
        ("nemotron_h", FOUR, 3, GREEDY),
        soak(HYBRID, PAIR, 3, NUCLEUS),
        soak("qwen3_5_moe_wide", FOUR, 0, SAMPLED),
    ],
    ids=lambda each: type(each).__name__ if isinstance(each, SamplingParams) else str(each),
)
def test_fused_sums_change_no_token(fixture, group, drafts, params, monkeypatch, fresh_programs):
    """With the arithmetic of `reduce_add_norm`, which on GPUs has the place of all-reduces."""
    run_fused_sums(monkeypatch)
    engine = sharing(fixture, group, params, drafts=drafts)
    assert served(engine, params).check() <= 1
    assert engine.runner.memory()["mailboxes"] > 0


@pytest.mark.soak
def test_fused_sums_in_bfloat16_change_logprobs_little(monkeypatch, fresh_programs):
    """Of four devices, beside one: 0.02 nats on average, as between one and float32."""
    run_fused_sums(monkeypatch)
    random = np.random.default_rng(0)
    prompts = [{"prompt_token_ids": ids} for ids in random.integers(0, 256, (3, 48)).tolist()]

    def logprobs(devices):
        with LLM(
            FIXTURES / "mamba2",
            dtype="bfloat16",
            tensor_parallel_size=devices,
            max_num_seqs=2,
            max_model_len=64,
            num_pages=20,
            decode_buckets=[2],
            prefill_buckets=[64],
            speculative_config=None,
            skip_tokenizer_init=True,
        ) as llm:
            assert (llm.metrics()["memory_bytes"].get("mailboxes", 0) > 0) == (devices > 1)
            return np.array([score.token_logprobs[1:] for score in llm.score(prompts)], float)

    assert abs(logprobs(4) - logprobs(1)).mean() < 0.05


@pytest.mark.soak
def test_cached_prefixes_on_the_devices_and_the_host():
    """A prefix that was evicted comes back from host memory, with the parts of all devices."""
    prompt, others = (1, 2, 3, 4) * 9, [(seed, 7) * 18 for seed in range(20, 32)]
    engine = keeping(
        [prompt], group=PAIR, states=REPLAY, num_pages=40, host_bytes=2**22, num_checkpoints=3
    )
    first = ask(engine, prompt)
    second = ask(engine, prompt)
    for other in others:
        ask(engine, other)
    third = ask(engine, prompt)
    assert engine.check() <= 1
    assert first.output == second.output == third.output
    assert second.num_cached_tokens > 0 and third.num_cached_tokens > 0


def _whole_width(placement, axis):
    return (placement.shape[axis],)


def _by_rank(whole, local, rank, devices):
    """Of few heads each device takes the one of its number, modulo theirs."""
    starts = np.cumsum((0, *whole))
    return np.concatenate(
        [
            np.arange(own) + start + rank % (size // own) * own
            for size, own, start in zip(whole, local, starts[:-1], strict=True)
        ]
    )


def _of_the_neighbour(choices, rule, held):
    """A device computes the choices of the experts that the device before it has."""
    moved = (choices.experts + held) % rule.num_experts
    experts = jnp.where(choices.experts < rule.num_experts, moved, choices.experts)
    return own_choices(choices.replace(experts=experts), rule, held)


def _shared_expert_on_each(sizes, devices):
    return dataclasses.replace(local_sizes(sizes, devices), shared_size=sizes.shared_size)


BUGS = {
    "fused weights cut by their whole width": (SHARDS, "_segments", _whole_width, HYBRID, PAIR),
    "no sum over devices": (parallel, "reduce", lambda parts: parts, HYBRID, PAIR),
    "ids of every device from 0": (parallel, "first_of", lambda count: 0, HYBRID, PAIR),
    "key-value heads modulo their number": (SHARDS, "held", _by_rank, "qwen3", FOUR),
    "experts of the neighbour": (feed_forward, "own_choices", _of_the_neighbour, MOE, PAIR),
    "shared expert on each": (MoEConfig, "local", _shared_expert_on_each, MOE, PAIR),
}


@pytest.mark.soak
@pytest.mark.parametrize("name", BUGS)
def test_a_planted_bug_is_seen(name, monkeypatch, fresh_programs):
    """The tokens differ from the oracle's with the bug."""
    module, attribute, wrong, fixture, group = BUGS[name]
    monkeypatch.setattr(module, attribute, wrong)
    monkeypatch.setattr(harness, "model", harness.model.__wrapped__)  # loaded anew
    engine = sharing(fixture, group, drafts=0, whole_experts=fixture == MOE)
    with pytest.raises(AssertionError):
        served(engine, GREEDY).check()
