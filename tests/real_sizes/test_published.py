"""The published files: every family has one, and what `thin` and `small` keep of it."""

import json

import pytest

from benchmarks.published import MODELS
from jaxspec.models import MODELS as FAMILIES
from jaxspec.models import parse_config
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.models.layers.window_attention import SharedWindow
from jaxspec.options.generation_config import default_params

ALL = pytest.mark.parametrize("name", MODELS)


def parsed(name, config=None):
    published = MODELS[name]
    return parse_config(config or published.config, published.generation_config)


def kinds(config):
    return list(zip(config.layer_types, config.feed_forward_types, strict=True))


def sizes(config):
    """All parts but the numbers of layers."""
    return [part for part in config.parts if not isinstance(part, SharedWindow)]


def test_every_family_has_a_published_model():
    covered = {FAMILIES[parsed(name).architecture] for name in MODELS}
    assert covered == set(FAMILIES.values())


@ALL
def test_thin_models_keep_all_but_the_number_of_layers(name):
    full = parsed(name)
    thin, whole = parsed(name, MODELS[name].thin(4)), parsed(name, MODELS[name].thin(10))
    assert set(kinds(thin)) == set(kinds(full)) and len(kinds(thin)) == 4
    early = 10 - len(set(kinds(full)) - set(kinds(full)[:10]))  # the others are of later kinds
    assert kinds(whole)[:early] == kinds(full)[:early] and len(kinds(whole)) == 10
    for field in ("vocab_size", "hidden_size", "num_heads", "num_kv_heads", "head_dim"):
        assert getattr(thin, field) == getattr(full, field)
    assert sizes(thin) == sizes(full)
    assert thin.eos_token_ids == full.eos_token_ids


@ALL
def test_small_models_keep_vocabulary_heads_and_experts(name):
    full, small = parsed(name), parsed(name, MODELS[name].small(4))
    assert set(kinds(small)) == set(kinds(full))
    assert small.hidden_size == 128 and small.intermediate_size <= 5 * 128
    assert (small.vocab_size, small.head_dim) == (full.vocab_size, full.head_dim)
    if full.num_heads:
        assert small.num_heads / small.num_kv_heads == full.num_heads / full.num_kv_heads
    if experts := full.find_part(MoEConfig):
        assert small.part(MoEConfig).routing == experts.routing
        assert small.part(MoEConfig).intermediate_size <= 128


@pytest.mark.parametrize("layers", [0, 100])
def test_layers_that_there_are_not_are_refused(layers):
    with pytest.raises(ValueError, match="layers"):
        MODELS["qwen3-8b"].thin(layers)


@ALL
def test_what_is_written_is_read(name, tmp_path):
    published = MODELS[name]
    folder = published.write(tmp_path / name, published.small(2))
    assert json.loads((folder / "config.json").read_text()) == published.small(2)
    params = default_params("auto", folder)
    for field in ("temperature", "top_k", "top_p"):
        if field in published.generation_config:
            assert getattr(params, field) == published.generation_config[field]
    assert published.config["architectures"] == MODELS[name].config["architectures"]
