"""gdn_conv_replay: the two ops it is made of; kernel = reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import assert_rounding_does_not_add_up, int32
from gdn_replays import (
    COMPILED_CASES,
    LAYERS,
    SLOTS,
    abstract_pools,
    abstract_region,
    assert_bits_are_the_same,
    assert_one_row_table,
    compare,
    empty_pools,
    norm_of,
    pools,
    real_tokens,
)
from regions import decode_region
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GDN, GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay, gdn_conv_replay_reference
from jaxspec.pallas.gated_delta.heads import GdnHeads, GdnParams
from jaxspec.pallas.gated_delta.inputs import gdn_inputs_reference
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.conv_ring import past_rows
from jaxspec.pallas.recurrent.replay import next_ring_length

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes


def compiled(op):
    """`op` as one program: the heads and the layer are static."""

    @functools.partial(jax.jit, static_argnames=("heads", "layer"))
    def run(projected, conv_weight, decay, heads, conv, states, ring, layer, rows, *norm):
        params = GdnParams(conv_weight, decay, heads)
        return op(projected, params, conv, states, ring, layer, rows, *norm)

    return lambda projected, params, *others: run(projected, *params, *others)


reference = compiled(gdn_conv_replay_reference)


def heads_of(shape):
    return GdnHeads(shape.key_heads, shape.key_dim, shape.value_heads)


def projection(rng, shape, dtype, width, region, kernel, spare):
    """Projection, parameters and the convolution's pool; NaN in all that no live row may read.

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
    places = past_rows(region.num_computed, kernel - 1, window)
    conv = np.full((LAYERS, SLOTS, window, shape.conv_dim), np.nan)
    for slot, place in zip(region.slots, places, strict=True):
        if 0 < slot < SLOTS:
            conv[1, slot, place] = rng.normal(size=(kernel - 1, shape.conv_dim))
    weight = 0.5 * rng.normal(size=(kernel, shape.conv_dim))
    decay = jnp.asarray(rng.normal(size=(shape.value_heads, 2)) - 1, jnp.float32)
    x, weight, conv = (jnp.asarray(a, dtype) for a in (x, weight, conv))
    return x, GdnParams(weight, decay, heads_of(shape)), conv


def check(run, shape, x_dtype, dtype, width, window=None, normed=None, kernel=4, spare=0):
    """`run` is the reference in what it puts out and in every element of the pools."""
    rng = np.random.default_rng(width)
    states, ring, rows = pools(rng, shape, dtype, width, window)
    x, params, conv = projection(rng, shape, x_dtype, width, rows, kernel, spare)
    want, kept, *expected = reference(x, params, conv, states, ring, 1, rows)
    norm = normed and norm_of(shape, len(rows.slots), width, normed)
    out, conv, *after = run(x, params, conv, states, ring, 1, rows, norm)
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (conv, kept)))
    # The convolution may round to a neighbour, and what follows from it.
    eps = max(float(jnp.finfo(x).eps) for x in (x_dtype, dtype))
    loose = 2e-5 if eps < 1e-6 else 2 * eps
    compare((out, *after), (want, *expected), states, rows, width, loose, norm)


def test_the_op_is_what_its_parts_are():
    shape, width, dtype = GdnShape(2, 4, 8, 8), 3, jnp.float32
    rng = np.random.default_rng(0)
    states, ring, rows = pools(rng, shape, dtype, width)
    x, params, conv = projection(rng, shape, dtype, width, rows, kernel=4, spare=0)
    got = compiled(gdn_conv_replay)(x, params, conv, states, ring, 1, rows)
    want = reference(x, params, conv, states, ring, 1, rows)
    jax.tree.map(np.testing.assert_array_equal, got, want)


def test_errors_are_those_of_its_parts():
    shape, width, dtype = GdnShape(2, 4, 8, 8), 3, jnp.float32
    rng = np.random.default_rng(0)
    states, ring, rows = pools(rng, shape, dtype, width, window=8)
    x, params, conv = projection(rng, shape, dtype, width, rows, kernel=4, spare=0)

    def run(x, conv, ring, norm=None):
        return gdn_conv_replay(x, params, conv, states, ring, 1, rows, norm)

    with pytest.raises(ValueError, match="num_drafts >= 2"):
        run(x, conv[:, :, 1:], ring)
    with pytest.raises(ValueError, match="columns of the output gate"):
        run(x[..., : shape.conv_dim], conv, ring)
    with pytest.raises(ValueError, match="Build it with at least 11"):
        run(x, conv, jax.tree.map(lambda pool: pool[:, :, :10], ring))
    with pytest.raises(ValueError, match="gates of 24 tokens, but these are of 9"):
        run(x, conv, ring, norm_of(shape, 3, width, dtype))


@pytest.mark.parametrize(
    ("shape", "x_dtype", "dtype", "width", "window", "splits", "normed", "kernel", "spare"),
    [
        (GdnShape(1, 2), jnp.bfloat16, jnp.float32, 4, 8, 1, jnp.bfloat16, 4, 0),
        (GdnShape(2, 4), jnp.float32, jnp.float32, 1, None, 4, None, 4, 3),
        (GdnShape(1, 2), jnp.float16, jnp.float16, 3, None, 2, None, 3, 1),
        (GdnShape(1, 2), jnp.bfloat16, jnp.float16, 1, None, 1, jnp.bfloat16, 4, 0),
        (GdnShape(2, 2, 64, 64), jnp.float32, jnp.bfloat16, 4, None, 1, jnp.float32, 4, 0),
        (GdnShape(1, 1, 128, 64), jnp.bfloat16, jnp.float32, 8, 20, 2, None, 2, 0),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(
    interpreter, shape, x_dtype, dtype, width, window, splits, normed, kernel, spare
):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    from jaxspec.pallas.gated_delta.replay_kernel import Projection, gdn_conv_replay_kernel

    def run(x, params, conv, states, ring, layer, rows, norm):
        tokens, on_device = Projection(x, params.conv, params.decay), jnp.int32(layer)
        return gdn_conv_replay_kernel(
            tokens, conv, states, ring, on_device, rows, norm, interpret=interpreter, splits=splits
        )

    check(run, shape, x_dtype, dtype, width, window, normed, kernel, spare)
    assert not get_races().races_found


@pytest.mark.parametrize("x_dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize(("shape", "dtype", "width", "rows"), COMPILED_CASES, ids=str)
def test_it_compiles_for_an_h200(h200, monkeypatch, capfd, shape, dtype, width, rows, x_dtype):
    """As in a model: with its output norm, where a head is one block's."""
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(projected, conv_weight, decay, conv, states, ring, norm_weight, region):
        x = projected.reshape(rows, width, -1)
        params = GdnParams(conv_weight, decay, heads_of(shape))
        norm = GatedNorm(projected, norm_weight, first=shape.conv_dim, eps=1e-6)
        outs = []
        for layer in range(2):
            out, conv, states, ring = gdn_conv_replay(
                x, params, conv, states, ring, layer, region, norm
            )
            outs.append(out)
        return outs, (conv, states, ring)

    projected = array(rows * width, shape.projected, dtype=x_dtype)
    params = array(4, shape.conv_dim, dtype=x_dtype), array(shape.value_heads, 2)
    conv = array(2, 33, 3 + width, shape.conv_dim, dtype=x_dtype)
    pools = conv, *abstract_pools(shape, dtype, width)
    operands = (projected, *params, *pools, array(shape.value_dim), abstract_region(rows))
    program = compile_for(h200, monkeypatch, step, operands, donated=(3, 4, 5))
    assert_lean(program, capfd.readouterr().out, pools)
    assert_one_row_table(program, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
@pytest.mark.parametrize("shape", [*GDN.values(), GdnShape(2, 6), GdnShape(2, 4, 64, 64)], ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_equals_its_reference(shape, dtype, width):
    """With one block a head, then normed, too, and, of the smaller shapes, with several."""
    dispatch._chosen.clear()
    run = compiled(gdn_conv_replay)
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
    states, ring, rows = pools(rng, shape, dtype, width)
    x, params, conv = projection(rng, shape, jnp.bfloat16, width, rows, kernel=4, spare=0)
    norm = norm_of(shape, len(rows.slots), width, jnp.bfloat16)
    run = compiled(gdn_conv_replay)
    for normed in (None, norm):
        first, *others = (run(x, params, conv, states, ring, 1, rows, normed) for _ in range(100))
        assert_bits_are_the_same(first, others)


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "error"), [(jnp.float32, 1e-5), (jnp.float16, 1e-3)])
def test_on_a_gpu_rounding_does_not_add_up(dtype, error):
    """4,000 tokens with random acceptance, in one program; the tokens are the reference's."""
    width, kernel, shape, steps = 4, 4, GdnShape(1, 2), 1600
    rng, heads = np.random.default_rng(1), heads_of(shape)
    x = rng.normal(size=(steps, 1, width, shape.projected)).astype(np.float32)
    first_a = shape.conv_dim + shape.value_heads * (shape.value_dim + 1)
    x[..., first_a : first_a + shape.value_heads] -= 3  # so that states last
    weight = jnp.asarray(0.5 * rng.normal(size=(kernel, shape.conv_dim)), jnp.float32)
    decay = jnp.asarray(rng.normal(size=(shape.value_heads, 2)) - 1, jnp.float32)
    params = GdnParams(weight, decay, heads)
    kept = rng.integers(1, width + 1, size=steps)

    def step(carry, now):
        (conv, states, ring), expected, computed, length = carry
        x, stand = now
        row = decode_region([1], width, num_computed=computed[None], ring_length=length[None])
        tokens, expected = gdn_inputs_reference(x, params, expected, 0, row)
        out, *pools = gdn_conv_replay(x, params, conv, states, ring, 0, row)
        length = next_ring_length(length, stand, width, ring.window).astype(jnp.int32)
        return (tuple(pools), expected, computed + stand, length), (out[0], tokens)

    conv = jnp.zeros((LAYERS, 2, kernel - 1 + width, shape.conv_dim))
    pools = conv, *empty_pools(shape, dtype, width=width, slots=2)
    start = pools, conv, jnp.int32(0), jnp.int32(0)
    dispatch._chosen.clear()
    outs, tokens = jax.jit(lambda *xs: jax.lax.scan(step, start, xs)[1])(x, int32(*kept))
    assert dispatch.implementations() == {"gdn_conv_replay": ("kernel",)}
    tokens = [np.asarray(each) for each in tokens]
    assert_rounding_does_not_add_up(outs, tokens, kept, error)
