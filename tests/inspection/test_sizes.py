"""What a model is said to take is what an engine of it holds, and what is said to fit fits."""

import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx
from harness import FIXTURES, model

from jaxspec.inspection.sizes import Holdings, Parameters, fits, parameters, weight_bytes
from jaxspec.loading import load
from jaxspec.models import dtype_of, parse_config
from jaxspec.models.layers.parameters import Placement
from jaxspec.models.qwen3_5 import Qwen3_5
from jaxspec.models.weights import undefined
from jaxspec.options import EngineConfig
from jaxspec.runner.memory import MemoryBudget, fit

OPTIONS = [
    {},
    {"state_policy": "replay", "kv_dtype": "bfloat16", "page_size": 8},
    {"speculative_config": None},
    {"speculative_config": {"draft_vocab": 100, "draft_sample_method": "probabilistic"}},
]
# Qwen3.5's sizes: what they have in parameters, a head's, and bfloat16 bytes a token.
PUBLISHED = {
    "qwen3.5-0.8b": (0.75e9, 20e6, 14 * 1024),  # a draft head's keys and values count too
    "qwen3.5-9b": (8.95e9, 243e6, 36 * 1024),
    "qwen3.5-27b": (26.90e9, 425e6, 68 * 1024),
}


def config_of(**options):
    sizes = {"max_num_seqs": 3, "max_model_len": 100, "dtype": "float32"}
    return EngineConfig(FIXTURES / "qwen3_5", **sizes | options)


def holdings(**options):
    config = config_of(**options)
    return Holdings.of(config, model("qwen3_5"), dtype_of(config.dtype))


@pytest.mark.parametrize("options", OPTIONS)
def test_an_engine_holds_what_was_said(options):
    said = holdings(**options)
    runner = load(config_of(**options), progress=False).runner
    assert said.bytes(runner.shapes) == runner.memory()
    weights = runner.memory()["weights"]
    assert sum(weight_bytes(model("qwen3_5")).values()) == weights


@pytest.mark.parametrize("options", OPTIONS)
def test_tokens_and_requests_take_what_was_said(options):
    said, options = holdings(**options), options | {"num_pages": 20}
    shapes = said.settled.shapes

    def held(**changes):
        sizes = said.bytes(dataclasses.replace(shapes, **changes))
        return {name: sizes[name] for name in ("kv", "conv", "states", "ring")}

    more = {"decode_rows": (4,), "max_num_seqs": 4}
    page = sum(held(num_pages=21).values()) - sum(held(num_pages=20).values())
    slot = sum(held(**more).values()) - sum(held().values())
    plain = holdings(**options | {"speculative_config": None}).cache_bytes()
    assert said.cache_bytes().token * shapes.page_size == page
    assert said.cache_bytes().request == slot
    assert said.cache_bytes().request_without_drafts == plain.request


@pytest.mark.parametrize("options", OPTIONS)
def test_as_many_requests_as_are_said_fit_with_all_their_pages(options):
    config, said = config_of(**options), holdings(**options)
    for bytes_free in (3 * 10**6, 10**7):
        budget = MemoryBudget(bytes_free, 1.0, fixed_pages=True)
        for row in fits(config, said, budget):
            asked = {"max_model_len": row.max_model_len, "decode_buckets": None}

            def shapes(count, asked=asked):
                many = dataclasses.replace(config, max_num_seqs=count, **asked)
                drafts = said.settled.shapes.num_drafts
                return many.step_shapes(max_positions=512, num_drafts=drafts)

            assert row.requests > 0
            fit(shapes(row.requests), budget, said.bytes)
            with pytest.raises(ValueError, match="must fit"):
                fit(shapes(row.requests + 1), budget, said.bytes)
            needed = row.fixed_bytes + row.requests * row.request_bytes
            assert needed == sum(said.bytes(shapes(row.requests)).values())


def test_lengths_end_with_the_models_longest_and_have_the_users(monkeypatch):
    monkeypatch.setattr("jaxspec.inspection.sizes._LENGTHS", (64, 256, 1024))
    rows = fits(config_of(max_model_len=100), holdings(), None)
    assert [row.max_model_len for row in rows] == [64, 100, 256, 512]
    assert {row.requests for row in rows} == {None}, "the device does not tell its memory"


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_as_many_parameters_as_they_are_known_for(name, shapes):
    total, of_head, token = PUBLISHED[name]
    config = parse_config(shapes[name].config())
    bfloat16 = jnp.dtype("bfloat16")
    whole = undefined(Qwen3_5, config, bfloat16, None)
    counted = parameters(whole, whole.trunk.checkpoint())
    table = 0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size
    assert counted.total == pytest.approx(total, rel=0.01)
    assert counted.active == counted.total - table, "a token reads one row of an embedding"
    head = parameters(whole, whole.draft_head.checkpoint())
    assert head.total == head.active == pytest.approx(of_head, rel=0.03)
    options = EngineConfig(FIXTURES, dtype="bfloat16")
    assert Holdings.of(options, whole, bfloat16).cache_bytes().token == token


@pytest.fixture
def shapes():
    from benchmarks.measure.model_shapes import SHAPES

    return SHAPES


def test_a_tensor_in_several_places_counts_once():
    some = model("qwen3_5")
    param = nnx.Param(jnp.zeros((2, 3)))
    twice = [Placement("a", (4, 3), param, part=slice(2)), Placement("a", (4, 3), param)]
    assert parameters(some, twice) == Parameters(12, 12)
    assert parameters(some, [Placement("norm", (), param)]) == Parameters(1, 1)
