"""latent_moe_feed_forward against its equations in NumPy (`tests/support/mixtures.py`)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import activated, choose, normed, parts_of

from jaxspec.pallas import dispatch
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import Experts
from jaxspec.pallas.moe.feed_forward import Router
from jaxspec.pallas.moe.latent import latent_moe_feed_forward
from jaxspec.pallas.moe.route import Routing
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense, DenseExperts

RULE = Routing(8, 3, "sigmoid", eps=1e-20, scale=2.5)
FEATURES, LATENT, INNER, SHARED = 32, 16, 24, 40
run = jax.jit(latent_moe_feed_forward)


def weights(activation=Activation.SQUARED_RELU, dtype=jnp.float32, sizes=None, rule=RULE):
    """A norm, the router's matrix with NaN between its columns, experts, and the last matrix."""
    features, latent, inner, shared = sizes or (FEATURES, LATENT, INNER, SHARED)
    rng, pieces = np.random.default_rng(0), activation.pieces

    def draw(*dims, inner):
        return jnp.asarray(rng.normal(size=dims) * inner**-0.5, dtype)

    starts, columns = places(rule.num_experts, latent, pieces * shared)
    first = jnp.full((features, columns + 5), jnp.nan, dtype)
    for start, size in zip(starts, (rule.num_experts, latent, pieces * shared), strict=True):
        first = first.at[:, start : start + size].set(draw(features, size, inner=features))
    up = draw(rule.num_experts, pieces * inner, latent, inner=latent)
    down = draw(rule.num_experts, latent, inner, inner=inner)
    output = draw(latent + shared, features, inner=latent + shared)
    bias = jnp.asarray(rng.normal(size=rule.num_experts) / 4, jnp.float32)
    return (
        Norm(draw(features, inner=1.0), 1e-6),
        Router(Dense(first), bias, rule),
        Experts(DenseExperts(up), DenseExperts(down), activation),
        Dense(output),
    )


def places(*sizes):
    """Where each part of the router's columns begins, at multiples of 128, and the last ends."""
    starts = np.cumsum([0, *(-(-size // 128) * 128 for size in sizes)])
    return starts[:-1], int(starts[-2] + sizes[-1])


def tokens(count, seed=0, features=FEATURES, dtype=jnp.float32):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, features)), dtype)


def oracle(stream, pending, norm, router, experts, output, live):
    """The sum, and what the layer puts out for its norm, in float64."""
    stream, x = normed(stream, pending, norm)
    latent, pieces, rule = experts.down.outer, experts.activation.pieces, router.rule
    shared = pieces * (output.inner - latent)
    sizes, product = (rule.num_experts, latent, shared), x @ np.float64(router.weight.array)
    starts, _ = places(*sizes)
    scores, small, wide = (product[:, a : a + n] for a, n in zip(starts, sizes, strict=True))
    routed = parts_of(small, experts, *choose(scores, router.bias, live, rule)).sum(axis=0)
    both = np.concatenate([routed, activated(wide, experts.activation)], axis=1)
    return stream, both @ np.asarray(output.array, np.float64)


@pytest.mark.few(4)
@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.SQUARED_RELU])
@pytest.mark.parametrize("shape", [None, (), (3,)], ids=["nothing", "tokens", "parts"])
@pytest.mark.parametrize("count", [1, 13])
def test_the_layer_is_its_equations(count, shape, activation):
    held, pending = weights(activation), None
    if shape is not None:
        sums = np.random.default_rng(1).normal(size=(*shape, count, FEATURES))
        pending = jnp.asarray(sums, jnp.float32)
    live = jnp.arange(count) % 4 != 1
    stream, added = run(tokens(count), pending, *held, live)
    expected_stream, expected = oracle(tokens(count), pending, *held, live)
    np.testing.assert_allclose(stream, expected_stream, rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(sum_parts(added, stream.dtype), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.soak
def test_the_scores_are_float32_though_the_latent_features_are_not():
    """Two experts whose scores differ by less than bfloat16 has are told apart."""
    norm, router, *rest = weights(dtype=jnp.bfloat16)
    array = jnp.zeros_like(router.weight.array).at[0, :2].set(1.0).at[1, 1].set(2**-9)
    router = Router(Dense(array), None, Routing(8, 1, "sigmoid"))
    norm = Norm(jnp.ones(FEATURES, jnp.bfloat16), 0.0)
    x = jnp.full((1, FEATURES), 1.0, jnp.bfloat16)
    chosen = []

    def noted(scores, bias, live, rule):
        chosen.append(scores[0, :2])
        return real(scores, bias, live, rule)

    from jaxspec.pallas.moe import latent as module

    real = module.moe_route
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "moe_route", noted)
        latent_moe_feed_forward(x, None, norm, router, *rest, jnp.ones(1, bool))
    assert chosen[0].dtype == jnp.float32 and chosen[0][1] > chosen[0][0]


def test_a_row_of_nan_and_padding_stay_alone():
    held, live = weights(), jnp.arange(13) != 4
    _, sound = run(tokens(13), None, *held, live)
    poisoned = tokens(13).at[4].set(jnp.nan).at[6, 3].set(jnp.nan)
    _, added = run(poisoned, None, *held, live)
    assert np.isnan(added[6]).all()
    others = np.isin(np.arange(13), (4, 6), invert=True)
    np.testing.assert_array_equal(np.asarray(added)[others], np.asarray(sound)[others])


def test_weights_that_do_not_fit_are_refused():
    norm, router, experts, output = weights()
    live = jnp.ones(2, bool)
    few = Router(Dense(router.weight.array[:, : 256 + SHARED - 1]), None, RULE)
    cases = [
        ((few, experts, output), r"must have 296 columns or more, got 56 x 32 and 295"),
        ((router, experts, Dense(output.array[:, 1:])), "must be 56 x 32"),
        ((router, experts, Dense(output.array[:15])), "must be 16 x 32"),
        ((router, Experts(experts.up, experts.up, experts.activation), output), "weights of 8 "),
        (
            (Router(router.weight, None, Routing(7, 3, num_shared=1)), experts, output),
            "shared layer beside the experts, got 1",
        ),
    ]
    for operands, message in cases:
        with pytest.raises(ValueError, match=message):
            latent_moe_feed_forward(tokens(2), None, norm, *operands, live)


LARGE = 1024, 256, 128, 384


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 8, 40, 1000])
def test_on_a_gpu_the_layer_is_its_kernels_and_near_its_equations(count):
    for op in ("moe_route", "moe_experts"):
        dispatch._chosen.pop(op, None)
    rule = Routing(64, 6, "sigmoid", eps=1e-20, scale=2.5)
    held = weights(dtype=jnp.bfloat16, sizes=LARGE, rule=rule)
    stream, pending = (tokens(count, seed, LARGE[0], jnp.bfloat16) for seed in (0, 1))
    live = jnp.ones(count, bool)
    _, added = run(stream, pending, *held, live)
    chosen = dispatch.implementations()
    assert chosen["moe_route"] == chosen["moe_experts"] == ("kernel",)
    _, expected = oracle(stream, pending, *held, live)
    # By the mean, because a token whose scores lie close together may choose another expert.
    error = np.abs(np.asarray(sum_parts(added, jnp.float32), np.float64) - expected)
    assert error.mean() < 0.03 * np.abs(expected).mean()
