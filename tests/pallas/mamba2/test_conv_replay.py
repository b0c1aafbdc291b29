"""mamba2_conv_replay: the two ops it is made of; kernel = reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2 import heads_of, oracle, projection
from regions import decode_region
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import MAMBA2, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.conv_replay import mamba2_conv_replay, mamba2_conv_replay_reference
from jaxspec.pallas.mamba2.heads import Mamba2Params
from jaxspec.pallas.mamba2.inputs import mamba2_inputs_reference
from jaxspec.pallas.mamba2.replay import mamba2_replay_reference
from jaxspec.pallas.mamba2.ring import Mamba2Ring
from jaxspec.pallas.recurrent.conv_ring import past_rows
from jaxspec.pallas.recurrent.replay import default_window, must_fold, next_ring_length
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes

LAYERS, SLOTS, WINDOW = 2, 7, 12
TINY = Mamba2Shape(4, 2, head_dim=5, state_dim=8)

# Three tokens on a ring that goes round its end, two tokens; padding by slot, by length, by a slot
# that is not there, by a negative one; one token on a full ring, which folds; a length out of range
# on an empty one; on a ring of one token.
ROWS = decode_region(
    slots=[2, 4, 0, 3, 9, -1, 6, 1, 5],
    query_len=[3, 2, 3, 0, 3, 3, 1, 99, 1],
    num_computed=[2**20 + 3, 40, -(2**31), 1, 2, 2**31 - 1, 31, 5, 18],
    ring_length=[WINDOW - 3, 3, 10**6, 1, -5, 2**31 - 1, WINDOW, 0, 1],
)
REAL = {0: 3, 1: 2, 6: 1, 7: 99, 8: 1}  # tokens of the rows that are not padding

compiled = functools.partial(jax.jit, static_argnums=5)
reference = compiled(mamba2_conv_replay_reference)


def case(shape, x_dtype, dtype, width, kernel=4, spare=0, pad=0):
    """All operands; NaN in padding, in row 0's neighbour 1, and in all that no live row may read.

    `spare`: rows of the convolution's ring that nobody needs. `pad`: rows of a state that no head
    of the tokens has.
    """
    rng, heads = np.random.default_rng(width), heads_of(shape)
    x = rng.normal(size=(len(ROWS.slots), width, heads.channels))
    for row in range(len(x)):
        x[row, REAL.get(row, 0) :] = np.nan
    x[1] = np.nan
    weight = jnp.asarray(0.5 * rng.normal(size=(kernel, heads.channels)), x_dtype)
    projected, params = projection(rng, heads, jnp.asarray(x, x_dtype), weight)

    conv_rows, ring_rows = kernel - 1 + width + spare, WINDOW + width
    conv = np.full((LAYERS, SLOTS, conv_rows, heads.channels), np.nan)
    counted = np.zeros((SLOTS, ring_rows), bool)
    places = past_rows(ROWS.num_computed, kernel - 1, conv_rows)
    for row in REAL:
        slot, end, length = (int(y[row]) for y in (ROWS.slots, ROWS.num_computed, ROWS.ring_length))
        conv[1, slot, places[row]] = rng.normal(size=(kernel - 1, heads.channels))
        counted[slot, [p % ring_rows for p in range(end - length, end)]] = True

    def pool(dtype, *dims, padded=None):
        values = 0.3 * rng.normal(size=(LAYERS, SLOTS, *dims))
        if dims[0] == ring_rows:
            values[:, ~counted] = np.nan
        if padded is not None:
            values = np.pad(
                values, [(0, pad if axis == padded else 0) for axis in range(values.ndim)]
            )
        return jnp.asarray(values, dtype)

    states = pool(dtype, 1, *heads[:2], heads.state_dim, padded=4)
    ring = Mamba2Ring(
        x=pool(dtype, ring_rows, *heads[:2], padded=4),
        b=pool(dtype, ring_rows, heads.groups, heads.state_dim),
        dt=abs(pool(jnp.float32, ring_rows, heads.heads)),
        window=WINDOW,
    )
    return projected, params, jnp.asarray(conv, x_dtype), states, ring


def check(run, *operands):
    """`run` is the reference in what it puts out and in every element of the pools."""
    states = operands[3]
    out, conv, after, ring = run(*operands, 1, ROWS)
    # On a GPU XLA would drop the casts to 16 bits and back that the specification has.
    host = jax.devices("cpu")[0]
    with jax.default_device(host):
        want, kept, folded, appended = reference(
            *jax.device_put(operands, host), 1, jax.device_put(ROWS, host)
        )
    np.testing.assert_array_equal(*(np.asarray(y, np.float32) for y in (conv, kept)))
    eps = max(float(jnp.finfo(y.dtype).eps) for y in (operands[0], states))
    # The convolution may round to a neighbour, and what follows from it.
    loose = 2e-5 if eps < 1e-6 else 4 * eps
    pairs = zip(jax.tree.leaves((after, ring)), jax.tree.leaves((folded, appended)), strict=True)
    for mine, theirs in pairs:
        mine, theirs = (np.asarray(y, np.float32) for y in (mine, theirs))
        np.testing.assert_allclose(mine, theirs, rtol=loose, atol=loose)
    for row, count in REAL.items():
        got, wanted = np.asarray(out)[row, :count], np.asarray(want)[row, :count]
        assert np.isnan(wanted).all() == (row == 1)
        np.testing.assert_allclose(got, wanted, rtol=loose, atol=loose)


def test_the_op_is_what_its_parts_are():
    operands = case(TINY, jnp.float32, jnp.float32, 3)
    got = compiled(mamba2_conv_replay)(*operands, 1, ROWS)
    projected, params, conv, states, ring = operands
    tokens, conv = mamba2_inputs_reference(projected, params, conv, 1, ROWS)
    out, states, ring = mamba2_replay_reference(tokens, states, ring, 1, ROWS)
    for mine, theirs in zip(
        jax.tree.leaves(got), jax.tree.leaves((out, conv, states, ring)), strict=True
    ):
        np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)


def test_steps_from_projections_equal_a_sequence_never_rolled_back():
    """Random acceptance over many folds, in float64; what nobody wrote is NaN."""
    rng, heads, width, kernel = np.random.default_rng(0), heads_of(TINY), 4, 4
    _, params, conv, states, ring = jax.tree.map(
        lambda y: y if y.ndim < 4 else jnp.full_like(y, jnp.nan),
        case(TINY, jnp.float32, jnp.float32, width),
    )
    conv, states = (pool.at[1, 3].set(0.0) for pool in (conv, states))
    weight, bias, rates = (np.float64(y) for y in (params.conv, params.bias, params.rates))
    past, state = np.zeros((kernel - 1, heads.channels)), np.zeros(states.shape[3:])
    computed, length, folds, step = 5, 0, 0, compiled(mamba2_conv_replay)
    for _ in range(60):
        new = rng.normal(size=(1, width, heads.columns)).astype(np.float32)
        rows = decode_region([3], width, num_computed=computed, ring_length=length)
        out, conv, states, ring = step(jnp.asarray(new), params, conv, states, ring, 1, rows)

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
    operands = case(TINY, jnp.float32, jnp.float32, 3, pad=3)
    assert operands[3].shape[4] == TINY.head_dim + 3
    check(compiled(mamba2_conv_replay), *operands)


def test_errors_are_those_of_its_parts():
    projected, params, conv, states, ring = case(TINY, jnp.float32, jnp.float32, 3)

    def run(projected, conv, ring):
        return mamba2_conv_replay(projected, params, conv, states, ring, 1, ROWS)

    with pytest.raises(ValueError, match="num_drafts >= 2"):
        run(projected, conv[:, :, 1:], ring)
    with pytest.raises(ValueError, match="Pass the whole projection"):
        run(projected[..., :52], conv, ring)
    with pytest.raises(ValueError, match="Build it with at least 15"):
        run(projected, conv, jax.tree.map(lambda pool: pool[:, :, :14], ring))


def by_kernel(**options):
    from jaxspec.pallas.mamba2.replay_kernel import mamba2_conv_replay_kernel

    def run(*operands):
        *operands, layer, rows = operands
        return mamba2_conv_replay_kernel(*operands, jnp.int32(layer), rows, **options)

    return run


@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize(
    ("shape", "x_dtype", "dtype", "width", "kernel", "spare"),
    [
        (Mamba2Shape(4, 2), jnp.bfloat16, jnp.float32, 4, 4, 0),
        (Mamba2Shape(4, 1), jnp.float32, jnp.float32, 1, 4, 3),
        (Mamba2Shape(2, 1, 64, 64), jnp.bfloat16, jnp.float16, 3, 3, 1),
        (Mamba2Shape(2, 1, 128, 64), jnp.float16, jnp.bfloat16, 8, 2, 0),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, shape, x_dtype, dtype, width, kernel, spare, block_heads
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    run = by_kernel(interpret=interpreter, block_heads=block_heads)
    check(run, *case(shape, x_dtype, dtype, width, kernel=kernel, spare=spare))
    assert not get_races().races_found


@pytest.mark.mosaic
def test_the_kernel_needs_no_bias():
    from jax.experimental.pallas import mosaic_gpu as plgpu

    projected, params, *pools = case(Mamba2Shape(2, 1, 64, 64), jnp.float32, jnp.float32, 2)
    run = by_kernel(interpret=plgpu.InterpretGPUParams())
    check(run, projected, params.replace(bias=None), *pools)


COMPILED_CASES = [  # shape, dtype of states, width, rows
    *(
        (MAMBA2["nemotron-3-nano"], jnp.float32, width, rows)
        for width in (1, 4, 8)
        for rows in (1, 64)
    ),
    (MAMBA2["nemotron-3-nano"], jnp.float16, 4, 64),
    (MAMBA2["nemotron-h-8b"], jnp.float32, 4, 1),
    (MAMBA2["mamba2-2.7b"], jnp.float32, 1, 1),
    (MAMBA2["mamba2-2.7b"], jnp.float16, 1, 8),
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

    window, slots = default_window(jnp.dtype(dtype).itemsize), 33
    in_ring, channels = (2, slots, window + width), shape.conv_dim
    ring = Mamba2Ring(
        x=array(*in_ring, shape.heads, shape.head_dim, dtype=dtype),
        b=array(*in_ring, shape.groups, shape.state_dim, dtype=dtype),
        dt=array(*in_ring, shape.heads),
        window=window,
    )
    pools = (
        array(2, slots, 3 + width, channels, dtype=x_dtype),
        array(2, slots, 1, shape.heads, shape.head_dim, shape.state_dim, dtype=dtype),
        ring,
    )
    taps, bias = array(4, channels, dtype=x_dtype), array(channels, dtype=x_dtype)
    params = Mamba2Params(taps, bias, array(shape.heads, 3), heads_of(shape))
    projected = array(rows, width, shape.projected, dtype=x_dtype)
    region = DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)
    operands = projected, params, *pools, region
    program = compile_for(h200, monkeypatch, step, operands, donated=(2, 3, 4))
    assert_lean(program, capfd.readouterr().out, pools)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("shape", [*MAMBA2.values(), Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    dispatch._chosen.clear()
    for x_dtype in (jnp.bfloat16, jnp.float32):
        check(compiled(mamba2_conv_replay), *case(shape, x_dtype, dtype, width))
    assert dispatch.implementations() == {"mamba2_conv_replay": ("kernel",)}


@pytest.mark.gpu
@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("shape", [MAMBA2["nemotron-3-nano"], MAMBA2["mamba2-2.7b"]], ids=str)
def test_on_a_gpu_one_head_a_block_and_two_equal_the_reference(shape, width, block_heads):
    operands = case(shape, jnp.bfloat16, jnp.float32, width)
    check(by_kernel(block_heads=block_heads), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize("width", [1, 4])
def test_on_a_gpu_a_step_is_the_same_however_often(width, block_heads):
    """To the bit: the interpreter does not see races among the warps of a block."""
    operands = case(MAMBA2["nemotron-3-nano"], jnp.bfloat16, jnp.float32, width)
    run = by_kernel(block_heads=block_heads)
    live = np.asarray(sorted(set(REAL) - {1}))

    def outcome():
        out, *pools = run(*operands, 1, ROWS)
        # NumPy does not know that a NaN of 16 bits is one.
        return [np.asarray(y, np.float32) for y in (out[live, :1], *jax.tree.leaves(pools))]

    first = outcome()
    for _ in range(100):
        for mine, theirs in zip(outcome(), first, strict=True):
            np.testing.assert_array_equal(mine, theirs)


@pytest.mark.gpu
def test_on_a_gpu_heads_that_pools_pad_are_seen_to_run_the_two_ops():
    dispatch._chosen.clear()
    shape = Mamba2Shape(16, 2, head_dim=80)
    check(compiled(mamba2_conv_replay), *case(shape, jnp.bfloat16, jnp.float32, 2, pad=48))
    assert dispatch.implementations()["mamba2_replay"] == ("kernel",)
    assert dispatch.implementations()["mamba2_inputs"] == ("kernel",)
