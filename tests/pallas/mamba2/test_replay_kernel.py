"""The kernel of mamba2_replay against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from mamba2_replays import REAL, ROWS, WINDOW, counted_pools
from recurrences import MAMBA2, at, spoil
from regions import decode_region
from replays import assert_rounding_does_not_add_up, nan, pools, walk
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.mamba2.heads import Mamba2Tokens
from jaxspec.pallas.recurrent.replay import must_fold, next_ring_length
from jaxspec.regions import DecodeRegion

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes

WIDTH = 4


def kernel_case(shape, dtype, x_dtype, width, seed=0):
    """NaN in padding tokens, padding rows, row 0's neighbour 1, and all that no ring counts."""
    rng = np.random.default_rng(seed)
    new = MAMBA2.draw(rng, len(ROWS.slots), width, shape=shape)
    for index in range(len(ROWS.slots)):
        spoil(new, np.s_[index, REAL.get(index, 0) :])
    spoil(new, 1)
    return MAMBA2.in_dtype(new, x_dtype), *counted_pools(rng, shape, dtype, width)


def check(new, states, ring, run):
    """`run` is the reference: in outputs, in checkpoints, and bit for bit in the ring."""
    width, tolerance = new.x.shape[1], 8 * float(jnp.finfo(states.dtype).eps)
    want, folded, appended = MAMBA2.replay.reference(new, states, ring, 1, ROWS)
    out, after, ring_after = run(new, states, ring, 1, ROWS)
    rings = (jax.tree.map(lambda y: np.asarray(y, np.float32), y) for y in (ring_after, appended))
    jax.tree.map(np.testing.assert_array_equal, *rings)
    before, after, folded = (np.asarray(y, np.float32) for y in (states, after, folded))
    np.testing.assert_allclose(after, folded, rtol=tolerance, atol=2e-6)
    kept = np.ones(before.shape[:2], bool)
    folds = must_fold(ROWS.ring_length, width, WINDOW)
    kept[1, [ROWS.slots[index] for index in REAL if folds[index]]] = False
    np.testing.assert_array_equal(after[kept], before[kept])
    assert not kept[1, 6] and not np.array_equal(after[1, 6], before[1, 6])
    out = np.asarray(out)
    for index, count in REAL.items():
        count = min(count, width)
        if index == 1:  # all its inputs are NaN
            assert np.isnan(out[index, :count]).all()
            continue
        np.testing.assert_allclose(out[index, :count], want[index, :count], rtol=1e-6, atol=1e-5)
    padding = [index for index in range(len(out)) if index not in REAL]
    assert not np.any(out[padding])  # no uninitialised memory comes out


def by_kernel(**options):
    def run(tokens, states, ring, layer, rows):
        return MAMBA2.replay.kernel(tokens, states, ring, jnp.int32(layer), rows, **options)

    return run


@pytest.mark.mosaic
@pytest.mark.parametrize("block_heads", [1, 2, None])
@pytest.mark.parametrize(
    ("dtype", "x_dtype", "head_dim", "state_dim", "width"),
    [
        (jnp.float32, jnp.float32, 64, 128, 3),
        (jnp.float32, jnp.bfloat16, 64, 64, 8),
        (jnp.bfloat16, jnp.bfloat16, 64, 128, 4),
        (jnp.float16, jnp.float32, 128, 64, 1),
    ],
)
def test_the_kernel_equals_its_reference_without_races(
    dtype, x_dtype, head_dim, state_dim, width, block_heads
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = Mamba2Shape(4, 2, head_dim, state_dim)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    run = by_kernel(interpret=interpret, block_heads=block_heads)
    check(*kernel_case(shape, dtype, x_dtype, width), run)
    assert not get_races().races_found


@pytest.mark.mosaic
def test_the_kernel_takes_steps_of_several_widths_on_one_ring():
    """A ring that narrow steps have filled is read by a wide one as far as its window goes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = Mamba2Shape(2, 1, 64, 64)
    run, rng = by_kernel(interpret=plgpu.InterpretGPUParams()), np.random.default_rng(0)
    widths = [1] * 8 + [4] + [1] * 5 + [4]
    empty = pools(MAMBA2, nan, shape, width=4, window=8)
    _, _, folds = walk(MAMBA2, run, rng, empty, widths, lambda real: real, shape=shape, slowed=0.1)
    assert folds >= 3


COMPILED_CASES = [  # shape, dtypes of states and of tokens, width
    (MAMBA2.typical, dtype, x_dtype, width)
    for dtype, x_dtype in (
        (jnp.float32, jnp.float32),
        (jnp.float32, jnp.bfloat16),
        (jnp.bfloat16, jnp.bfloat16),
        (jnp.float16, jnp.bfloat16),
    )
    for width in (1, 4, 8)
] + [
    *((MAMBA2.published["nemotron-h-8b"], jnp.float32, jnp.bfloat16, width) for width in (1, 4, 8)),
    (Mamba2Shape(4, 2, 128, 64), jnp.float32, jnp.bfloat16, 8),
    (Mamba2Shape(4, 2, 128, 64), jnp.float16, jnp.float32, 1),
]


@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize(("shape", "dtype", "x_dtype", "width"), COMPILED_CASES, ids=str)
def test_it_compiles_for_an_h200(
    h200, monkeypatch, capfd, shape, dtype, x_dtype, width, block_heads
):
    def step(tokens, states, ring, rows):
        for layer in range(2):
            out, states, ring = MAMBA2.replay.kernel(
                tokens, states, ring, jnp.int32(layer), rows, block_heads=block_heads
            )
            tokens = tokens._replace(x=out.astype(x_dtype))
        return out, states, ring

    x = array(4, width, shape.heads, shape.head_dim, dtype=x_dtype)
    b = array(4, width, shape.groups, shape.state_dim, dtype=x_dtype)
    a = array(shape.heads)
    tokens = Mamba2Tokens(x, array(4, width, shape.heads), a, b, b, a)
    held = jax.eval_shape(lambda: pools(MAMBA2, jnp.zeros, shape, dtype, width=width, slots=33))
    operands = tokens, *held, DecodeRegion(*[array(4, dtype=jnp.int32)] * 5)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=(1, 2))
    assert_lean(compiled, capfd.readouterr().out, held)


@pytest.mark.mosaic
def test_two_heads_share_a_block_where_they_can_and_it_pays():
    from jaxspec.pallas.mamba2.replay_kernel import _block_heads

    assert _block_heads(heads=133, group=8, window=17, state_bytes=2**15) == 2
    assert _block_heads(heads=132, group=8, window=17, state_bytes=2**15) == 1
    assert _block_heads(heads=133, group=7, window=17, state_bytes=2**15) == 1
    assert _block_heads(heads=133, group=8, window=16, state_bytes=2**15) == 1
    assert _block_heads(heads=133, group=8, window=17, state_bytes=2**16) == 1


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("x_dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*MAMBA2.published.values(), Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, x_dtype, width):
    dispatch._chosen.pop("mamba2_replay", None)
    check(*kernel_case(shape, dtype, x_dtype, width, seed=width), MAMBA2.replay.run)
    assert dispatch.implementations()["mamba2_replay"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("block_heads", [1, 2])
@pytest.mark.parametrize("width", [1, 4, 8])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("shape", [MAMBA2.typical, Mamba2Shape(4, 2, 128, 64)], ids=str)
def test_on_a_gpu_one_head_a_block_and_two_equal_the_reference(shape, dtype, width, block_heads):
    case = kernel_case(shape, dtype, jnp.bfloat16, width, seed=width)
    check(*case, by_kernel(block_heads=block_heads))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, error", [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_on_a_gpu_many_steps_equal_float64(dtype, error):
    """Random acceptance and folds for 4,000 tokens, two rows, of which one is checked."""
    rng, shape = np.random.default_rng(4), Mamba2Shape(4, 2)
    states, ring = pools(MAMBA2, np.zeros, shape, dtype, width=WIDTH)
    like, computed, length, outs, steps, kept = MAMBA2.draw(rng, 1, shape=shape), 0, 0, [], [], []
    while computed < 4000:
        new = MAMBA2.draw(rng, 2, WIDTH, shape=shape, like=like)
        rows = decode_region(
            [3, 1], [WIDTH, 2], num_computed=[computed, 7], ring_length=[length, 5]
        )
        out, states, ring = MAMBA2.replay.run(new, states, ring, 1, rows)
        outs.append(out[0])
        steps.append(at(new, 0))
        kept.append(int(rng.integers(1, WIDTH + 1)))
        computed += kept[-1]
        length = int(next_ring_length(length, kept[-1], WIDTH, ring.window))
    assert_rounding_does_not_add_up(MAMBA2, shape, outs, steps, kept, error)
