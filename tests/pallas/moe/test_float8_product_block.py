"""The kernels of experts in FP8 as published, against float64 in the interpreter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import check, drawn_tokens, with_gaps
from moe_kernels import direct, listed, one_token
from published_experts import block_experts, experts_of, row_experts
from races import assert_no_races

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import moe_experts, moe_experts_reference
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.norm.residual import sum_parts

SQUARED = Activation.SQUARED_RELU
GATED = Activation.SWIGLU
KINDS = block_experts, row_experts


def of_tokens(tokens, parts, number, features):
    """Tokens, some of whose features are 4 times as large, and their choices."""
    x, choices = drawn_tokens(tokens, parts, number, features, jnp.bfloat16)
    rng = np.random.default_rng(tokens)
    sizes = np.ones(features)
    sizes[rng.integers(0, features, 3)] = 4
    return jnp.asarray(np.asarray(x, np.float64) * sizes, jnp.bfloat16), choices


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "parts", "features", "inner", "activation"),
    [
        (1, 3, 256, 64, GATED),
        (3, 2, 128, 128, GATED),
        (8, 3, 384, 192, GATED),
        (5, 2, 256, 192, SQUARED),  # half a chunk of the down matrix, and an odd piece of up
    ],
)
def test_one_tile_for_each_expert(interpreter, kind, tokens, parts, features, inner, activation):
    experts, wide = experts_of(kind, 4, features, inner, activation)
    x, choices = of_tokens(tokens, parts, 4, features)
    check(direct(x, experts, choices, interpreter), x, wide, choices)
    assert_no_races()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "sums", "inner"), [(9, 4, 64), (4, 3, 192), (3, 1, 256)])
def test_one_token_s_experts_are_summed(interpreter, kind, count, sums, inner):
    experts, wide = experts_of(kind, 12, 256, inner)
    x, choices = of_tokens(1, count, 12, 256)
    y = one_token(x, experts, choices, sums, interpreter)
    for i, summed in enumerate(y):
        weights = jnp.where(jnp.arange(count)[None, :] % sums == i, choices.weights, 0.0)
        of_sum = Choices(choices.experts, weights)
        check(summed.astype(jnp.bfloat16), x, wide, of_sum)
    assert_no_races()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("tokens", "rows", "features", "inner", "activation"),
    [
        (9, 8, 256, 64, GATED),
        (12, 16, 128, 128, GATED),
        (24, 32, 384, 192, GATED),
        (12, 64, 512, 128, GATED),
        (24, 32, 640, 192, SQUARED),
    ],
)
def test_tiles_of_any_number_of_rows(interpreter, kind, tokens, rows, features, inner, activation):
    experts, wide = experts_of(kind, 3, features, inner, activation)
    x, choices = of_tokens(tokens, 2, 3, features)
    check(listed(x, experts, choices, rows, interpreter), x, wide, choices)
    assert_no_races()


@pytest.mark.parametrize("kind", KINDS)
def test_rings_that_are_refilled_give_the_same(monkeypatch, interpreter, kind):
    """They hold two chunks."""
    monkeypatch.setattr(device, "room", lambda blocks: 0)
    experts, wide = experts_of(kind, 3, 640, 448)
    for tokens, rows in ((4, None), (10, 16), (10, 64)):
        x, choices = of_tokens(tokens, 2, 3, 640)
        y = listed(x, experts, choices, rows, interpreter) if rows else None
        y = direct(x, experts, choices, interpreter) if y is None else y
        check(y, x, wide, choices)
        assert_no_races()


def test_choices_of_other_devices_experts_give_zeros(interpreter):
    experts, wide = experts_of(block_experts, 4, 256, 128)
    for tokens, rows in ((6, None), (9, 8), (24, 32)):
        x, choices = of_tokens(tokens, 3, 4, 256)
        choices = with_gaps(choices, 4)
        choices = choices.replace(experts=choices.experts.at[-1].set(4))
        y = listed(x, experts, choices, rows, interpreter) if rows else None
        y = direct(x, experts, choices, interpreter) if y is None else y
        check(y, x, wide, choices)
        assert_no_races()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rows", [None, 8, 32])
def test_activations_are_rounded_to_one_number(interpreter, kind, rows):
    """As the op without kernels does it; another rounding in between changes some of them."""
    exact, _ = experts_of(kind, 3, 256, 192)
    up, down = exact.up.replace(terms=1), exact.down.replace(terms=1)
    experts = exact.replace(up=up, down=down)
    x, choices = of_tokens(10 if rows else 6, 2, 3, 256)
    y = listed(x, experts, choices, rows, interpreter) if rows else None
    y = direct(x, experts, choices, interpreter) if y is None else y
    assert_no_races()
    y, rounded, unrounded = (
        np.asarray(sum_parts(each, jnp.float32))
        for each in (y, *(moe_experts_reference(x, e, choices) for e in (experts, exact)))
    )
    off, apart = (np.nanmean(np.abs(each - rounded)) for each in (y, unrounded))
    assert off < apart / 2


def inverted_scale(weight):
    return weight.replace(scale=1 / weight.scale)


def scale_of_the_next_expert(weight):
    return weight.replace(scale=jnp.roll(weight.scale, 1, axis=0))


def scale_of_the_next_columns(weight):
    return weight.replace(scale=jnp.roll(weight.scale, 1, axis=1))


def scale_of_the_next_features(weight):
    return weight.replace(scale=jnp.roll(weight.scale, 1, axis=2))


@pytest.mark.parametrize("rows", [None, 16])
@pytest.mark.parametrize(
    "bug",
    [
        inverted_scale,
        scale_of_the_next_expert,
        scale_of_the_next_columns,
        scale_of_the_next_features,
    ],
)
def test_a_planted_bug_of_scales_is_seen(interpreter, bug, rows):
    experts, wide = experts_of(block_experts, 3, 256, 128)
    x, choices = of_tokens(12 if rows else 6, 2, 3, 256)
    broken = experts.replace(up=bug(experts.up))
    y = listed(x, broken, choices, rows, interpreter) if rows else None
    y = direct(x, broken, choices, interpreter) if y is None else y
    with pytest.raises(AssertionError):
        check(y, x, wide, choices)


HELD = 33  # experts; of the tokens below some are one tile, and others have tiles of each size
SIZES = [
    (9, 2048, 512, GATED, block_experts),
    (8, 2048, 768, GATED, row_experts),
    (12, 4096, 768, GATED, row_experts),
    (8, 2688, 1856, SQUARED, row_experts),
]


@functools.cache
def on_the_gpu(features, inner, activation, kind, terms=2):
    """The weights of `HELD` experts."""
    experts, _ = experts_of(kind, HELD, features, inner, activation)
    up, down = experts.up.replace(terms=terms), experts.down.replace(terms=terms)
    return experts.replace(up=up, down=down)


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 33, 64, 256, 1024])
@pytest.mark.parametrize(("parts", "features", "inner", "activation", "kind"), SIZES)
def test_on_a_gpu_the_op_is_its_kernels_and_the_reference(
    parts, features, inner, activation, kind, tokens, terms
):
    """Tensor cores sum 128 features with about 14 bits."""
    dispatch._chosen.pop("moe_experts", None)
    experts = on_the_gpu(features, inner, activation, kind, terms)
    x, choices = drawn_tokens(tokens, parts, HELD, features, jnp.bfloat16)
    first, again = (jax.jit(moe_experts)(x, experts, choices) for _ in range(2))
    assert dispatch.implementations()["moe_experts"] == ("kernel",)
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (first, again)))
    expected = jax.jit(moe_experts_reference)(x, experts, choices)
    found, expected = (np.asarray(sum_parts(y, jnp.float32)) for y in (first, expected))
    typical = np.sqrt(np.nanmean(expected**2))
    if terms == 2:
        eps = float(jnp.finfo(jnp.bfloat16).eps)
        np.testing.assert_allclose(found, expected, rtol=eps, atol=8 * eps * typical)
    else:  # other roundings to 8 bits in between
        np.testing.assert_array_equal(np.isnan(found), np.isnan(expected))
        assert np.nanmean(np.abs(found - expected)) < 2e-2 * typical
    assert not found[np.asarray(choices.experts)[:, 0] == HELD].any()


@pytest.mark.gpu
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [2, 8, 9, 64, 256, 1024])
def test_on_a_gpu_a_neighbour_changes_no_bit_of_a_token(tokens, terms):
    experts = on_the_gpu(2048, 512, GATED, block_experts, terms)
    run = jax.jit(moe_experts)
    x, choices = drawn_tokens(tokens, 9, HELD, 2048, jnp.bfloat16)
    others, of_others = drawn_tokens(tokens, 9, HELD, 2048, jnp.bfloat16, seed=1)

    def output(x, of_all, place):
        """That of the first token, which stands at `place` among others."""
        chosen = Choices(
            of_all.experts.at[place].set(choices.experts[0]),
            of_all.weights.at[place].set(choices.weights[0]),
        )
        y = run(x.at[place].set(first), experts, chosen)
        return np.asarray(y[..., place, :], np.float32)

    first = x[0]
    expected = output(x, choices, 0)
    assert np.isfinite(expected).all() and expected.any()
    for place in (0, tokens // 2, tokens - 1):
        np.testing.assert_array_equal(output(others, of_others, place), expected)
