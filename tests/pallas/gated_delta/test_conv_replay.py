"""gdn_conv_replay: the two ops it is made of; kernel = reference."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import assert_rounding_does_not_add_up, int32
from gdn_replays import (
    LAYERS,
    SLOTS,
    assert_bits_are_the_same,
    compare,
    in_range,
    norm_of,
    pools,
    real_tokens,
)
from regions import decode_region

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay, gdn_conv_replay_reference
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams
from jaxspec.pallas.gated_delta.inputs import gdn_inputs_reference
from jaxspec.pallas.gated_delta.replay import GdnRing
from jaxspec.pallas.recurrent.conv_ring import past_rows
from jaxspec.pallas.recurrent.replay import next_ring_length, ring_rows

reference = jax.jit(gdn_conv_replay_reference, static_argnums=(6, 11))


def projection(rng, shape, dtype, width, index, kernel, spare):
    """x, weight, decay and the convolution's pool; NaN in all that no live row may read.

    Live row 2's keys are none; `spare`: rows of the pool that nobody needs.
    """
    rows, window = real_tokens(width), kernel - 1 + width + spare
    gates = shape.conv_dim + shape.value_heads * shape.value_dim
    a = gates + shape.value_heads
    x = rng.normal(size=(len(rows), width, shape.projected))
    x[..., shape.conv_dim : gates] = np.nan
    x[..., a : a + shape.value_heads] -= 3  # so that the ring's oldest tokens still count
    x[..., a + shape.value_heads :] = np.nan
    for row, count in enumerate(rows):
        x[row, count:] = np.nan
    keys = shape.key_heads * shape.key_dim
    x[2, :, keys : 2 * keys] = np.nan
    conv = np.full((LAYERS, SLOTS, window, shape.conv_dim), np.nan)
    for slot, place in zip(index[0], past_rows(index[1], kernel - 1, window), strict=True):
        if 0 < slot < SLOTS:
            conv[1, slot, place] = rng.normal(size=(kernel - 1, shape.conv_dim))
    weight = 0.5 * rng.normal(size=(shape.conv_dim, kernel))
    decay = jnp.asarray(rng.normal(size=(shape.value_heads, 2)) - 1, jnp.float32)
    x, weight, conv = (jnp.asarray(a, dtype) for a in (x, weight, conv))
    return x, weight, decay, conv


def check(run, shape, x_dtype, dtype, width, rows=None, normed=None, kernel=4, spare=0):
    """`run` is the reference in what it puts out and in every element of the pools."""
    rng = np.random.default_rng(width)
    states, ring, index = pools(rng, shape, dtype, width, rows)
    *tokens, conv = projection(rng, shape, x_dtype, width, index, kernel, spare)
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)
    bounded = in_range(index, width, ring)
    want, kept, *expected = reference(*tokens, conv, states, ring, 1, *bounded, heads)
    norm = normed and norm_of(shape, len(index[0]), width, normed)
    out, conv, *after = run(*tokens, conv, states, ring, 1, *index, heads, norm)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (conv, kept)))
    # The convolution may round to a neighbour, and what follows from it.
    eps = max(float(jnp.finfo(x).eps) for x in (x_dtype, dtype))
    loose = 2e-5 if eps < 1e-6 else 2 * eps
    compare((out, *after), (want, *expected), states, index, width, loose, norm)


def test_the_op_is_what_its_parts_are():
    shape, width, dtype = GdnShape(2, 4, 8, 8), 3, jnp.float32
    rng = np.random.default_rng(0)
    states, ring, index = pools(rng, shape, dtype, width)
    *tokens, conv = projection(rng, shape, dtype, width, index, kernel=4, spare=0)
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)
    operands = *tokens, conv, states, ring, 1, *index, heads
    got = jax.jit(gdn_conv_replay, static_argnums=(6, 11))(*operands)
    jax.tree.map(np.testing.assert_array_equal, got, reference(*operands))


def test_errors_are_those_of_its_parts():
    shape, width, dtype = GdnShape(2, 4, 8, 8), 3, jnp.float32
    rng = np.random.default_rng(0)
    states, ring, index = pools(rng, shape, dtype, width)
    x, *others, conv = projection(rng, shape, dtype, width, index, kernel=4, spare=0)
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)

    def run(x, conv, ring, norm=None):
        return gdn_conv_replay(x, *others, conv, states, ring, 1, *index, heads, norm)

    with pytest.raises(ValueError, match="num_drafts >= 2"):
        run(x, conv[:, :, 1:], ring)
    with pytest.raises(ValueError, match="columns of the output gate"):
        run(x[..., : shape.conv_dim], conv, ring)
    with pytest.raises(ValueError, match="ring_rows >= 6"):
        run(x, conv, jax.tree.map(lambda pool: pool[:, :, :5], ring))
    with pytest.raises(ValueError, match="gates of 24 tokens, but these are of 9"):
        run(x, conv, ring, norm_of(shape, 3, width, dtype))


@pytest.mark.parametrize(
    ("shape", "x_dtype", "dtype", "width", "rows", "splits", "normed", "kernel", "spare"),
    [
        (GdnShape(1, 2), jnp.bfloat16, jnp.float32, 4, 12, 1, jnp.bfloat16, 4, 0),
        (GdnShape(2, 4), jnp.float32, jnp.float32, 1, None, 4, None, 4, 3),
        (GdnShape(1, 2), jnp.float16, jnp.float16, 3, None, 2, None, 3, 1),
        (GdnShape(1, 2), jnp.bfloat16, jnp.float16, 1, None, 1, jnp.bfloat16, 4, 0),
        (GdnShape(2, 2, 64, 64), jnp.float32, jnp.bfloat16, 4, None, 1, jnp.float32, 4, 0),
        (GdnShape(1, 1, 128, 64), jnp.bfloat16, jnp.float32, 8, 28, 2, None, 2, 0),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, shape, x_dtype, dtype, width, rows, splits, normed, kernel, spare
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.gated_delta.replay_kernel import gdn_conv_replay_kernel

    def run(x, weight, *others):
        *operands, layer = others[:5]
        return gdn_conv_replay_kernel(
            x, weight.T, *operands, jnp.int32(layer), *others[5:], interpret=interpreter,
            splits=splits,
        )  # fmt: skip

    check(run, shape, x_dtype, dtype, width, rows, normed, kernel, spare)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 6), GdnShape(2, 4, 64, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    """With one block a head, then normed, too, and, of the smaller shapes, with several."""
    dispatch._chosen.clear()
    run = jax.jit(gdn_conv_replay, static_argnums=(6, 11))
    for normed in [None] if shape.value_heads < 9 else [None, jnp.bfloat16]:
        for x_dtype in (jnp.bfloat16, jnp.float32):
            check(run, shape, x_dtype, dtype, width, normed=normed)
    assert dispatch.implementations() == {"gdn_conv_replay": ("kernel",)}


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_on_a_gpu_a_step_is_the_same_however_often(dtype, width):
    """To the bit: the interpreter does not see races among the warps of a block."""
    shape, rng = GDN["qwen3.5-9b"], np.random.default_rng(width)
    states, ring, index = pools(rng, shape, dtype, width)
    *tokens, conv = projection(rng, shape, jnp.bfloat16, width, index, kernel=4, spare=0)
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)
    norm = norm_of(shape, len(index[0]), width, jnp.bfloat16)
    run = jax.jit(gdn_conv_replay, static_argnums=(6, 11))
    operands = *tokens, conv, states, ring, 1, *index, heads
    for normed in (None, norm):
        first, *others = (run(*operands, normed) for _ in range(100))
        assert_bits_are_the_same(first, others)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_on_a_gpu_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance, in one program; the tokens are the reference's."""
    width, kernel, shape, steps = 4, 4, GdnShape(1, 2), 1600
    rng, rows = np.random.default_rng(1), ring_rows(width, jnp.dtype(dtype).itemsize)
    heads = GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)
    x = rng.normal(size=(steps, 1, width, shape.projected)).astype(np.float32)
    first_a = shape.conv_dim + shape.value_heads * (shape.value_dim + 1)
    x[..., first_a : first_a + shape.value_heads] -= 3  # so that states last
    weight = jnp.asarray(0.5 * rng.normal(size=(shape.conv_dim, kernel)), jnp.float32)
    decay = jnp.asarray(rng.normal(size=(shape.value_heads, 2)) - 1, jnp.float32)
    kept = rng.integers(1, width + 1, size=steps)

    def step(carry, now):
        pools, expected, computed, length = carry
        x, stand = now
        given, slot, count = (x, weight, decay), int32(1), int32(width)
        params = GdnParams(weight.T, decay, heads)
        rows_now = decode_region(slot, count, num_computed=computed[None])
        tokens, expected = gdn_inputs_reference(x, params, expected, 0, rows_now)
        index = slot, computed[None], length[None], count
        out, *pools = gdn_conv_replay(*given, *pools, 0, *index, heads)
        length = next_ring_length(length, stand, width, rows).astype(jnp.int32)
        return (tuple(pools), expected, computed + stand, length), (out[0], tokens)

    lead, sizes = (1, 2), (shape.value_heads, shape.value_dim)
    ring = GdnRing(
        jnp.zeros((*lead, rows, shape.key_heads, shape.key_dim), dtype),
        jnp.zeros((*lead, rows, *sizes), dtype),
        jnp.zeros((*lead, rows, shape.value_heads)),
    )
    conv = jnp.zeros((*lead, kernel - 1 + width, shape.conv_dim))
    states = jnp.zeros((*lead, 1, *sizes, shape.key_dim), dtype)
    start = (conv, states, ring), conv, jnp.int32(0), jnp.int32(0)
    dispatch._chosen.clear()
    outs, tokens = jax.jit(lambda *xs: jax.lax.scan(step, start, xs)[1])(x, int32(*kept))
    assert dispatch.implementations() == {"gdn_conv_replay": ("kernel",)}
    tokens = [np.asarray(each) for each in tokens]
    assert_rounding_does_not_add_up(outs, tokens, kept, error)
