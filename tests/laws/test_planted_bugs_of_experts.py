"""Bugs that mixtures of experts have shipped with elsewhere, planted here and seen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import single_request
from harness import FIXTURES
from mixtures import RULES, layer
from safetensors.numpy import load_file

from jaxspec.models import load_model
from jaxspec.models.layers import moe
from jaxspec.models.layers.experts import ExpertStacks
from jaxspec.models.layers.gated_delta_net import GatedDeltaNet
from jaxspec.models.layers.mtp_head import MTPHead
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe import experts, feed_forward
from jaxspec.pallas.moe.experts import Experts
from jaxspec.pallas.moe.feed_forward import Router, moe_feed_forward
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense, DenseExperts

real_route, real_work_list = feed_forward.moe_route, experts.work_list
real_activation, real_layer = Activation.__call__, moe.moe_feed_forward
real_stack, real_shared = ExpertStacks._stack, ExpertStacks._shared
real_by_key_head = GatedDeltaNet._by_key_head


# Bugs in the operation.


def correction_in_the_weights(scores, bias, live, rule):
    if bias is None:
        return real_route(scores, bias, live, rule)
    choices = real_route(scores, bias, live, rule)
    corrected = jax.nn.sigmoid(scores[:, : rule.num_experts]) + bias[None]
    chosen = choices.experts[:, : rule.num_chosen]
    weights = jnp.take_along_axis(corrected, chosen, axis=1)
    weights = rule.scale * weights / weights.sum(axis=1, keepdims=True)
    shared = choices.weights[:, rule.num_chosen :]
    return choices.replace(weights=jnp.concatenate([weights, shared], axis=1))


def ties_to_the_higher_expert(scores, bias, live, rule):
    flipped = scores.at[:, : rule.num_experts].set(scores[:, : rule.num_experts][:, ::-1])
    choices = real_route(flipped, None if bias is None else bias[::-1], live, rule)
    is_chosen = choices.experts < rule.num_experts
    others = rule.num_experts - 1 - choices.experts
    return choices.replace(experts=jnp.where(is_chosen, others, choices.experts))


def padding_is_routed(scores, bias, live, rule):
    return real_route(scores, bias, jnp.ones_like(live), rule)


def every_group_may_be_chosen(scores, bias, live, rule):
    return real_route(scores, bias, live, dataclasses.replace(rule, groups=1, top_groups=1))


def gate_and_up_swapped(self, x):
    return real_activation(self, jnp.roll(x, x.shape[-1] // 2, axis=-1))


def relu_is_not_squared(self, x):
    return jax.nn.relu(x) if self is Activation.SQUARED_RELU else real_activation(self, x)


def experts_have_a_capacity(choices, num_experts, rows):
    """Of so many tiles in all: what is beyond them is dropped."""
    work = real_work_list(choices, num_experts, rows)
    fits = jnp.arange(work.expert.shape[0]) < num_experts // 2
    return work.replace(expert=jnp.where(fits, work.expert, num_experts + 1))


OPERATION = [
    (feed_forward, "moe_route", correction_in_the_weights),
    (feed_forward, "moe_route", ties_to_the_higher_expert),
    (feed_forward, "moe_route", padding_is_routed),
    (feed_forward, "moe_route", every_group_may_be_chosen),
    (Activation, "__call__", gate_and_up_swapped),
    (Activation, "__call__", relu_is_not_squared),
    (experts, "work_list", experts_have_a_capacity),
]


def bug_name(value):
    return value.__name__ if callable(value) and not isinstance(value, type) else ""


def assert_the_layer_is_its_equations():
    """By softmax with gates; by sigmoid with correction and groups and no gate; experts tie."""
    for name, activation in (("gated", Activation.SWIGLU), ("groups", Activation.SQUARED_RELU)):
        rule = RULES[name]
        rng = np.random.default_rng(0)
        scores = rng.normal(size=(16, rule.num_columns))
        scores[:, 1] = scores[:, 0]
        first = rule.none, 12 * activation.pieces, 16
        shapes = first, (rule.none, 16, 12), (9, 16), (rule.num_experts,)
        up, down, x, bias = (jnp.asarray(rng.normal(size=s) / 4, jnp.float32) for s in shapes)
        correction = None
        if rule.score == "sigmoid":
            correction = bias.at[1].set(bias[0])
        router = Router(Dense(jnp.asarray(scores, jnp.float32)), correction, rule)
        live, both = jnp.arange(9) != 4, Experts(DenseExperts(up), DenseExperts(down), activation)
        held = Norm(jnp.ones(16), 1e-6), router, both, live
        _, added = moe_feed_forward(x, None, *held)
        _, expected = layer(x, None, *held)
        np.testing.assert_allclose(added.sum(axis=0), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.soak
def test_without_a_bug_the_layer_is_its_equations():
    assert_the_layer_is_its_equations()


@pytest.mark.soak
@pytest.mark.parametrize(("module", "name", "bug"), OPERATION, ids=bug_name)
def test_the_equations_see(module, name, bug, monkeypatch):
    monkeypatch.setattr(module, name, bug)
    with pytest.raises(AssertionError):
        assert_the_layer_is_its_equations()


# Bugs in the model's layer, and in how published tensors become parameters.


def not_renormalised(*operands):
    return real_layer(*with_rule(operands, renormalise=False))


def shared_expert_without_its_gate(*operands):
    return real_layer(*with_rule(operands, gated_shared=False))


def with_rule(operands, **changes):
    stream, pending, norm, router, *others = operands
    rule = dataclasses.replace(router.rule, **changes)
    return stream, pending, norm, router.replace(rule=rule), *others


def gate_and_up_in_each_others_place(self, prefix, name, param, matrices):
    rows = reversed(matrices.values())
    return real_stack(self, prefix, name, param, dict(zip(matrices, rows, strict=True)))


def shared_expert_cut_to_the_others_width(self, prefix):
    return [p for p in real_shared(self, prefix) if p.index[0] == self.competing]


def projections_split_flat(self, prefix):
    """As if q, k, v and z of all heads lay side by side in the published tensor."""
    for p in real_by_key_head(self, prefix):
        start = p.index[1].start - (self.sizes.conv_dim + self.sizes.values) * ("_ba" in p.name)
        yield dataclasses.replace(p, part=slice(start, start + len(p.part)))


def hidden_state_before_the_embedding(self, embedded, hidden):
    both = [self.hidden_norm(hidden), self.embedding_norm(embedded)]
    return self.fc(jnp.concatenate(both, axis=-1))[0]


MODEL = [
    (moe, "moe_feed_forward", not_renormalised),
    (moe, "moe_feed_forward", shared_expert_without_its_gate),
    (ExpertStacks, "_stack", gate_and_up_in_each_others_place),
    (ExpertStacks, "_shared", shared_expert_cut_to_the_others_width),
    (GatedDeltaNet, "_by_key_head", projections_split_flat),
    (MTPHead, "_combine", hidden_state_before_the_embedding),
]


def errors():
    """The largest error of the trunk's scores, and of the draft head's."""
    expected = load_file(FIXTURES / "qwen3_next" / "reference.safetensors")
    request = single_request.SingleRequest(load_model(FIXTURES / "qwen3_next", jnp.float32))
    ids = np.concatenate([expected["prompt_ids"], expected["greedy_ids"]])
    _, logits = request.prefill(ids)
    _, drafted = request.draft(ids[1:], expected["hidden_final"][:-1], 0, prefill=True)
    return tuple(
        np.abs(scores - expected[name]).max()
        for scores, name in ((logits, "logits_full"), (drafted, "mtp_logits_tf"))
    )


@pytest.mark.soak
def test_without_a_bug_the_scores_are_those_of_the_reference():
    of_trunk, of_head = errors()
    assert of_trunk < 5e-4 and of_head < 1e-4


@pytest.mark.soak
@pytest.mark.parametrize(("owner", "name", "bug"), MODEL, ids=bug_name)
def test_the_reference_sees(owner, name, bug, monkeypatch):
    monkeypatch.setattr(owner, name, bug)
    if not name.startswith(("_stack", "_shared", "_by")):  # those change values alone
        for program in ("_trunk", "_head"):
            monkeypatch.setattr(single_request, program, traced_again(program))
    of_trunk, of_head = errors()
    assert max(of_trunk, of_head) > 0.1
    assert (of_trunk < 5e-4) == (owner is MTPHead)


def traced_again(program):
    function = getattr(single_request, program).__wrapped__
    return jax.jit(lambda *operands: function(*operands), static_argnums=0)
