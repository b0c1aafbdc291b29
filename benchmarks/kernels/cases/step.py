"""The cases of the verify steps that keep a state a token; `table.OPS` lists them."""

import functools
import math
from collections.abc import Iterator

import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import FEW, MANY, Case, about, filled, live_region
from benchmarks.kernels.cases.prefill import mamba2_tokens
from benchmarks.kernels.cases.replay import gdn_tokens
from benchmarks.measure.shapes import GDN, KDA, MAMBA2
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.step import gdn_step, gdn_step_reference
from jaxspec.pallas.mamba2.step import mamba2_step, mamba2_step_reference
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.pallas.recurrent.state_select_kernel import state_select_kernel

INDEX_BYTES = 12  # of a row: its slot, state offset and length


def _run(op, pool, layer, tokens, region):
    return op(tokens, pool, layer, region)


def gdn_step_cases() -> Iterator[Case]:
    """Sizes of the decode rectangle on Qwen3.5-9B's heads, and the other models at one size."""
    sizes = [("float32", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("float32", 64, 8), ("float16", 64, 4)]
    sizes += [("bfloat16", rows, width) for width in (4, 1) for rows in (64, 256, 1)]
    for model, shape in GDN.items():
        for dtype, rows, width in sizes:
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield _gdn_step_case(model, shape, jnp.dtype(dtype), rows, width)
    for model, shape in KDA.items():
        for dtype in ("float32", "bfloat16"):
            yield _gdn_step_case(model, shape, jnp.dtype(dtype), 64, 4, by_channel=True)


def _gdn_step_case(model, shape, dtype, rows, width, by_channel=False):
    tokens = gdn_tokens(np.random.default_rng(0), shape, rows, width, by_channel)
    tokens = GdnTokens(*(jnp.asarray(x) for x in tokens))
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    state_bytes = rows * math.prod(state) * dtype.itemsize
    token_bytes = sum(x.nbytes for x in tokens) + tokens.v.nbytes  # read, and the outputs

    return Case(
        op="gdn_step",
        about=about(model, shape, dtype, rows=rows, width=width),
        run=functools.partial(_run, gdn_step),
        reference=functools.partial(_run, gdn_step_reference),
        pool=lambda layers: filled(layers, rows, width, *state, dtype=dtype),
        layer_bytes=state_bytes * width,
        operands=(tokens, live_region(rows, width)),
        total_bytes=state_bytes * (1 + width) + token_bytes + INDEX_BYTES * rows,
    )


def mamba2_step_cases() -> Iterator[Case]:
    """Sizes of the decode rectangle for Nemotron-3-Nano, and Nemotron-H-8B at one size."""
    sizes = [("float32", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("float32", 64, 8), ("float16", 64, 4), ("float16", 64, 1)]
    for dtype, rows, width in sizes:
        yield _mamba2_step_case("nemotron-3-nano", jnp.dtype(dtype), rows, width)
    yield _mamba2_step_case("nemotron-h-8b", jnp.dtype("float32"), 64, 4)


def _mamba2_step_case(model, dtype, rows, width):
    shape = MAMBA2[model]
    tokens = mamba2_tokens(shape, rows, width)
    state = (shape.heads, shape.head_dim, shape.state_dim)
    state_bytes = rows * math.prod(state) * dtype.itemsize
    token_bytes = sum(y.nbytes for y in tokens) + 4 * tokens.x.size  # read, and the outputs

    return Case(
        op="mamba2_step",
        about=about(model, shape, dtype, rows=rows, width=width),
        run=functools.partial(_run, mamba2_step),
        reference=functools.partial(_run, mamba2_step_reference),
        pool=lambda layers: filled(layers, rows, width, *state, dtype=dtype),
        layer_bytes=state_bytes * width,
        operands=(tokens, live_region(rows, width)),
        total_bytes=state_bytes * (1 + width) + token_bytes + INDEX_BYTES * rows,
    )


def state_select_cases() -> Iterator[Case]:
    """The kernel, also where the op lets XLA run."""
    for model, shape in GDN.items():
        for dtype, rows in (("float32", 64), ("bfloat16", 64), ("float32", 1)):
            yield _state_select_case(model, shape, jnp.dtype(dtype), rows)


def _state_select_case(model, shape, dtype, rows, candidates=4):
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    state_bytes = rows * math.prod(state) * dtype.itemsize

    def kernel(pool, layer, region):
        return state_select_kernel(pool, jnp.int32(layer), region), pool

    return Case(
        op="state_select",
        about=about(model, shape, dtype, rows=rows),
        run=kernel,
        reference=lambda pool, *args: (state_select_reference(pool, *args), pool),
        pool=lambda layers: filled(layers, rows, candidates, *state, dtype=dtype),
        layer_bytes=state_bytes,
        operands=(live_region(rows, candidates),),
        total_bytes=2 * state_bytes,
        calls=FEW if rows > 1 else MANY,
        writes=False,
    )
