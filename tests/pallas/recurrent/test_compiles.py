"""The kernels of steps and prefills compile to sm_90a code that neither spills nor copies pools."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from recurrences import GDN, KDA, MAMBA2, both
from sm90 import array, assert_in_place, assert_lean, compile_for

from benchmarks.measure.shapes import GdnShape, Mamba2Shape
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.window import window_scan
from jaxspec.pallas.recurrent.token_scan import conv_scan
from jaxspec.regions import DecodeRegion, PrefillRegion, TokenRegion

OPTIMIZED = True  # as for a user
FLOAT32, BFLOAT16, FLOAT16 = jnp.float32, jnp.bfloat16, jnp.float16
NANO = MAMBA2.typical


def abstract_tokens(family, shape, *batch, dtype):
    tokens = family.draw(np.random.default_rng(0), *batch, shape=shape)
    return jax.tree.map(lambda x: array(*x.shape, dtype=x.dtype), family.in_dtype(tokens, dtype))


def abstract_rows(rows):
    return DecodeRegion(*[array(rows, dtype=jnp.int32)] * 5)


STEPS = [  # family, shape, dtypes of states and of tokens, width
    *(
        (GDN, shape, dtype, FLOAT32, width)
        for shape in (*GDN.published.values(), GdnShape(2, 2, 64, 64))
        for dtype in (FLOAT32, BFLOAT16, FLOAT16)
        for width in (1, 4, 8)
    ),
    *(
        (KDA, KDA.typical, dtype, FLOAT32, width)
        for dtype in (FLOAT32, BFLOAT16, FLOAT16)
        for width in (1, 4, 8)
    ),
    *(
        (MAMBA2, shape, *dtypes, width)
        for shape, *dtypes in (
            (NANO, FLOAT32, FLOAT32),
            (NANO, FLOAT32, BFLOAT16),
            (NANO, BFLOAT16, BFLOAT16),
            (NANO, FLOAT16, BFLOAT16),
            (MAMBA2.published["nemotron-h-8b"], FLOAT32, BFLOAT16),
        )
        for width in (1, 4, 8)
    ),
    (MAMBA2, Mamba2Shape(4, 2, 128, 64), FLOAT32, BFLOAT16, 8),
    (MAMBA2, Mamba2Shape(4, 2, 128, 64), FLOAT16, FLOAT32, 1),
]


@pytest.mark.parametrize(("family", "shape", "dtype", "x_dtype", "width"), STEPS, ids=str)
def test_a_step_compiles(h200, monkeypatch, capfd, family, shape, dtype, x_dtype, width):
    def step(tokens, states, rows):
        for layer in range(2):
            out, states = family.step.kernel(tokens, states, jnp.int32(layer), rows)
            tokens = tokens._replace(**{family.value: out.astype(x_dtype)})
        return out, states

    tokens = abstract_tokens(family, shape, 4, width, dtype=x_dtype)
    pool = array(2, 9, 8, *family.state(shape), dtype=dtype)
    operands = tokens, pool, abstract_rows(4)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)


@pytest.mark.parametrize(
    ("family", "dtype", "x_dtype"),
    [
        (GDN, FLOAT32, FLOAT32),
        (GDN, BFLOAT16, FLOAT32),
        (KDA, FLOAT32, FLOAT32),
        (MAMBA2, FLOAT32, BFLOAT16),
        (MAMBA2, FLOAT16, FLOAT32),
    ],
    ids=str,
)
def test_a_scan_compiles(h200, monkeypatch, capfd, family, dtype, x_dtype):
    def scan(tokens, states, rows):
        for layer in range(2):
            out, states = family.scan.kernel(tokens, states, jnp.int32(layer), rows)
            tokens = tokens._replace(**{family.value: out.astype(x_dtype)})
        return out, states

    tokens = abstract_tokens(family, family.typical, 64, dtype=x_dtype)
    pool = array(2, 9, 4, *family.state(family.typical), dtype=dtype)
    operands = tokens, pool, TokenRegion(*[array(64, dtype=jnp.int32)] * 8)
    compiled = compile_for(h200, monkeypatch, scan, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)


@pytest.mark.parametrize("scan", [conv_scan, window_scan])
def test_a_scan_in_xla_writes_its_pool_in_place(h200, monkeypatch, scan):
    def run(operands, pool, rows):
        return scan(*operands, pool, 1, rows, **options)

    if scan is conv_scan:
        operands, options = (array(64, 8192), array(4, 8192)), {}
        pool = array(2, 499, 7, 8192)
    else:
        operands, options = (array(64, 16, 64), *2 * (array(64, 8, 64),)), {"window": 128}
        pool = array(2, 999, 131, 2, 8, 64)
    operands = operands, pool, TokenRegion(*[array(64, dtype=jnp.int32)] * 8)
    compiled = compile_for(h200, monkeypatch, run, operands, donated=1)
    assert_in_place(compiled, pool)


@both
def test_a_pool_is_written_in_place_by_several_steps_too(h200, monkeypatch, family):
    """As in a program of `steps_per_dispatch` steps, where the pool goes round a loop."""

    def step(states, tokens, rows):
        def once(states, _):
            out, states = family.step.kernel(tokens, states, jnp.int32(0), rows)
            return states, out

        return jax.lax.scan(once, states, length=3)

    tokens = abstract_tokens(family, family.typical, 4, 1, dtype=FLOAT32)
    pool = array(2, 9, 1, *family.state(family.typical))
    operands = pool, tokens, abstract_rows(4)
    compiled = compile_for(h200, monkeypatch, step, operands, donated=0)
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes == pool.size * 4
    assert memory.temp_size_in_bytes < pool.size / 8


PREFILLS = [  # family, shape, dtypes of tokens and of states, tokens
    *(
        (GDN, shape, *dtypes, 128)
        for shape, dtypes in itertools.product(
            [*GDN.published.values(), GdnShape(2, 2, 64, 64)],
            [
                *((BFLOAT16, states) for states in (FLOAT32, BFLOAT16, FLOAT16)),
                (FLOAT16, FLOAT32),
            ],
        )
    ),
    *((KDA, KDA.typical, BFLOAT16, states, 128) for states in (FLOAT32, BFLOAT16)),
    (KDA, GdnShape(2, 2, 64, 64), FLOAT16, FLOAT16, 128),
    *((MAMBA2, shape, BFLOAT16, FLOAT32, 2048) for shape in MAMBA2.published.values()),
    (MAMBA2, NANO, BFLOAT16, FLOAT32, 256),  # one tile per sequence
    (MAMBA2, NANO, BFLOAT16, FLOAT16, 2048),
    (MAMBA2, NANO, FLOAT16, FLOAT32, 2048),
    (MAMBA2, Mamba2Shape(4, 2, 128, 64), BFLOAT16, BFLOAT16, 2048),
    (MAMBA2, Mamba2Shape(4, 2, 128, 128), BFLOAT16, FLOAT32, 2048),
]


@pytest.mark.parametrize(("family", "shape", "dtype", "states_dtype", "tokens"), PREFILLS, ids=str)
def test_a_prefill_compiles(h200, monkeypatch, capfd, family, shape, dtype, states_dtype, tokens):
    monkeypatch.setattr(dispatch, "runs_kernel", lambda op, why_not, **_: why_not is None)

    def step(tokens, states, chunks):
        for layer in range(2):
            out, states = family.prefill.op(tokens, states, layer, chunks)
            tokens = tokens._replace(**{family.value: out.astype(dtype)})
        return out.astype(dtype), states

    seqs, slots = 3, 257 if family is MAMBA2 else 65
    pool = array(2, slots, 4, *family.state(shape), dtype=states_dtype)
    index, start = array(seqs, dtype=jnp.int32), array(seqs + 1, dtype=jnp.int32)
    chunks = PrefillRegion(index, index, start, index)
    operands = abstract_tokens(family, shape, tokens, dtype=dtype), pool, chunks
    compiled = compile_for(h200, monkeypatch, step, operands, donated=1)
    assert_lean(compiled, capfd.readouterr().out, pool)
    assert "while(" not in compiled.as_text()  # which the host would wait for
