"""The kernel of gdn_replay against its reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import assert_rounding_does_not_add_up, int32, operands
from gdn_replays import assert_bits_are_the_same, compare, in_range, norm_of, pools, real_tokens

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.replay import GdnRing, gdn_replay, gdn_replay_reference
from jaxspec.pallas.recurrent.replay import next_ring_length, ring_rows

reference = jax.jit(gdn_replay_reference, static_argnums=7)


def check(run, shape, dtype, width, rows=None, seed=0, normed=None):
    """`run` is the reference in what it puts out and in every element of the pools.

    NaN is in padding, in all that no row may read, and in live row 2's keys. `normed`: what it puts
    out is normed, in this dtype.
    """
    rng, real = np.random.default_rng(seed), real_tokens(width)
    states, ring, index = pools(rng, shape, dtype, width, rows)
    tokens = operands(rng, len(real), width, shape=shape)
    tokens[3] *= 0.1  # so that the ring's oldest tokens still count
    for x in tokens:
        for row, count in enumerate(real):
            x[row, count:] = np.nan
    tokens[1][2] = np.nan
    want = reference(*tokens, states, ring, 1, *in_range(index, width, ring))
    norm = normed and norm_of(shape, len(real), width, normed)
    got = run(*tokens, states, ring, 1, *index, norm)
    # An update may round the other way, and then so do those that follow.
    loose = 1e-5 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)
    compare(got, want, states, index, width, loose, norm)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize(
    ("shape", "dtype", "width", "rows", "splits", "normed"),
    [
        (GdnShape(1, 2), jnp.float32, 1, None, 1, None),
        (GdnShape(1, 2), jnp.float32, 3, 12, 4, None),
        (GdnShape(1, 2), jnp.float32, 4, None, 2, None),
        (GdnShape(1, 2), jnp.float32, 4, 12, 1, jnp.bfloat16),
        (GdnShape(1, 2), jnp.float16, 4, None, 1, None),
        (GdnShape(1, 2), jnp.float16, 1, None, 1, jnp.float32),
        (GdnShape(1, 2), jnp.bfloat16, 1, 9, 2, None),
        (GdnShape(1, 2), jnp.bfloat16, 8, 28, 1, jnp.bfloat16),  # a fold of two chunks
        (GdnShape(1, 1, 64, 64), jnp.float32, 2, 12, 1, jnp.float16),
        (GdnShape(1, 1, 64, 64), jnp.float16, 4, None, 1, None),
        (GdnShape(1, 1, 64, 128), jnp.float32, 5, 53, 1, jnp.float32),  # windows of 48 and 64
        (GdnShape(1, 1, 128, 64), jnp.float16, 3, 67, 1, jnp.float16),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(shape, dtype, width, rows, splits, normed):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.gated_delta.replay_kernel import gdn_replay_kernel

    interpret = plgpu.InterpretGPUParams(detect_races=True)

    def run(*args):
        return gdn_replay_kernel(
            *args[:7], jnp.int32(args[7]), *args[8:], interpret=interpret, splits=splits
        )

    check(run, shape, dtype, width, rows, normed=normed)
    assert not get_races().races_found


def check_lengths(run, shape, dtype, width, lengths):
    """A row for each of these lengths of the ring; the pools are NaN where no token counts."""
    rng, count = np.random.default_rng(width), len(lengths)
    rows = ring_rows(width, jnp.dtype(dtype).itemsize)
    tokens = operands(rng, count, width, shape=shape)
    computed = np.asarray([rows + 3 * length for length in lengths])
    place = (computed[:, None] - 1 - np.arange(rows)) % rows
    counts = np.zeros((count, rows), bool)
    np.put_along_axis(counts, place, np.arange(rows) < np.asarray(lengths)[:, None], axis=1)

    def filled(*dims, scale):
        one = (scale * rng.normal(size=(count, rows, *dims))).astype(np.float32)
        one[~counts] = np.nan
        return np.concatenate((np.full_like(one[:1], np.nan), one))[None]

    state = (1, 1 + count, 1, shape.value_heads, shape.value_dim, shape.key_dim)
    states = jnp.asarray(0.3 * rng.normal(size=state), dtype)
    ring = GdnRing(
        k=jnp.asarray(filled(shape.key_heads, shape.key_dim, scale=0.1), dtype),
        u=jnp.asarray(filled(shape.value_heads, shape.value_dim, scale=0.5), dtype),
        g=jnp.asarray(-0.1 * np.abs(filled(shape.value_heads, scale=1.0))),
    )
    slots = int32(*range(1, 1 + count))
    index = slots, int32(*computed), int32(*lengths), int32(*[width] * count)
    want = reference(*tokens, states, ring, 0, *index)[0]
    out = run(*tokens, states, ring, 0, *index)[0]
    loose = 1e-5 if dtype == jnp.float32 else 4 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out, want, rtol=0, atol=loose)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="Mosaic's interpreter needs jax 0.11")
@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_ring_of_any_length_is_read_as_far_as_it_counts(width):
    """The interpreter's shared memory is NaN where nothing was written."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    from jaxspec.pallas.gated_delta.replay_kernel import gdn_replay_kernel

    def run(*args):
        interpret = plgpu.InterpretGPUParams()
        return gdn_replay_kernel(*args[:7], jnp.int32(args[7]), *args[8:], interpret=interpret)

    check_lengths(run, GdnShape(1, 1), jnp.float16, width, [5, 6, 7])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("width", [1, 2, 3, 4, 5])
def test_on_a_gpu_a_ring_of_any_length_is_read_as_far_as_it_counts(dtype, width):
    window = ring_rows(width, jnp.dtype(dtype).itemsize) - width
    run = jax.jit(gdn_replay, static_argnums=7)
    check_lengths(run, GDN["qwen3.5-9b"], dtype, width, list(range(window + 1)))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("shape", "dtype", "width", "rows"),
    [
        (GDN["qwen3.5-9b"], jnp.float32, 4, None),
        (GDN["qwen3.5-9b"], jnp.float16, 4, None),
        (GDN["qwen3.5-27b"], jnp.bfloat16, 8, None),
        (GdnShape(2, 6), jnp.float32, 1, None),
        (GdnShape(2, 6), jnp.float16, 3, 12),
        (GdnShape(2, 4, 64, 64), jnp.float32, 4, None),
        (GdnShape(2, 4, 64, 64), jnp.float16, 4, None),
        (GDN["qwen3.5-9b"], jnp.float32, 8, None),  # factors twice where keys were
        (GdnShape(2, 4, 64, 128), jnp.float32, 4, None),
    ],
    ids=str,
)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width, rows):
    """With one block a head, then normed, too, and, of the smaller shape, with several."""
    dispatch._chosen.pop("gdn_replay", None)
    for normed in [None] if shape.value_heads < 9 else [None, jnp.bfloat16, jnp.float32]:
        run = jax.jit(gdn_replay, static_argnums=7)
        check(run, shape, dtype, width, rows, seed=width, normed=normed)
    assert dispatch.implementations()["gdn_replay"] == ("kernel",)


@pytest.mark.gpu
@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_on_a_gpu_a_step_is_the_same_however_often(dtype, width):
    """To the bit: the interpreter does not see races among the warps of a block."""
    shape, rng = GDN["qwen3.5-9b"], np.random.default_rng(width)
    *kept, index = pools(rng, shape, dtype, width)
    all_operands = *operands(rng, len(index[0]), width, shape=shape), *kept, 1, *index
    run = jax.jit(gdn_replay, static_argnums=7)
    first, *others = (run(*all_operands) for _ in range(100))
    assert_bits_are_the_same(first, others)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_on_a_gpu_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance, in one program; against float64 in every quarter."""
    width, shape, steps = 4, GdnShape(1, 2), 1600
    rng, rows = np.random.default_rng(1), ring_rows(width, jnp.dtype(dtype).itemsize)
    tokens = operands(rng, steps, 1, width, shape=shape)
    tokens[3] *= 0.05
    kept = rng.integers(1, width + 1, size=steps)

    def step(carry, x):
        states, ring, computed, length = carry
        *tokens, kept = x
        index = int32(1), computed[None], length[None], int32(width)
        out, states, ring = gdn_replay(*tokens, states, ring, 0, *index)
        length = next_ring_length(length, kept, width, rows).astype(jnp.int32)
        return (states, ring, computed + kept, length), out[0]

    heads = shape.value_heads
    start = (
        jnp.zeros((1, 2, 1, heads, 128, 128), dtype),
        GdnRing(
            jnp.zeros((1, 2, rows, 1, 128), dtype),
            jnp.zeros((1, 2, rows, heads, 128), dtype),
            jnp.zeros((1, 2, rows, heads)),
        ),
        jnp.int32(0),
        jnp.int32(0),
    )
    outs = jax.jit(lambda *xs: jax.lax.scan(step, start, xs)[1])(*tokens, int32(*kept))
    assert_rounding_does_not_add_up(outs, tokens, kept, error)
