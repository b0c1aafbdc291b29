"""moe_route against its definition in NumPy (`tests/support/mixtures.py`)."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import RULES, choose
from races import assert_no_races
from sm90 import array, assert_lean, compile_for

from jaxspec.pallas import dispatch
from jaxspec.pallas.moe.route import Routing, moe_route, own_choices, why_not_kernel

TOKENS = 12
KERNEL_RULES = {
    "gated": Routing(32, 8, num_shared=1, gated_shared=True),
    "not renormalised": Routing(40, 3, renormalise=False, scale=1.5),
    "corrected": Routing(32, 4, "sigmoid", eps=0.25, scale=2.5, num_shared=2),
    "corrected softmax": Routing(16, 3),
    "many": Routing(512, 22, "sigmoid", eps=1e-20, scale=5.0),
    "groups": Routing(64, 6, eps=1e-20, groups=8, top_groups=3, num_shared=1),
    "corrected groups": Routing(96, 8, "sigmoid", groups=4, top_groups=2),
}
CORRECTED = "corrected", "corrected softmax", "many", "corrected groups"
route = jax.jit(moe_route, static_argnames="rule")


@pytest.mark.parametrize("name", ["shared", "gated", "groups"])
def test_each_choice_is_of_one_device_and_shared_experts_of_all(name, monkeypatch):
    """Each device has four experts; padding is no device's."""
    rule, held = RULES[name], 4
    scores, bias, live = operands(rule)
    whole = route(scores, bias, live, rule)
    found, weights = np.zeros(whole.experts.shape, int), np.zeros(whole.experts.shape)
    for device in range(rule.num_experts // held):
        monkeypatch.setattr("jaxspec.parallel.first_of", lambda count, first=device: first * count)
        own = own_choices(whole, rule, held)
        is_here = np.asarray(own.experts) < held + rule.num_shared
        is_shared = np.asarray(whole.experts) >= rule.num_experts
        first = np.where(is_shared, rule.num_experts - held, device * held)
        numbers = np.asarray(own.experts) + first
        np.testing.assert_array_equal(numbers[is_here], np.asarray(whole.experts)[is_here])
        assert not np.asarray(own.weights)[~is_here].any()
        found += is_here
        weights += np.where(is_shared & (device > 0), 0.0, own.weights)
    is_live = live[:, None]
    devices = np.where(np.asarray(whole.experts) < rule.num_experts, 1, rule.num_experts // held)
    np.testing.assert_array_equal(found, np.where(is_live, devices, 0))
    np.testing.assert_array_equal(weights, whole.weights)
    assert own_choices(whole, rule, rule.num_experts) is whole


def operands(rule, seed=0, columns=None):
    """Scores with columns of padding, a correction of the size of the scores, and live tokens."""
    rng = np.random.default_rng(seed)
    scores = rng.normal(size=(TOKENS, columns or rule.num_columns + 3)) * 2
    bias = rng.normal(size=rule.num_experts) / 4
    return np.float32(scores), np.float32(bias), rng.random(TOKENS) < 0.7


@pytest.mark.parametrize("has_bias", [False, True], ids=["", "corrected"])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_experts_and_weights_are_those_of_the_definition(rule, has_bias):
    scores, bias, live = operands(rule)
    bias = bias if has_bias else None
    choices = route(scores, bias, live, rule=rule)
    chex.assert_shape([choices.experts, choices.weights], (TOKENS, rule.parts))
    chex.assert_type([choices.experts, choices.weights], [jnp.int32, jnp.float32])
    experts, weights = choose(scores, bias, live, rule)
    np.testing.assert_array_equal(choices.experts, experts)
    np.testing.assert_allclose(choices.weights, weights, rtol=1e-5)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_of_equal_scores_the_lower_expert_wins(rule):
    scores, _, _ = operands(rule)
    live = np.ones(TOKENS, bool)
    few = np.float32(np.random.default_rng(1).integers(0, 2, scores.shape))
    few[0] = 0.0
    choices = route(few, None, live, rule=rule)
    experts, weights = choose(few, None, live, rule)
    np.testing.assert_array_equal(choices.experts, experts)
    np.testing.assert_allclose(choices.weights, weights, rtol=1e-5)
    expected = [*range(rule.num_chosen), *range(rule.num_experts, rule.none)]
    assert choices.experts[0].tolist() == expected


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_padding_chooses_no_expert_whatever_its_scores_are(rule):
    scores, bias, live = operands(rule)
    poisoned = np.where(live[:, None], scores, np.nan).astype(np.float32)
    choices = route(poisoned, bias, live, rule=rule)
    assert (np.asarray(choices.experts)[~live] == rule.none).all()
    assert not np.asarray(choices.weights)[~live].any()
    chex.assert_trees_all_equal(choices, route(scores, bias, live, rule=rule))


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_a_row_depends_on_no_other_and_nan_stays_in_it(rule):
    scores, bias, live = operands(rule)
    live[:] = True
    others = operands(rule, seed=1)[0]
    others[3] = scores[3]
    others[5] = np.nan
    others[7, 2] = np.nan  # one expert's score alone
    one, other = (route(s, bias, live, rule=rule) for s in (scores, others))
    np.testing.assert_array_equal(one.experts[3], other.experts[3])
    np.testing.assert_array_equal(one.weights[3], other.weights[3])
    experts, weights = np.asarray(other.experts), np.asarray(other.weights)
    assert ((experts >= 0) & (experts < rule.none)).all()
    is_nan = np.isnan(weights[:, : rule.num_chosen])
    assert is_nan.all(axis=1).tolist() == [row in (5, 7) for row in range(TOKENS)]
    assert is_nan.any(axis=1).tolist() == is_nan.all(axis=1).tolist()


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_columns_of_padding_are_not_read(rule):
    scores, bias, live = operands(rule)
    others = scores.copy()
    others[:, rule.num_columns :] = np.nan
    same = functools.partial(route, bias=bias, live=live, rule=rule)
    chex.assert_trees_all_equal(same(scores), same(others))
    chex.assert_trees_all_equal(same(scores), same(scores[:, : rule.num_columns]))


def test_without_a_gate_no_column_is_read_for_the_shared_experts():
    scores, bias, live = operands(RULES["shared"], columns=8)
    traced = jax.make_jaxpr(functools.partial(route, rule=RULES["shared"]))(scores, None, live)
    assert "logistic" not in str(traced)
    assert (np.asarray(route(scores, None, live, rule=RULES["shared"]).weights)[live, 2] == 1).all()


@pytest.mark.parametrize(
    ("sizes", "rule"),
    [
        ({"num_experts": 0, "num_chosen": 1}, "num_experts must be"),
        ({"num_experts": 8, "num_chosen": 0}, "num_chosen must be"),
        ({"num_experts": 8, "num_chosen": 1, "groups": 0}, "groups must be"),
        ({"num_experts": 8, "num_chosen": 1, "top_groups": -1}, "top_groups must be"),
        ({"num_experts": 8, "num_chosen": 1, "num_shared": -1}, "num_shared must be"),
        ({"num_experts": 8, "num_chosen": 1, "groups": 3}, "8 experts do not make 3 equal groups"),
        ({"num_experts": 8, "num_chosen": 1, "top_groups": 2}, "at most all groups, 1 here, got"),
        ({"num_experts": 8, "num_chosen": 1, "groups": 8}, "8 groups of 8 experts have one each"),
        ({"num_experts": 8, "num_chosen": 9}, "at most the 8 experts of its 1 groups"),
        (
            {"num_experts": 8, "num_chosen": 5, "groups": 4, "top_groups": 2},
            "at most the 4 experts of its 2 groups, got num_chosen 5",
        ),
    ],
)
def test_sizes_that_do_not_go_together_are_refused(sizes, rule):
    with pytest.raises(ValueError, match=rule):
        Routing(**sizes)


def test_a_correction_decides_who_is_chosen_and_no_weight():
    rule = Routing(4, 1, "sigmoid", renormalise=False)
    scores = np.float32([[2.0, 1.0, 0.0, -1.0]])
    bias = np.float32([0, 0, 0, 5])
    choices = route(scores, bias, np.ones(1, bool), rule=rule)
    assert choices.experts.tolist() == [[3]]
    np.testing.assert_allclose(choices.weights, 1 / (1 + np.exp(1.0)), rtol=1e-6)


def test_a_group_counts_by_its_best_two():
    """Group 0 has the best expert, group 1 the best pair."""
    rule = Routing(6, 2, "sigmoid", groups=2, top_groups=1)
    scores = np.float32([[3.0, -9.0, -9.0, 1.0, 1.5, 2.0]])
    assert route(scores, None, np.ones(1, bool), rule=rule).experts.tolist() == [[5, 4]]
    every = dataclasses.replace(rule, top_groups=2)
    assert route(scores, None, np.ones(1, bool), rule=every).experts.tolist() == [[0, 5]]


def test_the_shared_experts_stand_behind_the_chosen_with_the_gate_as_weight():
    rule = RULES["gated"]
    scores, _, _ = operands(rule)
    choices = route(scores, None, np.ones(TOKENS, bool), rule=rule)
    assert (np.asarray(choices.experts)[:, 3:] == [8, 9]).all()
    gate = 1 / (1 + np.exp(-scores[:, 8:9]))
    np.testing.assert_allclose(choices.weights[:, 3:], np.repeat(gate, 2, axis=1), rtol=1e-6)
    np.testing.assert_allclose(choices.weights[:, :3].sum(axis=1), 1.0, rtol=1e-6)


def in_parts(scores, count, seed=2):
    """Partial sums whose sum is exactly `scores`, which are sums of few powers of two."""
    drawn = np.random.default_rng(seed).integers(-64, 64, size=(count - 1, *scores.shape)) / 16
    return np.float32([*drawn, scores - drawn.sum(axis=0)])


@pytest.mark.few(6)
@pytest.mark.parametrize("count", [1, 5])
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_partial_sums_are_summed_first(rule, count):
    scores, bias, live = operands(rule)
    scores = np.float32(np.round(scores * 64) / 64)
    found = route(in_parts(scores, count), bias, live, rule=rule)
    chex.assert_trees_all_equal(found, route(scores, bias, live, rule=rule))


@pytest.mark.parametrize("columns", [48, 128, 192, 576])
def test_the_kernel_sums_parts_without_races(interpreter, columns):
    """Columns that all threads share, those that every warp has, and both."""
    from jaxspec.pallas.moe.route_kernel import moe_route_kernel

    rule = Routing(min(columns - 8, 512), 4, num_shared=1, gated_shared=True)
    scores, bias, live = operands(rule, columns=columns)
    scores = np.float32(np.round(scores * 64) / 64)
    scores[:, rule.num_columns :], scores[~live] = np.nan, np.nan
    parts = in_parts(scores, 6)
    found = moe_route_kernel(parts, bias, live, rule, interpret=interpreter)
    experts, weights = choose(scores, bias, live, rule)
    np.testing.assert_array_equal(found[0], experts)
    np.testing.assert_allclose(found[1], weights, rtol=1e-5)
    assert_no_races()


@pytest.mark.parametrize("name", KERNEL_RULES)
def test_the_kernel_is_the_definition_without_races(interpreter, name):
    """Some tokens have equal scores, or the last experts as their best, and padding has NaN."""
    from jaxspec.pallas.moe.route_kernel import moe_route_kernel

    rule = KERNEL_RULES[name]
    scores, bias, live = operands(rule)
    bias = bias if name in CORRECTED else None
    scores[0], scores[1], live[:3] = 0.0, np.round(scores[1]), True
    scores[2, : rule.num_experts] = np.arange(rule.num_experts) / 4
    scores[~live] = np.nan
    found = moe_route_kernel(scores, bias, live, rule, interpret=interpreter)
    experts, weights = choose(scores, bias, live, rule)
    chex.assert_type(found, [jnp.int32, jnp.float32])
    np.testing.assert_array_equal(found[0], experts)
    np.testing.assert_allclose(found[1], weights, rtol=1e-5)
    assert_no_races()


@pytest.mark.parametrize("name", KERNEL_RULES)
def test_the_kernel_gives_a_row_with_nan_different_experts_and_nan_weights(interpreter, name):
    """All scores are NaN, the first is, or the last: other rows do not change."""
    from jaxspec.pallas.moe.route_kernel import moe_route_kernel

    rule = KERNEL_RULES[name]
    scores, bias, _ = operands(rule)
    scores, live = scores[:4], np.ones(4, bool)
    bias = bias if name in CORRECTED else None
    scores[0], scores[1, 0], scores[2, rule.num_experts - 1] = np.nan, np.nan, np.nan
    experts, weights = moe_route_kernel(scores, bias, live, rule, interpret=interpreter)
    for chosen, weight in zip(experts[:3, : rule.num_chosen], weights[:3], strict=True):
        assert len({*chosen.tolist()}) == rule.num_chosen
        assert all(0 <= expert < rule.num_experts for expert in chosen.tolist())
        assert np.isnan(weight[: rule.num_chosen]).all()
    sound = choose(scores[3:], bias, live[3:], rule)
    np.testing.assert_array_equal(experts[3:], sound[0])
    np.testing.assert_allclose(weights[3:], sound[1], rtol=1e-5)


@pytest.mark.parametrize("experts", [256, 512], ids=["DeepSeek-V3", "Ling-3.0-flash"])
def test_the_kernel_with_groups_compiles_for_an_h200(h200, monkeypatch, capfd, experts):
    from jaxspec.pallas.moe.route_kernel import moe_route_kernel

    rule = Routing(experts, 8, "sigmoid", groups=8, top_groups=4, num_shared=1)

    def step(scores, bias, live):
        return moe_route_kernel(scores, bias, live, rule)

    operands = array(10, 8, experts), array(experts), array(8, dtype=jnp.bool_)
    assert_lean(compile_for(h200, monkeypatch, step, operands), capfd.readouterr().out)


@pytest.mark.parametrize(
    ("rule", "dtype", "why"),
    [
        (Routing(256, 8, num_shared=1, gated_shared=True), jnp.float32, None),
        (Routing(512, 10, "sigmoid", groups=4, top_groups=4), jnp.float32, None),
        (Routing(256, 8, "sigmoid", groups=8, top_groups=4), jnp.float32, None),
        (Routing(12, 8), jnp.float32, "12 experts in float32"),
        (Routing(256, 8), jnp.bfloat16, "256 experts in bfloat16"),
    ],
)
def test_the_kernel_declines_experts_that_are_no_multiple_of_8(rule, dtype, why):
    assert why_not_kernel(jax.ShapeDtypeStruct((4, 576), dtype), rule) == why


@pytest.mark.gpu
@pytest.mark.parametrize(("count", "columns"), [(42, 128), (16, 320), (8, 576)])
def test_on_a_gpu_the_kernel_sums_parts(count, columns):
    rule = Routing(columns - 64, 8, "sigmoid", num_shared=1, gated_shared=True)
    rng = np.random.default_rng(0)
    scores = np.float32(np.round(rng.normal(size=(64, columns)) * 64) / 64)
    live, parts = np.ones(64, bool), in_parts(scores, count)
    found = route(parts, None, live, rule=rule)
    chex.assert_trees_all_equal(found, route(scores, None, live, rule=rule))


@pytest.mark.gpu
@pytest.mark.parametrize(
    "rule",
    [
        Routing(256, 8, num_shared=1, gated_shared=True),
        Routing(512, 10, num_shared=1, gated_shared=True),
        Routing(128, 8),
        Routing(256, 8, "sigmoid", eps=1e-20, scale=2.5, num_shared=1),
        Routing(128, 6, "sigmoid", eps=1e-20, scale=2.5, num_shared=2),
        Routing(512, 22, "sigmoid", eps=1e-20, scale=5.0),
        Routing(72, 10, num_shared=2),
        Routing(256, 8, "sigmoid", eps=1e-20, scale=2.5, groups=8, top_groups=4, num_shared=1),
        Routing(512, 8, "sigmoid", eps=1e-20, scale=2.5, groups=8, top_groups=4, num_shared=1),
    ],
    ids=str,
)
def test_on_a_gpu_the_op_is_its_kernel_and_the_definition(rule):
    dispatch._chosen.pop("moe_route", None)
    rng = np.random.default_rng(0)
    scores = np.float32(rng.normal(size=(64, rule.num_columns + 63)) * 2)
    bias = np.float32(rng.normal(size=rule.num_experts) / 4) if rule.score == "sigmoid" else None
    live = np.arange(64) % 5 != 3
    scores[0], scores[1], scores[~live] = 0.0, np.round(scores[1]), np.nan
    experts, weights = choose(scores, bias, live, rule)
    found = route(scores, bias, live, rule=rule)
    np.testing.assert_array_equal(found.experts, experts)
    np.testing.assert_allclose(found.weights, weights, rtol=1e-5)
    assert dispatch.implementations()["moe_route"] == ("kernel",)
    scores[2], scores[4, 7] = np.nan, np.nan
    found = route(scores, bias, live, rule=rule)
    for token in (2, 4):
        chosen = found.experts[token, : rule.num_chosen].tolist()
        assert len({*chosen}) == rule.num_chosen and set(chosen) <= {*range(rule.num_experts)}
        assert np.isnan(found.weights[token, : rule.num_chosen]).all()
    sound = np.isin(np.arange(64), (2, 4), invert=True)
    np.testing.assert_array_equal(np.asarray(found.experts)[sound], experts[sound])
