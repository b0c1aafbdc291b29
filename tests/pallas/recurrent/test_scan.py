"""Scans of tokens: each token as a step of it by itself, in any number of scans."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import GDN, KDA, MAMBA2, REPLAYED, every
from regions import decode_region

from benchmarks.measure.shapes import GdnShape, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.recurrent.conv_update import conv_update_reference
from jaxspec.pallas.recurrent.token_scan import conv_scan
from jaxspec.regions import TokenRegion

LAYERS, SLOTS, CANDIDATES, LAYER = 2, 6, 4, 1
# A verify of three tokens from candidate 1, a prompt's start, a prompt's next chunk, one token, and
# padding of every kind.
SLOT = [2, 2, 2, 4, 4, 4, 4, 4, 4, 4, 4, 4, 1, 1, 3, 0, 9, -1]
POSITION = [7, 8, 9, *range(9), 5, 6, 40, 0, 3, 2]
START = [1, 0, 1, *[0] * 9, 0, 0, 2, 0, 1, 0]
CANDIDATE = [0, 1, 2, *[0] * 9, 0, 0, 0, 0, 0, 0]
NUM_LIVE = 15


def region(begin=0, end=None):
    some = slice(begin, end)
    live = [1] * NUM_LIVE + [0] + [1] * (len(SLOT) - NUM_LIVE - 1)
    rows = decode_region(
        SLOT[some],
        live[some],
        num_computed=POSITION[some],
        state_offset=START[some],
    )
    return TokenRegion.of(rows, jnp.array(CANDIDATE[some], jnp.int32))


def of_tokens(tokens, some):
    """The operands of some tokens; those of heads are left."""
    return tokens._replace(**{name: x[some] for name, x in tokens._asdict().items() if x.ndim > 1})


def drawn(family, shape, dtype=jnp.float32, x_dtype=jnp.float32):
    rng = np.random.default_rng(0)
    tokens = family.draw(rng, len(SLOT), shape=shape)
    for x in tokens:
        if x.ndim > 1:
            x[NUM_LIVE:] = np.nan
    pool = jnp.asarray(
        0.3 * rng.normal(size=(LAYERS, SLOTS, CANDIDATES, *family.state(shape))), dtype
    )
    return family.in_dtype(tokens, x_dtype), pool


def one_by_one(family, tokens, states):
    """The outputs and the pool of a step of each token, in pools that hold its start alone."""
    outputs = []
    for token in range(NUM_LIVE):
        slot, start, candidate = SLOT[token], START[token], CANDIDATE[token]
        state = states[LAYER, slot, start] if POSITION[token] else jnp.zeros(states.shape[3:])
        alone = jnp.zeros((1, 2, 1, *states.shape[3:]), states.dtype)
        alone = alone.at[0, 1, 0].set(state.astype(states.dtype))
        own = jax.tree.map(lambda x: x[None], of_tokens(tokens, slice(token, token + 1)))
        own = tokens._replace(
            **{n: getattr(own, n) for n, x in tokens._asdict().items() if x.ndim > 1}
        )
        out, after = family.step.reference(own, alone, 0, decode_region([1], 1))
        outputs.append(out[0, 0])
        states = states.at[LAYER, slot, candidate].set(after[0, 1, 0])
    return jnp.stack(outputs), states


@every
def test_a_scan_is_a_step_of_each_token(family):
    tokens, states = drawn(family, family.small)
    want, expected = one_by_one(family, tokens, states)
    out, after = family.scan.run(tokens, states, LAYER, region())
    np.testing.assert_allclose(out[:NUM_LIVE], want, atol=1e-6)
    np.testing.assert_allclose(after, expected, atol=1e-6)
    assert not np.any(out[NUM_LIVE:])


@every
def test_tokens_of_several_scans_have_the_same_bits(family):
    """Boundaries of tiles are anywhere; the pool holds the state between two scans."""
    tokens, states = drawn(family, family.small)
    want, expected = family.scan.run(tokens, states, LAYER, region())
    check_parts(family, tokens, states, want, expected)


def check_parts(family, tokens, states, want, expected):
    """Several scans one after the other give the bits of one."""
    for bounds in [(0, 2, 5, 6, 13, 18), tuple(range(19))]:
        after, outputs = states, []
        for begin, end in itertools.pairwise(bounds):
            own = of_tokens(tokens, slice(begin, end))
            out, after = family.scan.run(own, after, LAYER, region(begin, end))
            outputs.append(out)
        np.testing.assert_array_equal(jnp.concatenate(outputs)[:NUM_LIVE], want[:NUM_LIVE])
        np.testing.assert_array_equal(after, expected)


@pytest.mark.few(2)
@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ["silu", None])
def test_a_convolution_is_an_update_of_each_token(activation, has_bias):
    rng, channels, taps = np.random.default_rng(1), 5, 4
    x, weight, bias, pool = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in (
            (len(SLOT), channels),
            (taps, channels),
            (channels,),
            (LAYERS, SLOTS, 7, channels),
        )
    )
    x = x.at[NUM_LIVE:].set(jnp.nan)
    options = {"bias": bias if has_bias else None, "activation": activation}
    one_token = jax.jit(functools.partial(conv_update_reference, **options))
    scan = jax.jit(functools.partial(conv_scan, **options))
    expected, outputs = pool.at[LAYER, SLOT[3]].set(0), []  # nothing precedes a prompt
    for token in range(NUM_LIVE):
        row = decode_region([SLOT[token]], 1, num_computed=POSITION[token])
        out, expected = one_token(x[token][None, None], weight, expected, LAYER, row)
        outputs.append(out[0, 0])
    for bounds in [(0, 18), (0, 2, 5, 6, 13, 18), tuple(range(19))]:
        after, found = pool, []
        for begin, end in itertools.pairwise(bounds):
            out, after = scan(x[begin:end], weight, after, LAYER, region(begin, end))
            found.append(out)
        found = jnp.concatenate(found)[:NUM_LIVE]
        np.testing.assert_allclose(found, jnp.stack(outputs), atol=1e-6)
        # Rows that a prompt has not reached are not read.
        np.testing.assert_array_equal(after[:, [0, 1, 2, 3, 5]], expected[:, [0, 1, 2, 3, 5]])
        np.testing.assert_array_equal(after[LAYER, 4], expected[LAYER, 4])


def check(family, run, shape, dtype, x_dtype):
    """`run` is the reference in outputs, in states, and in all it must not write."""
    tokens, states = drawn(family, shape, dtype, x_dtype)
    want, expected = family.scan.reference(tokens, states, LAYER, region())
    out, after = run(tokens, states, LAYER, region())
    loose = 8 * float(jnp.finfo(dtype).eps)
    np.testing.assert_allclose(out[:NUM_LIVE], want[:NUM_LIVE], rtol=0, atol=max(5e-6, loose))
    ours, theirs = (np.asarray(x, np.float32) for x in (after, expected))
    np.testing.assert_allclose(ours, theirs, rtol=loose, atol=max(2e-6, loose))
    assert not np.any(out[NUM_LIVE:])  # no uninitialised memory comes out
    return tokens, states, out, after


@pytest.mark.parametrize(
    ("family", "shape", "dtype", "x_dtype"),
    [
        (GDN, GdnShape(2, 4, 128, 64), jnp.float32, jnp.float32),
        (GDN, GdnShape(2, 4, 64, 64), jnp.bfloat16, jnp.float32),
        (KDA, GdnShape(2, 2, 128, 128), jnp.float32, jnp.float32),
        (MAMBA2, Mamba2Shape(4, 2, 64, 128), jnp.float32, jnp.bfloat16),
        (MAMBA2, Mamba2Shape(4, 2, 128, 64), jnp.float16, jnp.float32),
    ],
    ids=str,
)
def test_the_kernel_equals_its_reference_without_races(interpreter, family, shape, dtype, x_dtype):
    from jax._src.pallas.mosaic_gpu.interpret.interpret_pallas_call import get_races

    def run(tokens, states, layer, rows):
        return family.scan.kernel(tokens, states, jnp.int32(layer), rows, interpret=interpreter)

    check(family, run, shape, dtype, x_dtype)
    assert not get_races().races_found


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("family", REPLAYED, ids=str)
def test_on_a_gpu_the_op_is_its_kernel_and_has_the_same_bits_in_any_scans(family, dtype):
    dispatch._chosen.pop(family.scan.name, None)
    tokens, states, out, after = check(family, family.scan.run, family.typical, dtype, jnp.float32)
    assert dispatch.implementations()[family.scan.name] == ("kernel",)
    check_parts(family, tokens, states, out, after)
