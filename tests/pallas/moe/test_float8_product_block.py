"""The kernels of experts in FP8 as published, against float64 in the interpreter."""

import jax.numpy as jnp
import numpy as np
import pytest
from mixtures import check, drawn_tokens, with_gaps
from moe_kernels import direct, listed, one_token
from published_experts import block_experts, experts_of, row_experts
from races import assert_no_races

from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import moe_experts_reference
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
