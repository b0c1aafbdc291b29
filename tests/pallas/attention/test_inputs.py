"""attention_inputs and its kernel against NumPy, with padding and NaN where they come."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.measure.shapes import ATTENTION, AttentionShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.inputs import (
    QKNorm,
    attention_inputs,
    attention_inputs_reference,
    rotate,
)
from jaxspec.pallas.attention.inputs_kernel import attention_inputs_kernel

EPS = 1e-6
LAYERS, PAGES, LAYER = 2, 4, 1
SMALL = AttentionShape(4, 2, 8)
reference = jax.jit(attention_inputs_reference, static_argnames=("layer", "heads", "gated"))


def operands(shape, gated, dtype, half, tokens=7, page_size=5, pool_dtype=None, normed=True):
    """Random operands, in the op's order; gated heads have norms centred at zero, as Qwen3.5's.

    Without `normed` there is no norm, as in Llama; with a `half` of 0 there is no rotation, as in
    Nemotron.
    The second token has a NaN in each head. Among seven tokens or more, four have slots that are
    not written: none, the null page's, and two beyond the pool.
    """
    rng = np.random.default_rng(tokens)
    heads = (1 + gated) * shape.heads + 2 * shape.kv_heads
    x = rng.normal(size=(tokens, heads, shape.head_dim)) * np.exp(rng.normal(size=(tokens, 1, 1)))
    x[1:2, :, 3] = np.nan
    norms = rng.normal(size=(2, shape.head_dim))
    angles = rng.normal(size=(tokens, half)) * 10
    angles = tuple(jnp.asarray(f(angles), jnp.float32) for f in (np.cos, np.sin)) if half else None
    pool = rng.normal(size=(LAYERS, 2, PAGES, page_size, shape.kv_heads, shape.head_dim))
    slots = page_size + rng.permutation((PAGES - 1) * page_size)[:tokens]
    slots = np.resize(slots, tokens)
    if tokens > 6:
        slots[[0, 2, 3, 4]] = -1, page_size - 1, PAGES * page_size, 2**31 - 1
    x, pool = jnp.asarray(x.reshape(tokens, -1), dtype), jnp.asarray(pool, pool_dtype or dtype)
    norm = QKNorm(jnp.asarray(norms, dtype), eps=EPS, zero_centred=gated) if normed else None
    return x, norm, angles, pool, LAYER, jnp.asarray(slots, jnp.int32)


def oracle(x, norm, angles, pool, layer, slots, shape, gated):
    """Queries and pool in float64, from the projection as it is rounded; a token at a time."""
    # A rotation by no angle is none.
    angles = (np.ones((len(x), 1)), np.zeros((len(x), 1))) if angles is None else angles
    x, cos, sin, pool = (np.array(a, np.float64) for a in (x, *angles, pool))
    norms = None if norm is None else np.array(norm.weights, np.float64)
    half, page_size = cos.shape[1], pool.shape[3]
    queries = np.empty((len(x), shape.heads, shape.head_dim))
    for t, slot in enumerate(np.asarray(slots)):
        heads = x[t].reshape(-1, shape.head_dim)
        k, v = heads[-2 * shape.kv_heads :].reshape(2, shape.kv_heads, -1)
        q = heads[: (1 + gated) * shape.heads : 1 + gated]
        for row, y in enumerate((q, k)):
            if norms is not None:
                scale = 1 / np.sqrt((y**2).mean(axis=1, keepdims=True) + EPS)
                y *= (norms[row] + gated) * scale
            first, second = y[:, :half].copy(), y[:, half : 2 * half].copy()
            y[:, :half] = first * cos[t] - second * sin[t]
            y[:, half : 2 * half] = second * cos[t] + first * sin[t]
        queries[t] = q
        if page_size <= slot < PAGES * page_size:
            pool[layer, :, slot // page_size, slot % page_size] = k, v
    return queries, pool


def check(shape, gated, run, *args, **sizes):
    """`run` equals the oracle up to two roundings; what is not written keeps its bits."""
    given = operands(shape, gated, *args, **sizes)
    x, before = given[0], given[3]
    queries, after = run(*given, heads=shape.heads, gated=gated)
    expected_queries, expected_after = oracle(*given, shape, gated)
    assert queries.shape == expected_queries.shape and queries.dtype == x.dtype
    assert after.shape == before.shape and after.dtype == before.dtype
    eps = float(jnp.finfo(x.dtype).eps)
    for actual, expected in ((queries, expected_queries), (after, expected_after)):
        actual = np.asarray(actual, np.float64)
        np.testing.assert_allclose(actual, expected, rtol=8 * eps, atol=8 * eps)
    kept = expected_after == np.asarray(before, np.float64)
    np.testing.assert_array_equal(np.asarray(after)[kept], np.asarray(before)[kept])
    # A NaN fills the heads that are normed, or it goes to the channel that it is rotated with; in
    # a value it stays in its channel.
    half = 0 if given[2] is None else given[2][0].shape[1]
    spread = shape.head_dim if given[1] is not None else 1 + (half * 2 > 3)
    num_nan = np.isnan(np.asarray(queries, np.float32)).sum(axis=(1, 2))
    assert num_nan.tolist() == [(token == 1) * shape.heads * spread for token in range(len(x))]
    num_nan = np.isnan(np.asarray(after, np.float32)).sum()
    assert num_nan == (len(x) > 1) * shape.kv_heads * (spread + 1)


@pytest.mark.few(3)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("half", [1, 4])
def test_queries_and_keys_are_normalised_and_rotated_and_keys_and_values_stored(half, dtype, gated):
    check(SMALL, gated, attention_inputs, dtype, half)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("half", [0, 1, 4])
def test_without_a_norm_queries_and_keys_are_rotated_alone(half, dtype, gated):
    check(SMALL, gated, attention_inputs, dtype, half, normed=False)


def test_a_rotation_by_nothing_changes_nothing_and_by_a_right_angle_swaps():
    x = jnp.arange(1.0, 9.0).reshape(1, 1, 8)
    zero, one = jnp.zeros((1, 2)), jnp.ones((1, 2))
    np.testing.assert_array_equal(rotate(x, (one, zero)), x)
    np.testing.assert_array_equal(rotate(x, (zero, one))[0, 0], [-3, -4, 1, 2, 5, 6, 7, 8])


def test_a_pool_of_8_bits_gets_what_lies_in_its_range():
    given = operands(SMALL, True, jnp.float32, 2, pool_dtype=jnp.float8_e4m3fn)
    _, after = attention_inputs(*given, heads=SMALL.heads, gated=True)
    _, exact = oracle(*given, SMALL, True)
    after = np.asarray(after, np.float32)
    np.testing.assert_allclose(after, np.clip(exact, -448, 448), rtol=2**-4, atol=2**-9)


def test_a_scaled_pool_gets_keys_and_values_divided_by_their_scales():
    given = operands(SMALL, True, jnp.float32, 2, pool_dtype=jnp.float8_e4m3fn)
    scales = np.array([0.125, 3.0], np.float32)
    _, after = attention_inputs(*given, heads=SMALL.heads, gated=True, scales=jnp.asarray(scales))
    _, exact = oracle(*given, SMALL, True)
    before = np.asarray(given[3], np.float64)
    exact = np.where(exact == before, exact, exact / scales[None, :, None, None, None, None])
    after = np.asarray(after, np.float32)
    np.testing.assert_allclose(after, np.clip(exact, -448, 448), rtol=2**-4, atol=2**-9)


def test_columns_that_are_not_those_of_the_heads_are_refused():
    given = operands(SMALL, True, jnp.float32, 2)
    message = (
        "A projection has 4 query heads and 2 each of keys and values, of 8 channels: 64 columns, "
        "but this one has 96. Hand over all of it."
    )
    with pytest.raises(ValueError, match=message):
        attention_inputs(*given, heads=SMALL.heads, gated=False)


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("shape", "gated", "dtype", "half", "sizes"),
    [
        (AttentionShape(8, 2, 256), True, jnp.bfloat16, 32, {}),  # Qwen3.5-0.8B
        (AttentionShape(24, 4, 256), True, jnp.bfloat16, 32, {"tokens": 3}),  # several blocks
        (AttentionShape(16, 4, 128), False, jnp.bfloat16, 64, {"page_size": 16}),  # Qwen3
        (AttentionShape(4, 1, 64), False, jnp.float32, 16, {}),
        (AttentionShape(4, 2, 64), True, jnp.float32, 8, {"tokens": 1}),
        (AttentionShape(3, 3, 256), True, jnp.float32, 128, {}),
        (AttentionShape(8, 2, 64), False, jnp.bfloat16, 32, {"normed": False}),  # Llama 3.2
        (AttentionShape(4, 1, 128), True, jnp.float32, 16, {"normed": False, "tokens": 2}),
        (AttentionShape(8, 2, 128), False, jnp.bfloat16, 0, {"normed": False}),  # Nemotron
        (AttentionShape(4, 2, 64), True, jnp.float32, 0, {"tokens": 3}),
    ],
    ids=str,
)
def test_the_kernel_equals_the_oracle_without_races(shape, gated, dtype, half, sizes):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    def run(qkv, norm, angles, kv, layer, kv_slots, **heads):
        layer = jnp.asarray(layer, jnp.int32)
        interpret = plgpu.InterpretGPUParams(detect_races=True)
        return attention_inputs_kernel(
            qkv, norm, angles, kv, layer, kv_slots, **heads, interpret=interpret
        )

    check(shape, gated, run, dtype, half, **sizes)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 4, 256])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("gated", "normed"), [(True, True), (False, True), (False, False)])
@pytest.mark.parametrize("shape", [*ATTENTION.values(), AttentionShape(4, 1, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_the_oracle(shape, gated, normed, dtype, tokens):
    """As in the published models all of a head is rotated, or a quarter where it has a gate."""
    dispatch._chosen.pop("attention_inputs", None)
    half = shape.head_dim // (8 if gated else 2)
    sizes = {"tokens": tokens, "page_size": tokens, "normed": normed}
    check(shape, gated, attention_inputs, dtype, half, **sizes)
    assert dispatch.implementations()["attention_inputs"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 64])
def test_on_a_gpu_heads_that_are_not_rotated_have_a_kernel_too(tokens):
    dispatch._chosen.pop("attention_inputs", None)
    sizes = {"tokens": tokens, "page_size": tokens, "normed": False}
    check(ATTENTION["nemotron-3-nano"], False, attention_inputs, jnp.bfloat16, 0, **sizes)
    assert dispatch.implementations()["attention_inputs"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_a_long_prompt_is_taken_too():
    check(AttentionShape(4, 1, 64), True, attention_inputs, jnp.bfloat16, 8, 8192, page_size=4096)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("head_dim", "half", "pool_dtype", "normed", "why"),
    [
        (96, 48, jnp.float32, True, "heads of 96, not 64, 128 or 256"),
        (64, 24, jnp.float32, True, "48 rotated channels of 64"),
        (
            64,
            16,
            jnp.float16,
            True,
            "a projection in float32 and norms in float32 for a float16 pool",
        ),
        (64, 16, jnp.float16, False, "a projection in float32 for a float16 pool"),
    ],
)
def test_on_a_gpu_operands_that_no_kernel_takes_run_the_reference_and_say_so(
    head_dim, half, pool_dtype, normed, why
):
    dispatch._chosen.pop("attention_inputs", None)
    shape = AttentionShape(4, 2, head_dim)
    given = operands(shape, True, jnp.float32, half, pool_dtype=pool_dtype, normed=normed)
    actual = attention_inputs(*given, heads=shape.heads, gated=True)
    expected = reference(*given, heads=shape.heads, gated=True)
    for x, y in zip(actual, expected, strict=True):
        np.testing.assert_allclose(*(np.asarray(a, np.float32) for a in (x, y)), rtol=1e-3)
    assert dispatch.implementations()["attention_inputs"] == ("XLA: " + why,)
