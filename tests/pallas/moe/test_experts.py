"""moe_experts and its kernels against NumPy, one row with a NaN, and padding among the rows."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from mixtures import activated, check, drawn, drawn_tokens, with_gaps
from moe_kernels import biased_tiles, direct, listed, one_token
from published_experts import block_experts, experts_of, row_experts
from races import assert_no_races

from jaxspec.pallas import dispatch
from jaxspec.pallas.gpu import device
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.moe.experts import (
    Experts,
    moe_experts,
    moe_experts_reference,
    tile_rows,
    why_not_kernel,
)
from jaxspec.pallas.moe.route import Choices
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.weight import DenseExperts, InputsFirstExperts

GATED = Activation.SWIGLU


@pytest.mark.few(2)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_the_op_is_what_the_experts_put_out(tokens, dtype, activation):
    *operands, choices = drawn(tokens, 3, 5, 32, 24, dtype, activation)
    for each in (choices, with_gaps(choices, 5)):
        check(jax.jit(moe_experts)(*operands, each), *operands, each)


@pytest.mark.few(2)
@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("tokens", [1, 40])
def test_the_reference_has_the_gradient_of_the_formula(tokens, activation):
    """With respect to tokens, weights of choices and matrices; padding adds nothing to any."""
    x, experts, choices = drawn(tokens, 3, 5, 32, 24, jnp.float32, activation)
    x = jnp.nan_to_num(x)
    is_real = (choices.experts < 5)[:, :, None]

    def loop(x, up, down, weights):
        held = Experts(DenseExperts(up), DenseExperts(down), activation)
        with dispatch.reference(longest=tokens):
            out = moe_experts(x, held, dataclasses.replace(choices, weights=weights))
        return jnp.sum(jnp.sin(out))

    def formula(x, up, down, weights):
        chosen = jnp.minimum(choices.experts, 4)
        hidden = activation(jnp.einsum("tf,tpof->tpo", x, up[chosen]))
        out = jnp.einsum("tpi,tpoi->tpo", hidden, down[chosen]) * weights[:, :, None]
        return jnp.sum(jnp.sin(jnp.where(is_real, out, 0.0)))

    given = x, experts.up.array, experts.down.array, choices.weights
    found, want = (jax.jit(jax.grad(f, argnums=(0, 1, 2, 3)))(*given) for f in (loop, formula))
    for one, other in zip(found, want, strict=True):
        assert np.isfinite(one).all()
        np.testing.assert_allclose(one, other, atol=2e-4)


def with_biases(experts):
    rng = np.random.default_rng(0)
    up, down = (
        jnp.asarray(rng.normal(size=stack.array.shape[:2]), stack.dtype)
        for stack in (experts.up, experts.down)
    )
    return experts.replace(up_bias=up, down_bias=down)


def turned(experts):
    """The same with the inputs of each matrix first."""
    up, down = (
        InputsFirstExperts(stack.array.swapaxes(1, 2)) for stack in (experts.up, experts.down)
    )
    return experts.replace(up=up, down=down)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_biases_are_added_and_matrices_may_have_their_inputs_first(dtype):
    """As gpt-oss has them. Padding and experts of other devices add no bias."""
    x, experts, choices = drawn(9, 3, 5, 32, 24, dtype, Activation.CLAMPED_SWIGLU)
    biased = with_biases(experts)
    for each in (choices, with_gaps(choices, 5)):
        for given in (biased, turned(biased)):
            check(jax.jit(moe_experts)(x, given, each), x, biased, each)


@pytest.mark.parametrize(
    ("tokens", "rows", "features", "inner", "dtype", "turn"),
    [
        (1, 8, 192, 64, jnp.bfloat16, turned),
        (9, 8, 256, 128, jnp.bfloat16, lambda experts: experts),
        (12, 16, 128, 64, jnp.float16, turned),
        (24, 32, 320, 192, jnp.bfloat16, turned),
    ],
)
def test_kernels_of_experts_with_biases_are_the_op_without_races(
    interpreter, tokens, rows, features, inner, dtype, turn
):
    x, experts, choices = drawn(tokens, 2, 3, features, inner, dtype, Activation.CLAMPED_SWIGLU)
    biased = with_biases(experts)
    for each in (choices, with_gaps(choices, 3)):
        check(biased_tiles(x, turn(biased), each, rows, interpreter), x, biased, each)
    assert_no_races()


def with_limits(experts):
    """Two experts have the same limit, which some of their numbers exceed, and the others none."""
    limits = np.full(experts.number, np.inf)
    limits[:2] = 0.25
    return experts.replace(limits=jnp.asarray(limits, jnp.float32))


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_limits_of_experts_are_those_of_each(dtype):
    x, experts, choices = drawn(9, 3, 5, 32, 24, dtype)
    given = with_limits(experts)
    for each in (choices, with_gaps(choices, 5)):
        check(jax.jit(moe_experts)(x, given, each), x, given, each)
    plain, limited = (jax.jit(moe_experts)(x, held, choices) for held in (experts, given))
    assert np.nanmax(np.abs(plain - limited)) > 0.01


@pytest.mark.parametrize(
    ("tokens", "rows", "features", "inner"), [(1, 8, 192, 64), (24, 32, 320, 192)]
)
def test_kernels_of_experts_with_limits_are_the_op_without_races(
    interpreter, tokens, rows, features, inner
):
    x, experts, choices = drawn(tokens, 2, 3, features, inner, jnp.bfloat16)
    given = with_limits(experts)
    for each in (choices, with_gaps(choices, 3)):
        check(biased_tiles(x, given, each, rows, interpreter), x, given, each)
    assert_no_races()


@pytest.mark.few(4)
@pytest.mark.parametrize("kind", [block_experts, row_experts])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("tokens", [1, 8, 40])
def test_the_op_multiplies_published_matrices_as_they_are(tokens, dtype, kind):
    """Half a block is partial at the end of a matrix's columns, and of its features."""
    experts, wide = experts_of(kind, 5, 32, 24)
    x, choices = drawn_tokens(tokens, 3, 5, 32, dtype)
    for each in (choices, with_gaps(choices, 5)):
        check(jax.jit(moe_experts)(x, experts, each), x, wide, each)


def rounded_to_e4m3(x):
    """Rows in float64, each 128 features rounded to e4m3 numbers times a 448th of the largest."""
    chunks = np.asarray(x, np.float64).reshape(len(x), x.shape[1] // 128, 128)
    factors = np.abs(chunks).max(axis=2, keepdims=True) / 448
    return ((chunks / factors).astype(ml_dtypes.float8_e4m3fn) * factors).reshape(x.shape)


def test_the_op_rounds_activations_where_the_weight_has_one_term():
    experts, wide = experts_of(block_experts, 1, 256, 128)
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(16, 256)), jnp.float32)
    choices = Choices(jnp.zeros((16, 1), jnp.int32), jnp.ones((16, 1), jnp.float32))
    rounded = experts.replace(up=experts.up.replace(terms=1), down=experts.down.replace(terms=1))
    exact, y = (jax.jit(moe_experts_reference)(x, e, choices)[0] for e in (experts, rounded))
    hidden = activated(rounded_to_e4m3(x) @ wide.up.array[0].T, GATED)
    expected = rounded_to_e4m3(hidden) @ wide.down.array[0].T
    off, apart = (np.abs(expected - np.asarray(a)).mean() for a in (y, exact))
    assert off < apart / 30


@pytest.mark.parametrize(
    ("tokens", "parts", "inner", "dtype", "activation"),
    [
        (1, 3, 64, jnp.bfloat16, GATED),
        (3, 2, 128, jnp.float16, GATED),
        (8, 3, 64, jnp.bfloat16, GATED),
        (1, 3, 128, jnp.bfloat16, Activation.SQUARED_RELU),
        (8, 3, 64, jnp.float16, Activation.SQUARED_RELU),
    ],
)
def test_one_tile_for_each_expert_is_the_op_without_races(
    interpreter, tokens, parts, inner, dtype, activation
):
    """Of four experts, so tokens share them."""
    operands = drawn(tokens, parts, 4, 256, inner, dtype, activation)
    check(direct(*operands, interpreter), *operands)
    assert_no_races()


@pytest.mark.parametrize(
    ("count", "sums", "inner"), [(9, 1, 64), (9, 4, 64), (11, 3, 64), (4, 3, 192), (3, 3, 128)]
)
def test_one_token_s_experts_are_summed_without_races(interpreter, count, sums, inner):
    """Sum `i` is that of the choices `i`, `i + sums` and so on; the ring may hold all of them."""
    *others, choices = drawn(1, count, 12, 256, inner, jnp.bfloat16)
    y = one_token(*others, choices, sums, interpreter)
    for i, summed in enumerate(y):
        is_here = jnp.arange(count)[None, :] % sums == i
        check(
            summed.astype(jnp.bfloat16),
            *others,
            Choices(choices.experts, jnp.where(is_here, choices.weights, 0.0)),
        )
    assert_no_races()


def test_one_token_of_padding_gets_zeros(interpreter):
    x, experts, choices = drawn(1, 9, 12, 256, 64, jnp.bfloat16)
    choices = Choices(jnp.full_like(choices.experts, 12), jnp.zeros_like(choices.weights))
    y = one_token(x, experts, choices, 4, interpreter)
    assert not np.asarray(y).any()
    assert_no_races()


@pytest.mark.parametrize(
    ("tokens", "rows", "features", "inner", "dtype", "activation"),
    [
        (9, 8, 256, 64, jnp.bfloat16, GATED),
        (12, 16, 128, 128, jnp.float16, GATED),
        (24, 32, 256, 64, jnp.float16, GATED),
        (12, 128, 128, 64, jnp.bfloat16, GATED),
        (9, 8, 384, 64, jnp.bfloat16, Activation.SQUARED_RELU),
        (24, 32, 640, 128, jnp.bfloat16, Activation.SQUARED_RELU),
        (12, 128, 128, 192, jnp.float16, Activation.SQUARED_RELU),
    ],
)
def test_tiles_of_any_number_of_rows_are_the_op_without_races(
    interpreter, tokens, rows, features, inner, dtype, activation
):
    operands = drawn(tokens, 2, 3, features, inner, dtype, activation)
    check(listed(*operands, rows, interpreter), *operands)
    assert_no_races()


@pytest.mark.parametrize("activation", [Activation.SWIGLU, Activation.SQUARED_RELU])
def test_rings_that_are_refilled_give_the_same_without_races(monkeypatch, interpreter, activation):
    """They hold two chunks of each product, of four and three, or of eight in a tile of 64."""
    monkeypatch.setattr(device, "room", lambda blocks: 0)
    operands = drawn(4, 1, 2, 512, 192, jnp.bfloat16, activation)
    check(direct(*operands, interpreter), *operands)
    check(listed(*operands, 64, interpreter), *operands)
    assert_no_races()


def test_without_live_tokens_everything_is_zero(interpreter):
    *operands, choices = drawn(9, 2, 3, 256, 64, jnp.bfloat16)
    choices = Choices(jnp.full_like(choices.experts, 3), jnp.zeros_like(choices.weights))
    for rows in (8, 32):
        check(listed(*operands, choices, rows, interpreter), *operands, choices)
    assert_no_races()


def test_choices_of_other_devices_experts_give_zeros_without_races(interpreter):
    """Some tokens have no expert here; a place without one may hold anything."""
    for tokens, rows in ((1, None), (6, None), (9, 8), (24, 32)):
        *operands, choices = drawn(tokens, 3, 4, 256, 64, jnp.bfloat16)
        choices = with_gaps(choices, 4)
        choices = choices.replace(experts=choices.experts.at[-1].set(4))
        given = *operands, choices
        y = listed(*given, rows, interpreter) if rows else direct(*given, interpreter)
        check(y, *given)
    assert_no_races()


@pytest.mark.parametrize(
    ("tokens", "parts", "experts", "rows"),
    [
        (9, 9, 257, 8),
        (64, 9, 257, 8),
        (256, 9, 257, 16),
        (512, 9, 257, 32),
        (2048, 9, 257, 64),
        (4096, 9, 257, 128),
        (64, 8, 128, 16),
        (9, 1, 1, 16),
    ],
)
def test_a_tile_has_room_for_what_an_expert_has_on_average(tokens, parts, experts, rows):
    assert tile_rows(tokens, parts, experts) == rows


@pytest.mark.parametrize(
    ("dtypes", "features", "inner", "why"),
    [
        (3 * [jnp.bfloat16], 2048, 512, None),
        (3 * [jnp.float16], 128, 64, None),
        (3 * [jnp.float32], 256, 64, "float32 and float32"),
        ([jnp.float16, jnp.bfloat16, jnp.bfloat16], 256, 64, "float16 and bfloat16"),
        ([jnp.bfloat16, jnp.bfloat16, jnp.float16], 256, 64, "bfloat16 and float16"),
        (3 * [jnp.bfloat16], 192, 64, "experts of 192 x 64"),
        (3 * [jnp.bfloat16], 256, 96, "experts of 256 x 96"),
    ],
)
def test_kernels_decline_what_they_cannot_multiply(dtypes, features, inner, why):
    shapes = (4, features), (5, 2 * inner, features), (5, features, inner)
    x, gate_up, down = map(jnp.zeros, shapes, dtypes)
    experts = Experts(DenseExperts(gate_up), DenseExperts(down))
    assert why_not_kernel(x, experts) == why
    if why is None:
        alternating = experts.replace(activation=Activation.CLAMPED_SWIGLU)
        assert why_not_kernel(x, alternating) and why_not_kernel(x, turned(experts))
        biases = {"up_bias": gate_up, "down_bias": down}
        assert why_not_kernel(x, turned(alternating).replace(**biases)) is None


HELD = 33  # experts; of the tokens below some are one tile, and others have tiles of each size


@functools.cache
def on_the_gpu(features, inner, dtype, activation=GATED):
    """The weights of `HELD` experts."""
    shapes = (HELD, activation.pieces * inner, features), (HELD, features, inner)
    keys = jax.random.split(jax.random.key(0))
    drawn = (jax.random.normal(key, dims) for key, dims in zip(keys, shapes, strict=True))
    stacks = (DenseExperts((a * a.shape[2] ** -0.5).astype(dtype)) for a in drawn)
    experts = Experts(*stacks, activation)
    return turned(with_biases(experts)) if activation.alternates else experts


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 2, 8, 9, 33, 64, 256, 1024])
@pytest.mark.parametrize(
    ("parts", "features", "inner", "dtype", "activation"),
    [
        (9, 2048, 512, jnp.bfloat16, GATED),
        (11, 2048, 512, jnp.float16, GATED),
        (8, 2048, 768, jnp.bfloat16, GATED),
        (3, 2048, 64, jnp.bfloat16, GATED),
        (12, 4096, 768, jnp.bfloat16, GATED),
        (8, 2688, 1856, jnp.bfloat16, Activation.SQUARED_RELU),
        (22, 1024, 2688, jnp.bfloat16, Activation.SQUARED_RELU),
        (4, 2880, 2880, jnp.bfloat16, Activation.CLAMPED_SWIGLU),
    ],
)
def test_on_a_gpu_the_op_is_its_kernels_and_the_reference(
    parts, features, inner, dtype, activation, tokens
):
    dispatch._chosen.pop("moe_experts", None)
    experts = on_the_gpu(features, inner, dtype, activation)
    x, choices = drawn_tokens(tokens, parts, HELD, features, dtype)
    first, again = (jax.jit(moe_experts)(x, experts, choices) for _ in range(2))
    assert dispatch.implementations()["moe_experts"] == ("kernel",)
    # As float32, because NumPy does not take two bfloat16 NaN for equal.
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (first, again)))
    expected = jax.jit(moe_experts_reference)(x, experts, choices)
    found, expected = (np.asarray(sum_parts(y, jnp.float32)) for y in (first, expected))
    eps, typical = float(jnp.finfo(dtype).eps), np.sqrt(np.nanmean(expected**2))
    np.testing.assert_allclose(found, expected, rtol=eps, atol=8 * eps * typical)
    assert not found[np.asarray(choices.experts)[:, 0] == HELD].any()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [2, 8, 9, 33, 64, 256, 1024])
def test_on_a_gpu_a_neighbour_changes_no_bit_of_a_token(tokens):
    """Law 3: nor does its place, or padding beside it, or how full its experts' tiles are."""
    experts, run = on_the_gpu(2048, 512, jnp.bfloat16), jax.jit(moe_experts)
    x, choices = drawn_tokens(tokens, 9, HELD, 2048, jnp.bfloat16)
    others, others_choices = drawn_tokens(tokens, 9, HELD, 2048, jnp.bfloat16, seed=1)
    mine = choices.experts[0], choices.weights[0]

    def output(x, of_all, place):
        """That of the first token, which stands at `place` among others."""
        at_place = zip((of_all.experts, of_all.weights), mine, strict=True)
        chosen = Choices(*(all_.at[place].set(one) for all_, one in at_place))
        y = run(x.at[place].set(first), experts, chosen)
        return np.asarray(y[..., place, :], np.float32)

    first = x[0]
    expected = output(x, choices, 0)
    assert np.isfinite(expected).all() and expected.any()
    nobody = Choices(jnp.full((tokens, 9), HELD, jnp.int32), jnp.zeros((tokens, 9), jnp.float32))
    everybody = Choices(*(jnp.tile(one, (tokens, 1)) for one in mine))
    for neighbours in (others_choices, nobody, everybody):
        for place in (0, tokens // 2, tokens - 1):
            np.testing.assert_array_equal(output(others, neighbours, place), expected)
