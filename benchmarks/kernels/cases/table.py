"""What `kernels.py` measures: the ops at the shapes of the published models.

To add an op, write a generator of `Case` and put it into `OPS`.
"""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import FEW, MANY, Case, about, filled, live_rows
from benchmarks.kernels.cases.attention import (
    attention_inputs_cases,
    paged_attention_cases,
    prefill_attention_cases,
    slot_mapping_cases,
)
from benchmarks.kernels.cases.conv import conv_update_cases, gdn_inputs_cases
from benchmarks.kernels.cases.matmul import (
    argmax_matmul_cases,
    gated_matmul_cases,
    gated_norm_matmul_cases,
    matmul_silu_cases,
    norm_matmul_cases,
    split_matmul_cases,
)
from benchmarks.kernels.cases.norm import add_norm_cases
from benchmarks.kernels.cases.prefill import (
    gdn_prefill_cases,
    mamba2_prefill_cases,
    mamba2_tokens,
)
from benchmarks.kernels.cases.replay import (
    gdn_conv_replay_cases,
    gdn_replay_cases,
    gdn_tokens,
    mamba2_replay_cases,
)
from benchmarks.measure.shapes import GDN, MAMBA2
from jaxspec.pallas.gated_delta.step import gdn_step, gdn_step_reference
from jaxspec.pallas.mamba2.step import mamba2_step, mamba2_step_reference
from jaxspec.pallas.recurrent.state_select import state_select_reference
from jaxspec.pallas.recurrent.state_select_kernel import state_select_kernel


def gdn_step_cases() -> Iterator[Case]:
    """Sizes of the decode rectangle on Qwen3.5-9B's heads, and the other models at one size."""
    sizes = [("float32", rows, width) for width in (4, 1) for rows in (64, 256, 8, 1)]
    sizes += [("float32", 64, 8), ("float16", 64, 4)]
    sizes += [("bfloat16", rows, width) for width in (4, 1) for rows in (64, 256, 1)]
    for model, shape in GDN.items():
        for dtype, rows, width in sizes:
            if model == "qwen3.5-9b" or (rows, width) == (64, 4):
                yield _gdn_step_case(model, shape, jnp.dtype(dtype), rows, width)


def _gdn_step_case(model, shape, dtype, rows, width):
    rng = np.random.default_rng(0)
    tokens = gdn_tokens(rng, shape, rows, width)
    slots = 1 + rng.permutation(rows).astype(np.int32)
    offset = rng.integers(0, width, size=rows).astype(np.int32)
    length = np.full(rows, width, np.int32)
    operands = (*tokens, slots, offset, length)
    state = (shape.value_heads, shape.value_dim, shape.key_dim)

    def pool(layers):
        # Every slot holds the same random state: the speed does not depend on which.
        one = jax.random.normal(jax.random.key(0), state, jnp.float32).astype(dtype)
        return jnp.broadcast_to(one, (layers, 1 + rows, width, *state)) + jnp.zeros((), dtype)

    def run(op, pool, layer, q, k, v, g, beta, *index):
        return op(q, k, v, g, beta, pool, layer, *index)

    state_bytes = rows * math.prod(state) * dtype.itemsize
    return Case(
        op="gdn_step",
        about=about(model, shape, dtype, rows=rows, width=width),
        run=functools.partial(run, gdn_step),
        reference=functools.partial(run, gdn_step_reference),
        pool=pool,
        layer_bytes=state_bytes * width,
        operands=tuple(jnp.asarray(x) for x in operands),
        total_bytes=state_bytes * (1 + width) + sum(x.nbytes for x in operands) + tokens[2].nbytes,
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
    operands = *mamba2_tokens(shape, rows, width), *live_rows(rows, width)
    state = (shape.heads, shape.head_dim, shape.state_dim)

    def run(op, pool, layer, x, dt, a, b, c, d, *index):
        return op(x, dt, a, b, c, d, pool, layer, *index)

    state_bytes = rows * math.prod(state) * dtype.itemsize
    return Case(
        op="mamba2_step",
        about=about(model, shape, dtype, rows=rows, width=width),
        run=functools.partial(run, mamba2_step),
        reference=functools.partial(run, mamba2_step_reference),
        pool=lambda layers: filled(layers, rows, width, *state, dtype=dtype),
        layer_bytes=state_bytes * width,
        operands=operands,
        total_bytes=state_bytes * (1 + width)
        + sum(y.nbytes for y in operands)
        + 4 * operands[0].size,
    )


def state_select_cases() -> Iterator[Case]:
    """The kernel, whatever the op runs."""
    for model, shape in GDN.items():
        for dtype, rows in (("float32", 64), ("bfloat16", 64), ("float32", 1)):
            yield _state_select_case(model, shape, jnp.dtype(dtype), rows)


def _state_select_case(model, shape, dtype, rows, candidates=4):
    state = (shape.value_heads, shape.value_dim, shape.key_dim)
    state_bytes = rows * math.prod(state) * dtype.itemsize

    def pool(layers):
        one = jax.random.normal(jax.random.key(0), state, jnp.float32).astype(dtype)
        return jnp.broadcast_to(one, (layers, 1 + rows, candidates, *state)) + jnp.zeros((), dtype)

    def kernel(pool, layer, *index):
        return state_select_kernel(pool, jnp.int32(layer), *index), pool

    return Case(
        op="state_select",
        about=about(model, shape, dtype, rows=rows),
        run=kernel,
        reference=lambda pool, *args: (state_select_reference(pool, *args), pool),
        pool=pool,
        layer_bytes=state_bytes,
        operands=live_rows(rows, candidates)[:2],
        total_bytes=2 * state_bytes,
        calls=FEW if rows > 1 else MANY,
        writes=False,
    )


OPS = {
    "gdn_step": gdn_step_cases,
    "gdn_prefill": gdn_prefill_cases,
    "gdn_replay": gdn_replay_cases,
    "gdn_conv_replay": gdn_conv_replay_cases,
    "mamba2_step": mamba2_step_cases,
    "mamba2_replay": mamba2_replay_cases,
    "mamba2_prefill": mamba2_prefill_cases,
    "conv_update": conv_update_cases,
    "gdn_inputs": gdn_inputs_cases,
    "add_norm": add_norm_cases,
    "attention_inputs": attention_inputs_cases,
    "norm_matmul": norm_matmul_cases,
    "split_matmul": split_matmul_cases,
    "gated_matmul": gated_matmul_cases,
    "gated_norm_matmul": gated_norm_matmul_cases,
    "matmul_silu": matmul_silu_cases,
    "argmax_matmul": argmax_matmul_cases,
    "state_select": state_select_cases,
    "slot_mapping": slot_mapping_cases,
    "paged_attention": paged_attention_cases,
    "prefill_attention": prefill_attention_cases,
}
