"""mamba2_inputs against NumPy in float64, for rectangles and for prompts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import ROWS
from recurrences import MAMBA2

from benchmarks.measure.shapes import Mamba2Shape
from jaxspec.pallas.mamba2.heads import Mamba2Heads, Mamba2Params
from jaxspec.pallas.mamba2.inputs import mamba2_inputs, mamba2_inputs_reference, split_tokens

TINY = Mamba2Shape(4, 2, head_dim=5, state_dim=8)


def test_the_reference_is_the_published_formula():
    """A whole history from zeros, in float64: silu(conv + bias), softplus(dt + bias), no clamp."""
    rng, heads, taps, tokens = np.random.default_rng(0), Mamba2Heads(4, 5, 2, 8), 4, 6
    x = rng.normal(size=(1, tokens, heads.columns + 3))
    x[..., heads.steps_column] = -30  # a step far below any published limit
    weight, bias = rng.normal(size=(taps, heads.channels)), rng.normal(size=heads.channels)
    rates = rng.normal(size=(heads.heads, 3))
    params = Mamba2Params(*(jnp.asarray(y, jnp.float32) for y in (weight, bias, rates)), heads)
    conv = jnp.zeros((1, 2, taps - 1 + tokens, heads.channels))
    rows = jax.tree.map(lambda y: y[:1], ROWS).replace(
        slots=jnp.int32([1]), num_computed=jnp.int32([0]), query_len=jnp.int32([tokens])
    )
    got, _ = mamba2_inputs_reference(jnp.asarray(x, jnp.float32), params, conv, 0, rows)

    padded = np.concatenate([np.zeros((taps - 1, heads.channels)), x[0, :, : heads.channels]])
    y = sum(padded[tap : tap + tokens] * weight[tap] for tap in range(taps)) + bias
    y = y / (1 + np.exp(-y))
    steps = x[0, :, heads.steps_column :][:, : heads.heads]
    for name, columns, shape in (("x", y[:, :20], (4, 5)), ("b", y[:, 20:36], (2, 8))):
        np.testing.assert_allclose(getattr(got, name)[0], columns.reshape(-1, *shape), atol=1e-5)
    np.testing.assert_allclose(got.c[0], y[:, 36:].reshape(-1, 2, 8), atol=1e-5)
    np.testing.assert_allclose(got.dt[0], np.log1p(np.exp(steps + rates[:, 1])), rtol=1e-5)
    assert 0 < got.dt[0, 0, 0] < 1e-11
    np.testing.assert_allclose(got.a, -np.exp(rates[:, 0]), rtol=1e-6)
    np.testing.assert_allclose(got.d, rates[:, 2], rtol=1e-6)


def test_prompts_have_the_tokens_of_a_rectangle():
    """`split_tokens` takes flat tokens as well."""
    projected, params, _ = MAMBA2.project(TINY, jnp.float32, 3)
    heads = params.heads
    y, steps = projected[..., : heads.channels], projected[..., heads.steps_column : heads.columns]
    flat = split_tokens(y.reshape(-1, y.shape[2]), steps.reshape(-1, heads.heads), params)
    for name, part in split_tokens(y, steps, params)._asdict().items():
        np.testing.assert_array_equal(getattr(flat, name), part.reshape(getattr(flat, name).shape))


def test_taps_of_other_channels_are_refused():
    projected, params, conv = MAMBA2.project(TINY, jnp.float32, 3)
    wrong = params.replace(conv=params.conv[:, :-1])
    with pytest.raises(ValueError, match="has 52 channels, but the taps are for 51"):
        mamba2_inputs(projected, wrong, conv, 1, ROWS)
