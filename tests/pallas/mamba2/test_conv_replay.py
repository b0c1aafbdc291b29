"""mamba2_conv_replay against float64, its compiled kernel, and its ways to divide heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import heads_of, oracle
from mamba2_replays import REAL, WINDOW, check_conv, conv_case, conv_kernel, conv_replay
from recurrences import MAMBA2
from regions import decode_region
from replays import pools
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.conv_replay import mamba2_conv_replay
from jaxspec.pallas.mamba2.heads import Mamba2Params
from jaxspec.pallas.recurrent.replay import must_fold, next_ring_length
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes

TINY = Mamba2Shape(4, 2, head_dim=5, state_dim=8)


def test_steps_from_projections_equal_a_sequence_never_rolled_back():
    """Random acceptance over many folds, in float64; what nobody wrote is NaN."""
    rng, heads, width, kernel = np.random.default_rng(0), heads_of(TINY), 4, 4
    _, params, conv, states, ring = jax.tree.map(
        lambda y: y if y.ndim < 4 else jnp.full_like(y, jnp.nan),
        conv_case(TINY, jnp.float32, jnp.float32, width)[:5],
    )
    conv, states = (pool.at[1, 3].set(0.0) for pool in (conv, states))
    weight, bias, rates = (np.float64(y) for y in (params.conv, params.bias, params.rates))
    past, state = np.zeros((kernel - 1, heads.channels)), np.zeros(states.shape[3:])
    computed, length, folds = 5, 0, 0
    for _ in range(60):
        new = rng.normal(size=(1, width, heads.columns)).astype(np.float32)
        rows = decode_region([3], width, num_computed=computed, ring_length=length)
        out, conv, states, ring = conv_replay(jnp.asarray(new), params, conv, states, ring, 1, rows)

        inputs = np.concatenate([past, np.float64(new[0, :, : heads.channels])])
        y = sum(inputs[tap : tap + width] * weight[tap] for tap in range(kernel)) + bias
        y = y / (1 + np.exp(-y))
        x, b, c = np.split(y, [20, 36], axis=1)
        dt = np.log1p(np.exp(np.float64(new[0, :, heads.steps_column :]) + rates[:, 1]))
        b, c = (y.reshape(width, heads.groups, heads.state_dim) for y in (b, c))
        tokens = x.reshape(width, *heads[:2]), dt, -np.exp(rates[:, 0]), b, c, rates[:, 2]
        expected, after = oracle(state, *tokens)
        np.testing.assert_allclose(out[0], expected, rtol=1e-5, atol=2e-5)

        kept = int(rng.integers(1, width + 1))
        folds += bool(must_fold(length, width, WINDOW))
        length = int(next_ring_length(length, kept, width, WINDOW))
        past, state, computed = inputs[kept : kept + kernel - 1], after[kept - 1], computed + kept
    assert folds > 5


def test_states_may_have_more_rows_a_head_than_x():
    assert conv_case(TINY, jnp.float32, jnp.float32, 3, pad=3)[3].shape[4] == TINY.head_dim + 3
    check_conv(conv_replay, TINY, jnp.float32, jnp.float32, 3, pad=3)


@pytest.mark.mosaic
def test_the_kernel_needs_no_bias():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = functools.partial(conv_kernel, interpret=plgpu.InterpretGPUParams())
    check_conv(run, Mamba2Shape(2, 1, 64, 64), jnp.float32, jnp.float32, 2, bias=False)


COMPILED_CASES = [  # shape, dtype of states, width, rows
    *((MAMBA2.typical, jnp.float32, width, rows) for width in (1, 4, 8) for rows in (1, 64)),
    (MAMBA2.typical, jnp.float16, 4, 64),
    (MAMBA2.published["nemotron-h-8b"], jnp.float32, 4, 1),
    (MAMBA2.published["mamba2-2.7b"], jnp.float32, 1, 1),
    (MAMBA2.published["mamba2-2.7b"], jnp.float16, 1, 8),
    (Mamba2Shape(48, 1), jnp.float32, 4, 8),
    (Mamba2Shape(4, 2, 128, 64), jnp.float32, 8, 4),
]


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("shape", "dtype", "width", "rows"), COMPILED_CASES, ids=str)
def test_it_compiles_for_an_h200(h200, monkeypatch, capfd, shape, dtype, width, rows, x_dtype):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(projected, params, conv, states, ring, region):
        outs = []
        for layer in range(2):
            out, conv, states, ring = mamba2_conv_replay(
                projected, params, conv, states, ring, layer, region
            )
            outs.append(out)
        return outs, (conv, states, ring)

    held = (
        array(2, 33, 3 + width, shape.conv_dim, dtype=x_dtype),
        *jax.eval_shape(lambda: pools(MAMBA2, jnp.zeros, shape, dtype, width=width, slots=33)),
    )
    taps, bias = array(4, shape.conv_dim, dtype=x_dtype), array(shape.conv_dim, dtype=x_dtype)
    params = Mamba2Params(taps, bias, array(shape.heads, 3), heads_of(shape))
    projected = array(rows, width, shape.projected, dtype=x_dtype)
    region = DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)
    operands = projected, params, *held, region
    program = compile_for(h200, monkeypatch, step, operands, donated=(2, 3, 4))
    assert_lean(program, capfd.readouterr().out, held)


@pytest.mark.gpu
@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("shape", [MAMBA2.typical, MAMBA2.published["mamba2-2.7b"]], ids=str)
def test_on_a_gpu_one_head_a_block_and_two_equal_the_reference(shape, width, block_heads):
    run = functools.partial(conv_kernel, block_heads=block_heads)
    check_conv(run, shape, jnp.bfloat16, jnp.float32, width)


@pytest.mark.gpu
@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize("width", [1, 4])
def test_on_a_gpu_a_step_is_the_same_however_often(width, block_heads):
    """To the bit: the interpreter does not see races among the warps of a block."""
    operands = conv_case(MAMBA2.typical, jnp.bfloat16, jnp.float32, width)
    live = np.asarray(sorted(set(REAL) - {1}))

    def outcome():
        out, *after = conv_kernel(*operands, block_heads=block_heads)
        # NumPy does not know that a NaN of 16 bits is one.
        return [np.asarray(y, np.float32) for y in (out[live, :1], *jax.tree.leaves(after))]

    first = outcome()
    for _ in range(100):
        for mine, theirs in zip(outcome(), first, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.gpu
def test_on_a_gpu_heads_that_pools_pad_are_seen_to_run_the_two_ops():
    dispatch._chosen.clear()
    shape = Mamba2Shape(16, 2, head_dim=80)
    check_conv(conv_replay, shape, jnp.bfloat16, jnp.float32, 2, pad=48)
    assert dispatch.implementations()["mamba2_replay"] == ("kernel",)
    assert dispatch.implementations()["mamba2_inputs"] == ("kernel",)
