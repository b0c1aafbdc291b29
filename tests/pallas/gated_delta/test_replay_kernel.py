"""The kernel of gdn_replay against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import int32
from gdn_replays import (
    COMPILED_CASES,
    abstract_pools,
    abstract_region,
    assert_bits_are_the_same,
    assert_one_row_table,
    check,
    interpreted,
    pools_and_rows,
    window_of,
)
from recurrences import GDN
from regions import decode_region
from replays import assert_rounding_does_not_add_up, nan, pools, walk
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.heads import GdnRing, GdnTokens
from jaxspec.pallas.gated_delta.replay import gdn_replay
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import next_ring_length

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes

op, reference = GDN.replay.run, GDN.replay.reference


@pytest.mark.mosaic
@pytest.mark.parametrize(
    ("shape", "dtype", "width", "window", "splits", "normed"),
    [
        (GdnShape(1, 2), jnp.float32, 1, None, 1, None),
        (GdnShape(1, 2), jnp.float32, 3, 9, 4, None),
        (GdnShape(1, 2), jnp.float32, 4, None, 2, None),
        (GdnShape(1, 2), jnp.float32, 4, 8, 1, jnp.bfloat16),
        (GdnShape(1, 2), jnp.float16, 4, None, 1, None),
        (GdnShape(1, 2), jnp.float16, 1, None, 1, jnp.float32),
        (GdnShape(1, 2), jnp.bfloat16, 1, 8, 2, None),
        (GdnShape(1, 2), jnp.bfloat16, 8, 20, 1, jnp.bfloat16),  # a fold of two chunks
        (GdnShape(1, 1, 64, 64), jnp.float32, 2, 10, 1, jnp.float16),
        (GdnShape(1, 1, 64, 64), jnp.float16, 4, None, 1, None),
        (GdnShape(1, 1, 64, 128), jnp.float32, 5, 48, 1, jnp.float32),
        (GdnShape(1, 1, 128, 64), jnp.float16, 3, 64, 1, jnp.float16),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(shape, dtype, width, window, splits, normed):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = interpreted(plgpu.InterpretGPUParams(detect_races=True), splits)
    check(run, shape, dtype, width, window, normed=normed)
    assert not get_races().races_found


@pytest.mark.mosaic
def test_steps_of_several_widths_share_a_ring():
    """A ring that narrow steps have filled is read by a wide one as far as its window goes."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = GdnShape(1, 1, 64, 64)
    empty = pools(GDN, nan, shape, width=4, window=8)
    widths = [1] * 8 + [4] + [1] * 5 + [4]
    run, rng = interpreted(plgpu.InterpretGPUParams()), np.random.default_rng(0)
    _, _, folds = walk(GDN, run, rng, empty, widths, lambda real: real, shape=shape, slowed=0.05)
    assert folds >= 3


def check_lengths(run, shape, dtype, width, lengths):
    """A row for each of these lengths of the ring; the pools are NaN where no token counts."""
    rng, count, window = np.random.default_rng(width), len(lengths), window_of(dtype)
    num_rows = window + width
    tokens = GDN.draw(rng, count, width, shape=shape)
    computed = np.asarray([num_rows + 3 * length for length in lengths])
    ring_row = (computed[:, None] - 1 - np.arange(num_rows)) % num_rows
    counts = np.zeros((count, num_rows), bool)
    is_in = np.arange(num_rows) < np.asarray(lengths)[:, None]
    np.put_along_axis(counts, ring_row, is_in, axis=1)

    def filled(*dims, scale):
        one = (scale * rng.normal(size=(count, num_rows, *dims))).astype(np.float32)
        one[~counts] = np.nan
        return np.concatenate((np.full_like(one[:1], np.nan), one))[None]

    state = (1, 1 + count, 1, shape.value_heads, shape.value_dim, shape.key_dim)
    states = jnp.asarray(0.3 * rng.normal(size=state), dtype)
    ring = GdnRing(
        k=jnp.asarray(filled(shape.key_heads, shape.key_dim, scale=0.1), dtype),
        u=jnp.asarray(filled(shape.value_heads, shape.value_dim, scale=0.5), dtype),
        g=jnp.asarray(-0.1 * np.abs(filled(shape.value_heads, scale=1.0))),
        window=window,
    )
    slots = range(1, 1 + count)
    rows = decode_region(slots, width, num_computed=computed, ring_length=lengths)
    want = reference(tokens, states, ring, 0, rows)[0]
    out = run(tokens, states, ring, 0, rows)[0]
    loose = 1e-5 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, want, rtol=0, atol=loose)


@pytest.mark.mosaic
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_ring_of_any_length_is_read_as_far_as_it_counts(width):
    """The interpreter's shared memory is NaN where nothing was written."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    run = interpreted(plgpu.InterpretGPUParams())
    check_lengths(run, GdnShape(1, 1), jnp.float16, width, [5, 6, 7])


@pytest.mark.parametrize(("shape", "dtype", "width", "rows"), COMPILED_CASES, ids=str)
def test_it_compiles_for_an_h200(h200, monkeypatch, capfd, shape, dtype, width, rows):
    """In one layer with its output norm, where a head is one block's."""

    def step(tokens, states, ring, gates, weight, region):
        norm = GatedNorm(gates, weight, first=shape.conv_dim, eps=1e-6)
        for layer, norm_of_layer in enumerate((None, norm)):
            on_device = jnp.int32(layer)
            out, states, ring = GDN.replay.kernel(
                tokens, states, ring, on_device, region, norm_of_layer
            )
            tokens = tokens._replace(v=out)
        return out, states, ring

    key = array(rows, width, shape.key_heads, shape.key_dim)
    value = array(rows, width, shape.value_heads, shape.value_dim)
    gate = array(rows, width, shape.value_heads)
    tokens = GdnTokens(key, key, value, gate, gate)
    held = abstract_pools(shape, dtype, width)
    columns = shape.conv_dim + shape.value_heads * shape.value_dim
    norm = array(rows * width, columns, dtype=jnp.bfloat16), array(shape.value_dim)
    operands = (tokens, *held, *norm, abstract_region(rows))
    compiled = compile_for(h200, monkeypatch, step, operands, donated=(1, 2))
    assert_lean(compiled, capfd.readouterr().out, held)
    assert_one_row_table(compiled, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_on_a_gpu_a_ring_of_any_length_is_read_as_far_as_it_counts(dtype, width):
    lengths = list(range(window_of(dtype) + 1))
    check_lengths(op, GDN.typical, dtype, width, lengths)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "width", "window"),
    [
        (GDN.typical, jnp.float32, 4, None),
        (GDN.typical, jnp.float16, 4, None),
        (GDN.published["qwen3.5-27b"], jnp.bfloat16, 8, None),
        (GdnShape(2, 6), jnp.float32, 1, None),
        (GdnShape(2, 6), jnp.float16, 3, 9),
        (GdnShape(2, 4, 64, 64), jnp.float32, 4, None),
        (GdnShape(2, 4, 64, 64), jnp.float16, 4, None),
        (GDN.typical, jnp.float32, 8, None),  # factors twice where keys were
        (GdnShape(2, 4, 64, 128), jnp.float32, 4, None),
    ],
    ids=str,
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width, window):
    """With one block a head, then normed, too, and, of the smaller shape, with several."""
    dispatch._chosen.pop("gdn_replay", None)
    for normed in [None] if shape.value_heads < 9 else [None, jnp.bfloat16, jnp.float32]:
        check(op, shape, dtype, width, window, seed=width, normed=normed)
    assert dispatch.implementations()["gdn_replay"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_on_a_gpu_a_step_is_the_same_however_often(dtype, width):
    """To the bit: the interpreter does not see races among the warps of a block."""
    shape, rng = GDN.typical, np.random.default_rng(width)
    states, ring, rows = pools_and_rows(rng, shape, dtype, width)
    tokens = GDN.draw(rng, len(rows.slots), width, shape=shape)
    first, *others = (op(tokens, states, ring, 1, rows) for _ in range(100))
    assert_bits_are_the_same(first, others)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_on_a_gpu_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance, in one program; against float64 in every quarter."""
    width, shape, steps = 4, GdnShape(1, 2), 1600
    rng = np.random.default_rng(1)
    tokens = GDN.slowed(GDN.draw(rng, steps, 1, width, shape=shape), 0.05)
    kept = rng.integers(1, width + 1, size=steps)

    def step(carry, x):
        states, ring, computed, length = carry
        *tokens, kept = x
        row = decode_region([1], width, num_computed=computed[None], ring_length=length[None])
        out, states, ring = gdn_replay(GdnTokens(*tokens), states, ring, 0, row)
        length = next_ring_length(length, kept, width, ring.window).astype(jnp.int32)
        return (states, ring, computed + kept, length), out[0]

    start = (*pools(GDN, np.zeros, shape, dtype, width=width), jnp.int32(0), jnp.int32(0))
    outs = jax.jit(lambda *xs: jax.lax.scan(step, start, xs)[1])(*tokens, int32(*kept))
    tokens = [GdnTokens(*(x[0] for x in step)) for step in zip(*tokens, strict=True)]
    assert_rounding_does_not_add_up(GDN, shape, np.asarray(outs), tokens, kept, error)
