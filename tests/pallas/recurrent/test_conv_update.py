"""conv_update and conv_prefill against a convolution over the whole history, and the kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from convolution import REAL, ROWS, operands
from regions import decode_region, prefill_region

from benchmarks.measure.shapes import GDN
from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.conv_ring import past_rows
from jaxspec.pallas.recurrent.conv_update import conv_prefill, conv_update, conv_update_reference
from jaxspec.pallas.recurrent.conv_update_kernel import conv_update_kernel

LAYERS, SLOTS, KERNEL, CHANNELS, DRAFTS = 2, 5, 4, 6, 3
WINDOW = KERNEL + DRAFTS
GARBAGE = [10**6, -5, 2**31 - 1, -(2**31)]

update = jax.jit(conv_update, static_argnums=3, static_argnames="activation")
reference = jax.jit(conv_update_reference, static_argnums=3, static_argnames="activation")
prefill = jax.jit(conv_prefill, static_argnums=3, static_argnames="activation")


def oracle(inputs, weight, bias=0.0, activation="silu"):
    """The causal convolution of a whole history, its bias and activation, in float64."""
    padded = np.concatenate([np.zeros((KERNEL - 1, CHANNELS)), inputs])
    y = sum(padded[tap : tap + len(inputs)] * weight[tap] for tap in range(KERNEL)) + bias
    return y / (1 + np.exp(-y)) if activation == "silu" else y


def normal(rng, *shape):
    return rng.normal(size=shape).astype(np.float32)


def test_a_convolution_rolled_back_equals_one_never_advanced():
    rng = np.random.default_rng(0)
    weight, history = normal(rng, KERNEL, CHANNELS), np.zeros((0, CHANNELS), np.float32)
    conv = jnp.full((LAYERS, SLOTS, WINDOW, CHANNELS), jnp.nan)  # left behind by other requests
    before = past_rows(jnp.zeros(1, jnp.int32), KERNEL - 1, WINDOW)[0]
    conv = conv.at[1, 3, before].set(0.0)
    for _ in range(30):
        query_len = int(rng.integers(1, DRAFTS + 2))
        x = normal(rng, 1, DRAFTS + 1, CHANNELS)
        rows = decode_region([3], query_len, num_computed=len(history))
        y, conv = update(x, jnp.asarray(weight), conv, 1, rows)
        everything = np.concatenate([history, x[0, :query_len]])
        expected = oracle(everything, weight)[len(history) :]
        np.testing.assert_allclose(y[0, :query_len], expected, atol=1e-5)
        accepted = int(rng.integers(0, query_len))
        history = everything[: len(history) + 1 + accepted]


def test_prefill_in_chunks_equals_one_convolution():
    rng = np.random.default_rng(1)
    weight, inputs = normal(rng, KERNEL, CHANNELS), normal(rng, 2, 24, CHANNELS)
    conv = jnp.full((LAYERS, SLOTS, WINDOW, CHANNELS), jnp.nan)  # left behind by other requests
    outputs, done = ([], []), [0, 0]
    for step in range(9):
        lengths = [int(rng.integers(0, 6)) for _ in done]
        lengths = [min(n, 24 - d) for n, d in zip(lengths, done, strict=True)]
        parts = [inputs[s, d : d + n] for s, (d, n) in enumerate(zip(done, lengths, strict=True))]
        flat = np.full((12, CHANNELS), np.nan, np.float32)
        flat[: sum(lengths)] = np.concatenate(parts)
        start = np.concatenate([[0], np.cumsum(lengths)])
        chunks = prefill_region([4, 2], start, num_computed=done)
        y, conv = prefill(flat, jnp.asarray(weight), conv, 1, chunks)
        for seq, part in enumerate(np.split(np.asarray(y), start[1:])[:2]):
            outputs[seq].append(part)
        np.testing.assert_array_equal(y[sum(lengths) :], 0)
        done = [d + n for d, n in zip(done, lengths, strict=True)]
        if step == 4:  # a decode step in between, one draft of one accepted
            x = np.stack([inputs[s, d : d + 2] for s, d in enumerate(done)])
            rows = decode_region([4, 2], 2, num_computed=done)
            y, conv = update(x, jnp.asarray(weight), conv, 1, rows)
            for seq in range(2):
                outputs[seq].append(np.asarray(y)[seq])
            done = [d + 2 for d in done]
    for seq in range(2):
        expected = oracle(inputs[seq, : done[seq]], weight)
        np.testing.assert_allclose(np.concatenate(outputs[seq]), expected, atol=1e-5)


@pytest.mark.parametrize("activation", ["silu", None])
def test_a_bias_comes_before_the_activation(activation):
    """In a chunk of a prompt, and then in a step."""
    rng = np.random.default_rng(5)
    weight, bias = normal(rng, KERNEL, CHANNELS), normal(rng, CHANNELS)
    inputs, rest = normal(rng, 9, CHANNELS), {"bias": bias, "activation": activation}
    conv = jnp.full((LAYERS, SLOTS, WINDOW, CHANNELS), jnp.nan)
    chunks = prefill_region([3], [0, 5])
    first, conv = prefill(inputs[:5], weight, conv, 1, chunks, **rest)
    rows = decode_region([3], 4, num_computed=5)
    second, _ = update(inputs[None, 5:], weight, conv, 1, rows, **rest)
    expected = oracle(inputs, weight, bias, activation)
    np.testing.assert_allclose(np.concatenate([first, second[0]]), expected, atol=1e-5)


def test_padding_is_inert():
    rng = np.random.default_rng(2)
    conv, weight = normal(rng, LAYERS, SLOTS, WINDOW, CHANNELS), normal(rng, KERNEL, CHANNELS)
    slots, garbage = [0, 0, 3, -2, 10**6], [*GARBAGE, 7]
    x = jnp.full((5, DRAFTS + 1, CHANNELS), jnp.nan)
    rows = decode_region(slots, [4, 0, 0, 4, 4], num_computed=garbage)
    _, after = update(x, weight, jnp.asarray(conv), 1, rows)
    np.testing.assert_array_equal(after, conv)
    chunks = prefill_region(slots, [0, 4, 4, 4, 8, 12], num_computed=garbage)
    flat = jnp.full((16, CHANNELS), jnp.nan)
    _, after = prefill(flat, weight, jnp.asarray(conv), 1, chunks)
    np.testing.assert_array_equal(after, conv)


def test_a_padding_token_is_never_stored():
    rng = np.random.default_rng(3)
    conv, weight = normal(rng, LAYERS, SLOTS, WINDOW, CHANNELS), normal(rng, KERNEL, CHANNELS)
    x = normal(rng, 1, DRAFTS + 1, CHANNELS)
    x[0, 2:] = np.nan
    y, after = update(x, weight, jnp.asarray(conv), 1, decode_region([3], 2, num_computed=1))
    assert np.isfinite(after).all() and np.isfinite(y[0, :2]).all()


def test_a_window_too_short_for_the_drafts_is_refused():
    with pytest.raises(ValueError, match="num_drafts >= 5"):
        conv_update(
            jnp.zeros((1, 6, CHANNELS)),
            jnp.zeros((KERNEL, CHANNELS)),
            jnp.zeros((LAYERS, SLOTS, WINDOW, CHANNELS)),
            0,
            decode_region([1], 1, num_computed=1),
        )


def check(x, weight, conv, run, **rest):
    """`run` is the reference: in the tokens that are real, and bit for bit in the pool."""
    y, after = (np.asarray(a, np.float32) for a in run(x, weight, conv, 1, ROWS, **rest))
    expected, expected_after = reference(x, weight, conv, 1, ROWS, **rest)
    expected = np.asarray(expected, np.float32)
    np.testing.assert_array_equal(after, np.asarray(expected_after, np.float32))
    untouched = [slot for slot in range(7) if slot not in {2, 4, 6, 1}]
    before = np.asarray(conv, np.float32)
    np.testing.assert_array_equal(after[1, untouched], before[1, untouched])
    np.testing.assert_array_equal(after[0], before[0])
    tolerance = max(2 * float(jnp.finfo(x.dtype).eps), 5e-6)
    for row, count in REAL.items():
        if row == 1:  # all its inputs are NaN
            assert np.isnan(y[row, :count]).all()
            continue
        ours, theirs = y[row, :count], expected[row, :count]
        np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=5e-6)


@pytest.mark.parametrize(
    ("dtype", "channels", "width", "kernel", "spare"),
    [
        (jnp.bfloat16, 512, 4, 4, 0),
        (jnp.bfloat16, 256, 1, 4, 3),
        (jnp.bfloat16, 256, 9, 4, 0),
        (jnp.bfloat16, 768, 5, 3, 0),
        (jnp.float16, 256, 6, 4, 1),
        (jnp.float32, 512, 2, 4, 0),
        (jnp.float32, 256, 3, 4, 2),
        (jnp.float32, 256, 7, 2, 0),
        (jnp.float32, 256, 8, 4, 0),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, dtype, channels, width, kernel, spare
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(x, weight, conv, layer, rows):
        return conv_update_kernel(x, weight, conv, jnp.int32(layer), rows, interpret=interpreter)

    check(*operands(channels, dtype, width, kernel, spare), run)
    assert not get_races().races_found


@pytest.mark.parametrize(("dtype", "activation"), [(jnp.bfloat16, "silu"), (jnp.float32, None)])
def test_the_kernel_adds_a_bias_without_races(interpreter, dtype, activation):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(x, weight, conv, layer, rows, **rest):
        on_device = jnp.int32(layer)
        return conv_update_kernel(x, weight, conv, on_device, rows, **rest, interpret=interpreter)

    bias = jnp.asarray(np.random.default_rng(9).normal(size=512), dtype)
    check(*operands(512, dtype, 3), run, bias=bias, activation=activation)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 10))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("shape", GDN.values(), ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    dispatch._chosen.pop("conv_update", None)
    check(*operands(shape.conv_dim, dtype, width), update)
    assert dispatch.implementations()["conv_update"] == ("kernel",)


@pytest.mark.gpu
def test_on_a_gpu_channels_no_kernel_takes_are_seen_to_run_the_reference():
    dispatch._chosen.pop("conv_update", None)
    check(*operands(100, jnp.float32, 2), conv_update)
    assert dispatch.implementations()["conv_update"] == ("XLA: 100 channels",)
