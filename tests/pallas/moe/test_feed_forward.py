"""moe_feed_forward against its equations in NumPy (`tests/support/mixtures.py`)."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import RULES, layer

from jaxspec.pallas import dispatch
from jaxspec.pallas.moe.experts import Experts
from jaxspec.pallas.moe.feed_forward import Router, moe_feed_forward
from jaxspec.pallas.moe.route import Routing
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense, DenseExperts

FEATURES, INNER = 32, 24
RULE = Routing(8, 3, num_shared=2, gated_shared=True)
compiled = jax.jit(moe_feed_forward)


def weights(rule, dtype=jnp.float32, *, bias=False, features=FEATURES, inner=INNER):
    """Norm, router and experts; the router's columns of padding hold NaN."""
    rng = np.random.default_rng(0)
    scores = rng.normal(size=(features, rule.num_columns)) * features**-0.5 * 2
    padded = np.pad(scores, ((0, 0), (0, 5)), constant_values=np.nan)
    gate_up = rng.normal(size=(rule.none, 2 * inner, features)) * features**-0.5
    down = rng.normal(size=(rule.none, features, inner)) * inner**-0.5
    scale = rng.normal(size=features) / 4
    padded, gate_up, down, scale = (jnp.asarray(a, dtype) for a in (padded, gate_up, down, scale))
    correction = jnp.asarray(rng.normal(size=rule.num_experts) / 4, jnp.float32)
    return (
        Norm(scale, 1e-6, zero_centred=True),
        Router(Dense(padded), correction if bias else None, rule),
        Experts(DenseExperts(gate_up), DenseExperts(down)),
    )


def tokens(count, seed=0, dtype=jnp.float32, features=FEATURES):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, features)), dtype)


def some_live(count):
    return jnp.arange(count) % 4 != 1


@pytest.mark.few(3)
@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
def test_the_layer_is_its_equations(rule):
    held, live = weights(rule, bias=rule.score == "sigmoid"), some_live(13)
    pending = jnp.stack([tokens(13, 1), tokens(13, 2)])
    stream, added = compiled(tokens(13), pending, *held, live)
    chex.assert_shape(added, (rule.parts, 13, FEATURES))
    chex.assert_type(added, jnp.float32)
    expected_stream, expected = layer(tokens(13), pending, *held, live)
    np.testing.assert_allclose(stream, expected_stream, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sum_parts(added, stream.dtype), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("shape", [None, ()], ids=["nothing", "tokens"])
@pytest.mark.parametrize("count", [1, 40])
def test_few_and_many_tokens_and_what_is_pending(count, shape):
    held, live = weights(RULE), jnp.ones(count, bool)
    pending = None if shape is None else tokens(count, 1)
    stream, added = compiled(tokens(count), pending, *held, live)
    expected_stream, expected = layer(tokens(count), pending, *held, live)
    np.testing.assert_allclose(stream, expected_stream, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sum_parts(added, stream.dtype), expected, rtol=1e-4, atol=1e-5)


def test_in_16_bits_the_output_is_near_that_of_the_same_weights():
    held, live = weights(RULE, jnp.bfloat16), some_live(13)
    stream, added = compiled(tokens(13, dtype=jnp.bfloat16), None, *held, live)
    chex.assert_type([stream, added], [jnp.bfloat16, jnp.float32])
    _, expected = layer(tokens(13, dtype=jnp.bfloat16), None, *held, live)
    error = np.abs(np.asarray(added.sum(axis=0)) - expected)
    assert error.mean() < 0.01 * np.abs(expected).mean()


def test_padding_gets_zeros_and_changes_no_token():
    held, live = weights(RULE), some_live(13)
    garbage = jnp.where(live[:, None], tokens(13), jnp.nan)
    _, added = compiled(garbage, None, *held, live)
    assert not np.asarray(added)[:, ~np.asarray(live)].any()
    _, beside_zeros = compiled(jnp.where(live[:, None], tokens(13), 0.0), None, *held, live)
    np.testing.assert_array_equal(added, beside_zeros)


def test_a_neighbour_changes_no_bit_of_a_token():
    """Law 3: nor does its place, or how full its experts' tiles are."""
    held = weights(RULE)
    alone = jnp.zeros((13, FEATURES)).at[4].set(tokens(13)[4])
    _, one = compiled(alone, None, *held, jnp.arange(13) == 4)
    for seed in range(3):
        others = tokens(13, seed).at[9].set(tokens(13)[4])
        _, added = compiled(others, None, *held, jnp.ones(13, bool))
        np.testing.assert_array_equal(added[:, 9], one[:, 4])
    crowd = jnp.tile(tokens(13)[4], (13, 1))  # all go to the same experts
    _, added = compiled(crowd, None, *held, jnp.ones(13, bool))
    np.testing.assert_array_equal(added[:, 12], one[:, 4])


def test_a_row_of_nan_stays_alone():
    held, live = weights(RULE), jnp.ones(13, bool)
    poisoned = tokens(13).at[6, 3].set(jnp.nan)
    _, added = compiled(poisoned, None, *held, live)
    assert np.isnan(added).any(axis=(0, 2)).tolist() == [row == 6 for row in range(13)]
    _, sound = compiled(tokens(13), None, *held, live)
    np.testing.assert_array_equal(np.delete(added, 6, axis=1), np.delete(sound, 6, axis=1))


def test_experts_of_other_shapes_are_refused():
    norm, router, experts = weights(RULE)
    gate_up, down, live = experts.up, experts.down, jnp.ones(2, bool)
    for wrong in (
        (DenseExperts(gate_up.array[:8]), down),  # the shared ones are not there
        (DenseExperts(gate_up.array[:, :-2]), down),
        (gate_up, DenseExperts(down.array[:9])),
        (gate_up, DenseExperts(jnp.swapaxes(down.array, 1, 2))),
    ):
        with pytest.raises(ValueError, match="of 8 experts that compete and 2 slices of shared "):
            moe_feed_forward(tokens(2), None, norm, router, Experts(*wrong), live)


def test_a_router_of_another_shape_is_refused():
    norm, router, experts = weights(RULE)
    columns = router.weight.array
    for wrong in (columns[:, :8], columns[:-1]):
        router = Router(Dense(wrong), None, RULE)
        with pytest.raises(
            ValueError, match=r"of 8 experts and the gate .* must be 32 x 9 or wider"
        ):
            moe_feed_forward(tokens(2), None, norm, router, experts, jnp.ones(2, bool))


LARGE = {"features": 512, "inner": 128}  # what the kernels of all its ops take
LARGE_RULE = Routing(32, 4, num_shared=1, gated_shared=True)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8, 40, 1000])
def test_on_a_gpu_the_layer_is_its_kernels_and_near_its_equations(count):
    for op in ("moe_route", "moe_experts"):
        dispatch._chosen.pop(op, None)
    held = weights(LARGE_RULE, jnp.bfloat16, **LARGE)
    stream, pending = (tokens(count, seed, jnp.bfloat16, 512) for seed in (0, 1))
    live = some_live(count)
    _, added = jax.jit(moe_feed_forward)(stream, pending, *held, live)
    chosen = dispatch.implementations()
    assert chosen["moe_route"] == chosen["moe_experts"] == ("kernel",)
    _, expected = layer(stream, pending, *held, live)
    # By the mean, because a token whose scores lie close together may choose another expert.
    error = np.abs(np.asarray(sum_parts(added, jnp.float32), np.float64) - expected)
    assert error.mean() < 0.02 * np.abs(expected).mean()


@pytest.mark.gpu
@pytest.mark.parametrize("count", [2, 8, 40, 250, 1000])
def test_on_a_gpu_a_neighbour_changes_no_bit_of_a_token(count):
    """Law 3 with the norm, the router and the routing."""
    held, run = weights(LARGE_RULE, jnp.bfloat16, **LARGE), jax.jit(moe_feed_forward)
    mine = tokens(1, 7, jnp.bfloat16, 512)[0]

    def output(seed, place, live):
        stream = tokens(count, seed, jnp.bfloat16, 512).at[place].set(mine)
        return [np.asarray(y[..., place, :], np.float32) for y in run(stream, stream, *held, live)]

    expected = output(0, 0, jnp.ones(count, bool))
    for seed, place in ((1, 0), (2, count // 2), (3, count - 1)):
        for live in (jnp.ones(count, bool), jnp.arange(count) == place):
            for found, wanted in zip(output(seed, place, live), expected, strict=True):
                np.testing.assert_array_equal(found, wanted)
