"""What a model is said to take is what an engine of it holds, and what is said to fit fits."""

import dataclasses
import importlib

import jax
import jax.numpy as jnp
import pytest
from flax import nnx
from harness import FIXTURES, model
from safetensors.numpy import load_file

from jaxspec.api.loading import load
from jaxspec.api.settling import settle
from jaxspec.inspection.find import find
from jaxspec.inspection.sizes import Parameters, cache_bytes, fits, parameters, weight_bytes
from jaxspec.models import dtype_of, family_of, parse_config
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.weights import undefined
from jaxspec.options.engine_options import EngineConfig
from jaxspec.plan.step_shapes import ModelSizes
from jaxspec.runner.memory import MemoryBudget, fit

OPTIONS = [
    {},
    {"state_policy": "replay", "kv_dtype": "bfloat16", "page_size": 8},
    {"speculative_config": None},
    {"speculative_config": {"draft_vocab": 100, "draft_sample_method": "probabilistic"}},
]
# What models are known for: billions of parameters, of those that a token uses and of a head's;
# and the KiB of bfloat16 keys and values a token, a draft head's counted in.
PUBLISHED = {
    "qwen3.5-0.8b": (0.75, 0.75, 0.0205, 14),
    "qwen3.5-9b": (8.95, 7.94, 0.243, 36),
    "qwen3.5-27b": (26.90, 25.63, 0.425, 68),
    "qwen3.5-35b-a3b": (34.66, 2.95, 0.84, 22),
    "qwen3-next-80b": (59.9, 2.75, 1.65, 20),  # 36 layers of 48
    "qwen3-30b-a3b": (30.53, 3.04, None, 96),
}


def config_of(**options):
    sizes = {"max_num_seqs": 3, "max_model_len": 100, "dtype": "float32"}
    sizes |= {"enable_prefix_caching": False}
    return EngineConfig(FIXTURES / "qwen3_5", **sizes | options)


def settled(**options):
    config = config_of(**options)
    return settle(config, model("qwen3_5"), dtype_of(config.dtype))


@pytest.mark.parametrize("options", OPTIONS)
def test_an_engine_holds_what_was_said(options):
    runner = load(config_of(**options), progress=False).runner
    said = settled(**options).memory_usage.bytes(runner.shapes)
    assert said == runner.memory()
    held = {"weights": runner._weights, "proposer_tables": runner._tables}
    sizes = {name: sum(leaf.nbytes for leaf in jax.tree.leaves(x)) for name, x in held.items()}
    assert sizes.items() <= said.items()
    state = sum(leaf.nbytes for leaf in jax.tree.leaves(runner.state))
    assert sum(sizes.values()) + state == sum(said.values())
    assert sum(weight_bytes(model("qwen3_5")).values()) == said["weights"]


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_and_requests_take_what_was_said(options):
    said, options = settled(**options), options | {"num_pages": 20}
    shapes, of_said = said.shapes, cache_bytes(said)

    def held(**changes):
        sizes = said.memory_usage.bytes(dataclasses.replace(shapes, **changes))
        return {name: sizes[name] for name in ("kv", "conv", "states", "ring")}

    more = {"decode_rows": (4,), "max_num_seqs": 4}
    page = sum(held(num_pages=21).values()) - sum(held(num_pages=20).values())
    slot = sum(held(**more).values()) - sum(held().values())
    plain = cache_bytes(settled(**options | {"speculative_config": None}))
    assert of_said.token * shapes.page_size == page
    assert of_said.request == slot
    assert of_said.request_without_drafts == plain.request


@pytest.mark.parametrize("options", OPTIONS)
def test_as_many_requests_as_are_said_fit_with_all_their_pages(options):
    config, said = config_of(**options), settled(**options)
    for bytes_free in (15 * 10**6, 3 * 10**7):
        budget = MemoryBudget(bytes_free, 1.0, fixed_pages=True)
        for row in fits(config, model("qwen3_5"), said, budget):
            asked = {"max_model_len": row.max_model_len, "decode_buckets": None}

            def shapes(count, asked=asked):
                many = dataclasses.replace(config, max_num_seqs=count, **asked)
                drafts = said.shapes.num_drafts
                return many.sizes(ModelSizes(512), draft_buckets=(drafts,))[0]

            assert row.requests > 0
            fit(
                shapes(row.requests),
                said.limits.prefix_cache_share,
                budget,
                said.memory_usage.bytes,
            )
            with pytest.raises(ValueError, match="must fit"):
                fit(
                    shapes(row.requests + 1),
                    said.limits.prefix_cache_share,
                    budget,
                    said.memory_usage.bytes,
                )
            needed = row.fixed_bytes + row.requests * row.request_bytes
            assert needed == sum(said.memory_usage.bytes(shapes(row.requests)).values())


@pytest.mark.parametrize("share", [0.2, 0.6])
def test_states_of_prefixes_are_counted_beside_the_requests(share):
    """As many requests fit as `fit` takes, and what they are said to need is right but for them."""
    options = {"enable_prefix_caching": True, "prefix_cache_share": share, "num_pages": None}
    config, said = config_of(**options), settled(**options)
    state = cache_bytes(said).checkpoint
    assert state > 0 == cache_bytes(settled(enable_prefix_caching=False)).checkpoint
    plain = fits(config_of(), model("qwen3_5"), settled(enable_prefix_caching=False), None)
    for bytes_free in (4 * 10**6, 10**7):
        budget = MemoryBudget(bytes_free, 1.0, fixed_pages=True)
        for row, before in zip(fits(config, model("qwen3_5"), said, budget), plain, strict=True):
            assert row.request_bytes > before.request_bytes

            def shapes(count, length=row.max_model_len):
                asked = {"max_model_len": length, "decode_buckets": None, "max_num_seqs": count}
                drafts = (said.shapes.num_drafts,)
                return dataclasses.replace(config, **asked).sizes(ModelSizes(512), drafts)[0]

            if row.requests:
                held = fit(
                    shapes(row.requests),
                    said.limits.prefix_cache_share,
                    budget,
                    said.memory_usage.bytes,
                )
                needed = row.fixed_bytes + row.requests * row.request_bytes
                assert abs(needed - sum(said.memory_usage.bytes(held).values())) <= 2 * state
            with pytest.raises(ValueError, match="must fit"):
                fit(
                    shapes(row.requests + 1),
                    said.limits.prefix_cache_share,
                    budget,
                    said.memory_usage.bytes,
                )


def test_lengths_end_with_the_models_longest_and_have_the_users(monkeypatch):
    monkeypatch.setattr("jaxspec.inspection.sizes._LENGTHS", (64, 256, 1024))
    rows = fits(config_of(max_model_len=100), model("qwen3_5"), settled(max_model_len=100), None)
    assert [row.max_model_len for row in rows] == [64, 100, 256, 512]
    assert {row.requests for row in rows} == {None}, "the device does not tell its memory"


def test_lengths_are_weighed_with_the_sizes_that_loading_gives_them(monkeypatch):
    """The tokens of a step are the model's, not those of a dense one."""
    sparse = model("qwen3_next")
    monkeypatch.setattr(type(sparse), "tokens_per_step", property(lambda _: 1024))
    asked = {"max_model_len": 512, "max_num_seqs": 2}
    said, weighed = settle(config_of(**asked), sparse, jnp.dtype("float32")), []
    assert said.shapes.prefill_tokens[-1] == 1024

    def count(memory_usage, shapes):
        weighed.append(shapes)
        return {"weights": shapes.num_slots}

    monkeypatch.setattr(type(said.memory_usage), "bytes", count)
    fits(config_of(**asked), sparse, said, None)
    assert said.shapes in weighed


@pytest.mark.few(2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_they_are_known_for(name):
    total, active, head, kib = PUBLISHED[name]
    published = importlib.import_module("benchmarks.measure.model_shapes").SHAPES[name].config()
    family = family_of(published["architectures"][0], "config.json")
    bfloat16 = jnp.dtype("bfloat16")
    whole = undefined(family, parse_config(published), bfloat16, None)
    counted = parameters(whole, whole.trunk.checkpoint())
    assert counted.total / 1e9 == pytest.approx(total, rel=0.004)
    assert counted.active / 1e9 == pytest.approx(active, rel=0.004)
    if head is None:
        assert whole.draft_head is None
    else:
        of_head = parameters(whole, whole.draft_head.checkpoint())
        assert of_head.total / 1e9 == pytest.approx(head, rel=0.006)
    options = EngineConfig(FIXTURES, dtype="bfloat16")
    assert cache_bytes(settle(options, whole, bfloat16)).token == kib * 1024


@pytest.mark.parametrize("name", ["qwen3_5_moe", "qwen3_5_moe_raw", "qwen3_next", "qwen3_moe"])
def test_a_token_uses_its_experts_the_shared_one_and_all_that_is_no_expert(name):
    """Counted from the tensors in the file, which may have one for each expert or for all."""
    sparse = find(EngineConfig(FIXTURES / name), jnp.dtype("float32")).model
    assert sparse.experts.routing.num_chosen == 3 and sparse.experts.routing.num_experts == 8
    held = load_file(FIXTURES / name / "model.safetensors")
    total = active = 0
    for tensor, value in held.items():
        if not tensor.startswith("mtp."):
            total += value.size
            is_table = "embed_tokens" in tensor
            active += 0 if is_table else value.size * 3 // 8 if "experts." in tensor else value.size
    assert parameters(sparse, sparse.trunk.checkpoint()) == Parameters(total, active)


def test_a_tensor_in_several_places_counts_once():
    some = model("qwen3_5")
    param = nnx.Param(jnp.zeros((2, 3)))
    twice = [Placement("a", (4, 3), param, part=slice(2)), Placement("a", (4, 3), param)]
    assert parameters(some, twice) == Parameters(12, 12)
    assert parameters(some, [Placement("norm", (), param)]) == Parameters(1, 1)
