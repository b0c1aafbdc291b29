"""Layers of the trunk and of the draft head: places in the pools, and feed-forward halves."""

import collections
import dataclasses

import jax.numpy as jnp
import pytest
from flax import nnx
from harness import model

from jaxspec.cache import CacheOptions, Snapshot
from jaxspec.models.config import DENSE, FULL_ATTENTION, LINEAR_ATTENTION, SPARSE
from jaxspec.models.layers.attention import Attention
from jaxspec.models.layers.decoder import MIXERS
from jaxspec.models.layers.mlp import GatedMLP
from jaxspec.models.layers.moe import MoE
from jaxspec.models.qwen3_5 import Qwen3_5


@pytest.mark.parametrize(
    "layer_types",
    [
        (LINEAR_ATTENTION, LINEAR_ATTENTION, FULL_ATTENTION),
        (FULL_ATTENTION, "another", LINEAR_ATTENTION, "another", FULL_ATTENTION),
    ],
)
def test_every_layer_of_a_pool_has_an_index_of_its_own(layer_types, monkeypatch):
    """Also where two kinds of mixer, as here `another` and full attention, share one pool."""
    monkeypatch.setitem(MIXERS, "another", Attention)
    config = dataclasses.replace(
        model("qwen3_5").config,
        layer_types=layer_types,
        feed_forward_types=(DENSE,) * len(layer_types),
    )
    hybrid = nnx.eval_shape(lambda: Qwen3_5(config, jnp.dtype("float32")))
    assert hybrid.draft_head is not None
    indices = collections.defaultdict(list)
    for layer in (*hybrid.trunk.layers, *hybrid.draft_head.layers):
        indices[layer.mixer.pool].append(layer.cache_layer)
    specs = hybrid.cache_specs(CacheOptions(*[jnp.dtype("float32")] * 3, Snapshot()))
    assert indices == {spec.name: list(range(spec.layers)) for spec in specs}


def test_a_layer_may_have_one_half_alone_and_then_has_one_norm():
    layers = model("mamba2").trunk.layers
    assert all(layer.feed_forward is None for layer in layers)
    names = [each.name for each in layers[1].checkpoint("model.layers.1.")]
    norms = [name for name in names if "layernorm" in name]
    assert norms == ["model.layers.1.input_layernorm.weight"]


def test_each_layer_has_the_feed_forward_half_that_the_config_names():
    """Here all but one have experts, and so has the draft head's."""
    qwen = model("qwen3_next")
    assert qwen.config.feed_forward_types == (SPARSE, DENSE, SPARSE, SPARSE)
    layers = (*qwen.trunk.layers, *qwen.draft_head.layers)
    assert [type(layer.feed_forward) for layer in layers] == [MoE, GatedMLP, MoE, MoE, MoE]
