"""Layers of the trunk and of the draft head: places in the pools, and feed-forward halves."""

import collections
import dataclasses

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from harness import HYBRID, model

from jaxspec.cache import CacheOptions, PoolSizes, Replay, Snapshot, allocate
from jaxspec.models.config import DENSE, FULL_ATTENTION, LINEAR_ATTENTION, SPARSE
from jaxspec.models.layers.attention import Attention
from jaxspec.models.layers.decoder import MIXERS
from jaxspec.models.layers.mlp import GatedMLP
from jaxspec.models.layers.moe import MoE
from jaxspec.models.model_inputs import ModelInputs
from jaxspec.models.qwen3_5 import Qwen3_5
from jaxspec.regions import NO_SLOT, DecodeRegion, PrefillRegion


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


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("fixture", "policy"),
    [
        (HYBRID, Snapshot()),
        ("qwen3_5", Replay(7)),
        ("falcon_h1", Replay(7)),
        ("lfm2", Snapshot()),
        ("gpt_oss", Snapshot()),
        ("gemma4_moe", Snapshot()),
        ("gemma4_shared", Snapshot()),
        ("deepseek_v32", Snapshot()),
        ("mamba2", Snapshot()),
    ],
)
def test_prompts_need_no_rows_that_decode(fixture, policy):
    """A rectangle without rows gives what one row of padding gives, but for the order of sums."""
    target, length, pages = model(fixture), 6, jnp.asarray([[0, 0], [1, 2]], jnp.int32)
    options = CacheOptions(*[jnp.dtype("float32")] * 3, policy)
    pools = allocate(target.cache_specs(options), PoolSizes(3, 4, 2, 1))
    graph, weights = nnx.split(target)

    @jax.jit
    def forward(weights, inputs, pools):
        output, pools = nnx.merge(graph, weights).forward(inputs, pools)
        return output.hidden[-length:], pools

    def inputs(num_rows):
        padding, position = jnp.zeros(num_rows, jnp.int32), jnp.arange(length, dtype=jnp.int32)

        def after_rows(of_prompt, of_rows=0):
            return jnp.concatenate([padding + of_rows, of_prompt])

        one = jnp.ones(1, jnp.int32)
        return ModelInputs(
            tokens=after_rows(position + 40),
            positions=after_rows(position),
            kv_slots=after_rows(position + 4, NO_SLOT),
            live=after_rows(one.repeat(length)) > 0,
            page_tables=pages,
            decode=DecodeRegion(*[padding] * 5),
            prefill=PrefillRegion(one, 0 * one, jnp.asarray([0, length], jnp.int32), 0 * one),
            width=1,
        )

    alone, beside = (forward(weights, inputs(num_rows), pools) for num_rows in (0, 1))
    hidden, after = alone
    assert np.isfinite(hidden).all() and np.abs(hidden).max() > 0
    chex.assert_trees_all_close(hidden, beside[0], atol=1e-5)
    chex.assert_trees_all_close(after, beside[1], atol=1e-5)
