"""gdn_conv_replay with its output norm, its compiled kernel, and many steps."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gated_delta import heads_of, int32
from gdn_replays import (
    COMPILED_CASES,
    LAYERS,
    abstract_pools,
    abstract_region,
    assert_bits_are_the_same,
    assert_one_row_table,
    conv_case,
    conv_replay,
    norm_of,
)
from recurrences import GDN
from regions import decode_region
from replays import assert_rounding_does_not_add_up, pools
from sm90 import array, assert_lean, compile_for

from benchmarks.measure.shapes import GdnShape
from jaxspec.pallas import dispatch
from jaxspec.pallas.gated_delta.conv_replay import gdn_conv_replay
from jaxspec.pallas.gated_delta.heads import GdnParams, GdnTokens
from jaxspec.pallas.gated_delta.inputs import gdn_inputs_reference
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.recurrent.replay import next_ring_length

OPTIMIZED = True  # as for a user: one test looks at what the compiler makes


def test_a_norm_of_other_tokens_is_refused():
    shape = GdnShape(2, 4, 8, 8)
    norm = norm_of(shape, 3, 3, jnp.float32)
    with pytest.raises(ValueError, match="gates of 24 tokens, but these are of 9"):
        gdn_conv_replay(*conv_case(shape, jnp.float32, jnp.float32, 3), norm)


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
    held = conv, *abstract_pools(shape, dtype, width)
    operands = (projected, *params, *held, array(shape.value_dim), abstract_region(rows))
    program = compile_for(h200, monkeypatch, step, operands, donated=(3, 4, 5))
    assert_lean(program, capfd.readouterr().out, held)
    assert_one_row_table(program, rows)


@pytest.mark.gpu
@pytest.mark.parametrize("width", range(1, 9))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.float16])
def test_on_a_gpu_a_step_is_the_same_however_often(dtype, width):
    """To the bit: the interpreter does not see races among the warps of a block."""
    operands = conv_case(GDN.typical, jnp.bfloat16, dtype, width)
    norm = norm_of(GDN.typical, len(operands[-1].slots), width, jnp.bfloat16)
    for normed in (None, norm):
        first, *others = (conv_replay(*operands, normed) for _ in range(100))
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
        out, *after = gdn_conv_replay(x, params, conv, states, ring, 0, row)
        length = next_ring_length(length, stand, width, ring.window).astype(jnp.int32)
        return (tuple(after), expected, computed + stand, length), (out[0], tokens)

    conv = jnp.zeros((LAYERS, 2, kernel - 1 + width, shape.conv_dim))
    held = conv, *pools(GDN, np.zeros, shape, dtype, width=width, slots=2)
    start = held, conv, jnp.int32(0), jnp.int32(0)
    dispatch._chosen.clear()
    outs, tokens = jax.jit(lambda *xs: jax.lax.scan(step, start, xs)[1])(x, int32(*kept))
    assert dispatch.implementations() == {"gdn_conv_replay": ("kernel",)}
    steps = zip(*(np.asarray(x)[:, 0] for x in tokens), strict=True)
    tokens = [GdnTokens(*step) for step in steps]
    assert_rounding_does_not_add_up(GDN, shape, np.asarray(outs), tokens, kept, error)
