"""conv_update and conv_prefill against a convolution over the whole history."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxspec.pallas.conv_update import conv_prefill, conv_update

LAYERS, SLOTS, KERNEL, CHANNELS, DRAFTS = 2, 5, 4, 6, 3
WINDOW = KERNEL - 1 + DRAFTS
GARBAGE = [10**6, -5, 2**31 - 1, -(2**31)]

update = jax.jit(conv_update, static_argnums=3)
prefill = jax.jit(conv_prefill, static_argnums=3)


def oracle(inputs, weight):
    """SiLU of the causal convolution of a whole history, in float64."""
    padded = np.concatenate([np.zeros((KERNEL - 1, CHANNELS)), inputs])
    y = sum(padded[tap : tap + len(inputs)] * weight[:, tap] for tap in range(KERNEL))
    return y / (1 + np.exp(-y))


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def int32(*values):
    return jnp.asarray(values, jnp.int32)


def test_a_convolution_rolled_back_equals_one_never_advanced():
    rng = np.random.default_rng(0)
    weight, history = normal(rng, CHANNELS, KERNEL), np.zeros((0, CHANNELS), np.float32)
    conv, offset = jnp.zeros((LAYERS, SLOTS, WINDOW, CHANNELS)), 0
    for _ in range(30):
        query_len = int(rng.integers(1, DRAFTS + 2))
        x = normal(rng, 1, DRAFTS + 1, CHANNELS)
        y, conv = update(x, jnp.asarray(weight), conv, 1, int32(3), int32(offset), int32(query_len))
        everything = np.concatenate([history, x[0, :query_len]])
        expected = oracle(everything, weight)[len(history) :]
        np.testing.assert_allclose(y[0, :query_len], expected, atol=1e-5)
        offset = int(rng.integers(0, query_len))  # drafts accepted
        history = everything[: len(history) + 1 + offset]


def test_prefill_in_chunks_equals_one_convolution():
    rng = np.random.default_rng(1)
    weight, inputs = normal(rng, CHANNELS, KERNEL), normal(rng, 2, 24, CHANNELS)
    conv = jnp.full((LAYERS, SLOTS, WINDOW, CHANNELS), jnp.nan)  # what others left behind
    outputs, done, offset = ([], []), [0, 0], [0, 0]
    for step in range(9):
        lengths = [int(rng.integers(0, 6)) for _ in done]
        lengths = [min(n, 24 - d) for n, d in zip(lengths, done, strict=True)]
        parts = [inputs[s, d : d + n] for s, (d, n) in enumerate(zip(done, lengths, strict=True))]
        flat = np.full((12, CHANNELS), np.nan, np.float32)
        flat[: sum(lengths)] = np.concatenate(parts)
        start = np.concatenate([[0], np.cumsum(lengths)])
        y, conv = prefill(
            flat,
            jnp.asarray(weight),
            conv,
            1,
            int32(4, 2),
            int32(*offset),
            int32(*done),
            int32(*start),
        )
        for seq, part in enumerate(np.split(np.asarray(y), start[1:])[:2]):
            outputs[seq].append(part)
        np.testing.assert_array_equal(y[sum(lengths) :], 0)
        done = [d + n for d, n in zip(done, lengths, strict=True)]
        if step == 4:  # a decode step in between, one draft of one accepted
            x = np.stack([inputs[s, d : d + 2] for s, d in enumerate(done)])
            y, conv = update(x, jnp.asarray(weight), conv, 1, int32(4, 2), int32(0, 0), int32(2, 2))
            for seq in range(2):
                outputs[seq].append(np.asarray(y)[seq])
            done, offset = [d + 2 for d in done], [1, 1]
        else:
            offset = [0 if n else o for n, o in zip(lengths, offset, strict=True)]
    for seq in range(2):
        expected = oracle(inputs[seq, : done[seq]], weight)
        np.testing.assert_allclose(np.concatenate(outputs[seq]), expected, atol=1e-5)


def test_padding_is_inert():
    rng = np.random.default_rng(2)
    conv, weight = normal(rng, LAYERS, SLOTS, WINDOW, CHANNELS), normal(rng, CHANNELS, KERNEL)
    slots, garbage = int32(0, 0, 3, -2, 10**6), int32(*GARBAGE, 7)
    length = int32(4, 0, 0, 4, 4)
    x = jnp.full((5, DRAFTS + 1, CHANNELS), jnp.nan)
    _, after = update(x, weight, jnp.asarray(conv), 1, slots, garbage, length)
    np.testing.assert_array_equal(after, conv)
    start = int32(0, 4, 4, 4, 8, 12)
    flat = jnp.full((16, CHANNELS), jnp.nan)
    _, after = prefill(flat, weight, jnp.asarray(conv), 1, slots, garbage, garbage, start)
    np.testing.assert_array_equal(after, conv)


def test_a_padding_token_is_never_stored():
    rng = np.random.default_rng(3)
    conv, weight = normal(rng, LAYERS, SLOTS, WINDOW, CHANNELS), normal(rng, CHANNELS, KERNEL)
    x = normal(rng, 1, DRAFTS + 1, CHANNELS)
    x[0, 2:] = np.nan
    y, after = update(x, weight, jnp.asarray(conv), 1, int32(3), int32(1), int32(2))
    assert np.isfinite(after).all() and np.isfinite(y[0, :2]).all()


def test_a_window_too_short_for_the_drafts_is_refused():
    with pytest.raises(ValueError, match="num_drafts >= 5"):
        conv_update(
            jnp.zeros((1, 6, CHANNELS)),
            jnp.zeros((CHANNELS, KERNEL)),
            jnp.zeros((LAYERS, SLOTS, WINDOW, CHANNELS)),
            0,
            *[int32(1)] * 3,
        )
