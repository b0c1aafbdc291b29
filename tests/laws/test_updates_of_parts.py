"""Laws of updates for what has no step of its own here: drafters, devices, tiers of prefixes."""

import dataclasses

import jax
import numpy as np
import pytest
from harness import FIXTURES
from pairwise import soak
from shortened import copied_with
from trees import SIZES, changed, tensors_of

from jaxspec import LLM, SamplingParams
from jaxspec.prefix.host_tier import HostTier


def leaves_of(llm):
    return jax.tree.leaves((llm._runner.weights, llm._runner._drafter_tables))


def check_equal(llm, other):
    for one, two in zip(leaves_of(llm), leaves_of(other), strict=True):
        assert one.dtype == two.dtype and one.sharding == two.sharding
        np.testing.assert_array_equal(
            *(np.asarray(each).ravel().view(np.uint8) for each in (one, two))
        )
    assert llm._runner.fingerprint == other._runner.fingerprint


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("target", "method", "drafter"),
    [
        ("llama", "draft_model", "llama_draft"),
        soak("llama", "eagle3", "llama_eagle3"),
        soak("gemma4_shared", "assistant", "gemma4_assistant"),
    ],
)
def test_drafters_have_trees_of_their_own(target, method, drafter):
    """L1; a tree of the drafter is not one of the model, and one alone changes nothing else."""
    folder = FIXTURES / drafter
    tree, of_drafter = changed(tensors_of(FIXTURES / target)), changed(tensors_of(folder))
    speculation = {"method": method, "num_speculative_tokens": 2, "model": str(folder)}
    with LLM(FIXTURES / target, **SIZES, speculative_config=speculation) as llm:
        assert llm.weight_specs("drafter") != llm.weight_specs()
        before = llm._runner.weights
        llm.update_weights(drafter=of_drafter)
        assert llm._runner.weights is before
        with pytest.raises(ValueError, match="tensors"):
            llm.update_weights(of_drafter)
        llm.update_weights(tree)
        with copied_with(folder, of_drafter) as other:
            options = SIZES | {"speculative_config": speculation | {"model": str(other)}}
            with LLM(FIXTURES / target, weights=tree, **options) as fresh:
                check_equal(llm, fresh)


@pytest.mark.parametrize("fixture", [soak("qwen3_5"), soak("qwen3_5_moe")])
def test_each_device_gets_its_part(fixture):
    """And a copy of its part of the head in 8 bits; the second update compiles nothing."""
    speculation = {"method": "mtp", "num_speculative_tokens": 2}
    speculation |= {"draft_head_dtype": "float8_e4m3fn"}
    options = SIZES | {"tensor_parallel_size": 2, "speculative_config": speculation}
    tree = changed(tensors_of(FIXTURES / fixture))
    with (
        LLM(FIXTURES / fixture, **options) as llm,
        LLM(FIXTURES / fixture, weights=tree, **options) as fresh,
    ):
        old = llm.export_weights()
        llm.update_weights(tree)
        check_equal(llm, fresh)
        llm.update_weights(old)
        own = dict(zip(llm.weight_specs("own"), fresh._runner.weights, strict=True))
        llm.update_weights(own)
        check_equal(llm, fresh)
        for name, array in fresh.export_weights().items():
            np.testing.assert_array_equal(array, llm.export_weights()[name])


@pytest.mark.soak
@pytest.mark.parametrize(
    "method, drafter", [("draft_model", "llama_draft"), soak("eagle3", "llama_eagle3")]
)
def test_devices_hold_a_drafter_once(method, drafter):
    folder = FIXTURES / drafter
    speculation = {"method": method, "num_speculative_tokens": 2, "model": str(folder)}
    options = SIZES | {"tensor_parallel_size": 2, "speculative_config": speculation}
    with LLM(FIXTURES / "llama", **options) as llm:
        for tree in (None, changed(tensors_of(folder))):
            if tree is not None:
                llm.update_weights(drafter=tree)
            runner = llm._runner
            pairs = zip(runner.drafter_weights, runner._drafter_tables, strict=True)
            assert all(one is two for one, two in pairs)
        params = dataclasses.replace(PARAMS, max_tokens=2)
        assert len(llm.generate(PROMPT, params)[0].outputs[0].token_ids) == 2


# Tiers

PARAMS = SamplingParams(temperature=0.0, max_tokens=8)
RANDOM = np.random.default_rng(3)
PROMPT, *OTHERS = ({"prompt_token_ids": RANDOM.integers(5, 250, 30).tolist()} for _ in range(5))


def check_tiers(llm, fresh, old, new, folder):
    """L6: after an update, host memory and files have nothing of earlier weights."""
    llm.update_weights(old)
    for prompt in (PROMPT, *OTHERS):
        llm.generate(prompt, PARAMS)
    host = llm.metrics()["prefix_cache"]["host"]
    assert host["num_pieces"] > 0
    llm.update_weights(new)
    want = fresh.generate(PROMPT, PARAMS)[0].outputs[0].token_ids
    output = llm.generate(PROMPT, PARAMS)[0]
    assert output.num_cached_tokens == 0
    assert output.outputs[0].token_ids == want


@pytest.fixture(scope="module")
def trees():
    old = tensors_of(FIXTURES / "qwen3")
    return old, changed(old)


@pytest.fixture(scope="module")
def engines(trees, tmp_path_factory):
    options = SIZES | {"num_pages": 24, "speculative_config": None, "enable_prefix_caching": True}
    folder = tmp_path_factory.mktemp("pieces")
    tier = {"kv_offloading_size": 0.01, "kv_offloading_folder": folder}
    without = options | {"enable_prefix_caching": False}
    with (
        LLM(FIXTURES / "qwen3", **options, **tier) as llm,
        LLM(FIXTURES / "qwen3", weights=trees[1], **without) as fresh,
    ):
        yield llm, fresh, folder


@pytest.mark.soak
def test_tiers_forget(engines, trees):
    check_tiers(*engines[:2], *trees, engines[2])


@pytest.mark.soak
def test_a_tier_that_remembers_is_seen(engines, trees, monkeypatch):
    """P5."""
    monkeypatch.setattr(HostTier, "clear", lambda self: None)
    with pytest.raises(AssertionError):
        check_tiers(*engines[:2], *trees, engines[2])


@pytest.mark.soak
def test_versions_of_samples_that_are_cut(engines, trees):
    """A stop string ends a sample before tokens that a step made after it."""
    params = dataclasses.replace(PARAMS, stop_token_ids=[1], n=2, temperature=0.9)
    for sample in engines[0].generate(PROMPT, params)[0].outputs:
        (span,) = sample.weight_versions
        assert (span.start, span.end) == (0, len(sample.token_ids))
        assert span.version == engines[0].weight_version
