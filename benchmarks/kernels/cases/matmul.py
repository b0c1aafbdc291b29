"""The cases of the products of up to 256 rows, and what a step runs without their kernels."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import INPUTS, MANY, Case
from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE, KDA
from jaxspec.pallas.matmul.argmax_matmul import argmax_matmul, argmax_matmul_reference
from jaxspec.pallas.matmul.feed_forward import (
    matmul_silu,
    matmul_silu_reference,
    matmul_squared_relu,
    matmul_squared_relu_reference,
)
from jaxspec.pallas.matmul.gemm import MAX_PARTS
from jaxspec.pallas.matmul.grouped_matmul import grouped_matmul, grouped_matmul_reference
from jaxspec.pallas.matmul.norm_matmul import norm_matmul
from jaxspec.pallas.matmul.products import matmul
from jaxspec.pallas.matmul.scores import NO_TOKEN
from jaxspec.pallas.matmul.split_matmul import (
    gated_matmul,
    gated_matmul_reference,
    gated_norm_matmul,
    gated_norm_matmul_reference,
    split_matmul,
    split_matmul_reference,
)
from jaxspec.pallas.norm.add_norm import add_norm
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.requests.request import ROW_STOP_IDS
from jaxspec.weight import Dense, Float8, Float8Blocks, to_float8

_SHAPE = GDN["qwen3.5-0.8b"]  # also the 2B's
_VALUES = _SHAPE.value_heads * _SHAPE.value_dim
_DTYPE = jnp.bfloat16
_WEIGHTS = 2**28  # bytes of all weights that a case goes through
_PARTS = {"qwen3.5-0.8b": 8, "qwen3.5-2b": 4}  # partial sums of `split_matmul` for up to 8 rows
_MORE_ROWS = {  # than 8
    "qwen3.5-0.8b": (16, 64, 256),
    "qwen3.5-2b": (16, 64),
    "qwen3.5-9b": (16, 64, 128, 256),
}
_PUBLISHED = "qwen3.5-9b", "qwen3.5-27b"  # also measured with weights in 8 bits
_PUBLISHED_ROWS = 1, 8, 64, 256
_SQUARED_RELU = {  # features, and columns of a layer without a gate
    "nemotron-3-nano-4b": (3136, 12544),
    "nemotron-nano-9b-v2": (4480, 15680),
}


def norm_matmul_cases() -> Iterator[Case]:
    """Gated DeltaNet's projection, attention's, and the feed-forward layer's first."""
    for model in _PARTS:
        products = {"in_proj": _SHAPE.projected, "qkv": 5120, "gate_up": 2 * INTERMEDIATE[model]}
        for name, columns in products.items():
            for tokens in (1, 4, 8):
                yield _norm_matmul_case(model, name, columns, tokens)
    for tokens in (128, 256):
        yield _norm_matmul_case("qwen3.5-9b", "in_proj", GDN["qwen3.5-9b"].projected, tokens)
    for model in _PUBLISHED:
        columns = GDN[model].conv_dim + GDN[model].value_heads * GDN[model].value_dim
        for tokens in _PUBLISHED_ROWS:
            case = _norm_matmul_case(model, "in_proj", columns, tokens, _in_blocks)
            yield dataclasses.replace(case, reference=None)


def _norm_matmul_case(model, name, columns, tokens, of=Dense):
    """Partial sums are pending for the kernel, as in a step; tokens for what runs without it."""
    features, parts = HIDDEN[model], _PARTS.get(model, MAX_PARTS)
    x, tokens_added = (_draw(i, INPUTS, tokens, features) for i in range(2))
    sums = tuple((jnp.stack([y.astype(jnp.float32)] * parts) / parts) for y in tokens_added)
    scale = jnp.zeros(features, _DTYPE)

    def fused(weight, index, x, sums, tokens_added, scale):
        norm = Norm(scale, 1e-6, zero_centred=True)
        return norm_matmul(x[index], sums[index], norm, weight)

    def unfused(weight, index, x, sums, tokens_added, scale):
        norm = Norm(scale, 1e-6, zero_centred=True)
        stream, normed = add_norm(x[index], tokens_added[index], norm)
        return stream, matmul(normed, weight)

    return _case(
        "norm_matmul",
        (model, name, tokens),
        fused,
        unfused,
        (features, columns),
        (x, sums, tokens_added, scale),
        2 * tokens * (2 * features + columns) + 4 * parts * tokens * features,
        of,
    )


def split_matmul_cases() -> Iterator[Case]:
    """The last product of attention and, for more rows, of the feed-forward layer."""
    ops = split_matmul, split_matmul_reference
    for model in _PARTS:
        for tokens in (1, 4, 8):
            yield _plain_case(
                "split_matmul", ops, (model, "o_proj", tokens), _VALUES, HIDDEN[model]
            )
    for model, rows in _MORE_ROWS.items():
        inner = INTERMEDIATE[model]
        for tokens in rows:
            yield _plain_case("split_matmul", ops, (model, "down", tokens), inner, HIDDEN[model])
    for tokens in (128, 256):
        yield _plain_case("split_matmul", ops, ("qwen3.5-9b", "o_proj", tokens), 4096, 4096)
    for tokens in (1, 4, 8, 16, 64):
        yield _plain_case("split_matmul", ops, ("nemotron-3-nano", "o_proj", tokens), 4096, 2688)
    for tokens in (16, 64, 256):
        about = "nemotron-3-super", "latent and shared", tokens
        yield _plain_case("split_matmul", ops, about, 1024 + 5376, 4096)
    for model in _PUBLISHED:
        heads = GDN[model].value_heads * GDN[model].value_dim
        for tokens in _PUBLISHED_ROWS:
            yield _published_case(
                "split_matmul", ops, (model, "o_proj", tokens), heads, HIDDEN[model]
            )


def gated_matmul_cases() -> Iterator[Case]:
    """The last product of the feed-forward layer, for up to 8 rows; for more in 8 bits."""
    ops = gated_matmul, gated_matmul_reference
    for model in _PARTS:
        for tokens in (1, 4, 8):
            about, inner = (model, "down", tokens), INTERMEDIATE[model]
            yield _plain_case("gated_matmul", ops, about, inner, HIDDEN[model], times=2)
    for model in _PUBLISHED:
        sizes = INTERMEDIATE[model], HIDDEN[model]
        for tokens in _PUBLISHED_ROWS:
            yield _published_case("gated_matmul", ops, (model, "down", tokens), *sizes, times=2)
            yield _rounded_case("gated_matmul", ops, (model, "down", tokens), *sizes, times=2)


def matmul_silu_cases() -> Iterator[Case]:
    """The first product of the feed-forward layer, for more rows."""
    ops = matmul_silu, matmul_silu_reference
    for model, rows in _MORE_ROWS.items():
        columns = 2 * INTERMEDIATE[model]
        for tokens in rows:
            yield _plain_case(
                "matmul_silu", ops, (model, "gate_up", tokens), HIDDEN[model], columns
            )

    for model in _PUBLISHED:
        sizes = HIDDEN[model], 2 * INTERMEDIATE[model]
        for tokens in (64, 256, 2048):
            yield _published_case("matmul_silu", ops, (model, "gate_up", tokens), *sizes)
            yield _rounded_case("matmul_silu", ops, (model, "gate_up", tokens), *sizes)


def matmul_squared_relu_cases() -> Iterator[Case]:
    """The same without a gate, of the dense Nemotron models."""
    ops = matmul_squared_relu, matmul_squared_relu_reference
    for model, sizes in _SQUARED_RELU.items():
        for tokens in (16, 64, 128, 256):
            yield _plain_case("matmul_squared_relu", ops, (model, "up", tokens), *sizes)


def argmax_matmul_cases() -> Iterator[Case]:
    """The output head with forbidden stop ids, and the part of it that scores drafts."""

    def run(op, num_forbidden, x, weight):
        return op(x, weight, jnp.full((x.shape[0], num_forbidden), NO_TOKEN, jnp.int32))

    for model in ("qwen3.5-0.8b", "qwen3.5-9b"):
        for name, ids, num_forbidden in (("head", 248320, ROW_STOP_IDS), ("draft head", 32768, 0)):
            ops = (argmax_matmul, argmax_matmul_reference)
            runs = [functools.partial(run, op, num_forbidden) for op in ops]
            for tokens in (16, 64, 128, 256, 1024):
                yield _plain_case("argmax_matmul", runs, (model, name, tokens), HIDDEN[model], ids)
        runs = (functools.partial(run, argmax_matmul, 0),) * 2
        for tokens in (1, 8, 64, 256):
            about = model, "draft head", tokens
            case = _plain_case("argmax_matmul", runs, about, HIDDEN[model], 248320, _in_8_bits)
            yield dataclasses.replace(case, reference=None)  # it copies the weight in float32


def _in_8_bits(array):
    return Float8.of(Dense(array))


def _in_blocks(array, terms=2):
    in_8_bits, scale = to_float8(array.T)
    outer, inner = in_8_bits.shape
    return Float8Blocks(in_8_bits, jnp.full((outer // 64, inner // 128), scale), terms)


def _published_case(*args, of=_in_blocks, **named):
    """The case of a published weight in 8 bits; the reference would copy it in float32."""
    return dataclasses.replace(_plain_case(*args, of=of, **named), reference=None)


def _rounded_case(name, ops, about, *sizes, **named):
    """The same with activations that are rounded to 8 bits."""
    model, product, tokens = about
    about = model, f"{product}, activations in 8 bits", tokens
    of = functools.partial(_in_blocks, terms=1)
    return _published_case(name, ops, about, *sizes, of=of, **named)


def _plain_case(name, ops, about, inner, outer, of=Dense, times=1):
    """The case of `op(x, weight)`, where `x` has `times` as many columns as the weight has rows.

    `of` makes the weight of its matrix.
    """

    def run(op, weight, index, x):
        return op(x[index], weight)

    x = _draw(0, INPUTS, about[2], times * inner)
    weight = jax.ShapeDtypeStruct((inner, outer), _DTYPE)
    output = jax.eval_shape(ops[0], x[0], Dense(weight))
    return _case(
        name,
        about,
        *(functools.partial(run, op) for op in ops),
        (inner, outer),
        (x,),
        x[0].nbytes + output.size * output.dtype.itemsize,
        of,
    )


def gated_norm_matmul_cases() -> Iterator[Case]:
    """The product that follows the recurrence of Gated DeltaNet."""
    for model in _PARTS:
        for tokens in (1, 4, 8):
            yield _gated_norm_matmul_case(model, tokens)


def _gated_norm_matmul_case(model, tokens):
    def run(op, weight, index, heads, gates, scale):
        norm = GatedNorm(gates[index], scale, first=_SHAPE.conv_dim, eps=1e-6)
        return op(heads[index], norm, Dense(weight))

    outer, dims = HIDDEN[model], (_SHAPE.value_heads, _SHAPE.value_dim)
    flat = _draw(0, INPUTS, tokens, _VALUES)
    heads = tuple(x.astype(jnp.float32).reshape(tokens, *dims) for x in flat)
    return _case(
        "gated_norm_matmul",
        (model, "out_proj", tokens),
        functools.partial(run, gated_norm_matmul),
        functools.partial(run, gated_norm_matmul_reference),
        (_VALUES, outer),
        (heads, _draw(1, INPUTS, tokens, _SHAPE.projected), jnp.ones(dims[1])),
        tokens * (6 * _VALUES + 4 * _PARTS[model] * outer),
    )


def grouped_matmul_cases() -> Iterator[Case]:
    """The second matrices of the decay and of the output gate of Kimi Delta Attention."""
    rank, channels = 128, KDA["kimi-linear-48b-a3b"].conv_dim // 3
    starts = 3 * channels + rank, 3 * channels

    def halves(array):
        return Dense(array[:, :channels]), Dense(array[:, channels:])

    def run(op, weights, index, x):
        return op(x[index], starts, weights)

    for tokens in (1, 4, 8):
        yield _case(
            "grouped_matmul",
            ("kimi-linear-48b-a3b", "f_b_proj and g_b_proj", tokens),
            functools.partial(run, grouped_matmul),
            functools.partial(run, grouped_matmul_reference),
            (rank, 2 * channels),
            (_draw(0, INPUTS, tokens, 3 * channels + 5 * 64),),
            2 * rank * channels + 2 * tokens * 2 * (rank + channels),
            halves,
        )


def _draw(seed, count, *dims):
    keys = jax.random.split(jax.random.key(seed), count)
    return tuple(jax.random.normal(key, dims).astype(_DTYPE) for key in keys)


def _case(op, about, run, reference, weight, operands, other_bytes, of=lambda array: array):
    """A case without a pool: each array in one would cost the host more than a kernel takes."""
    model, name, tokens = about
    # There are so many weights that no call finds its own in the cache.
    count = -(-_WEIGHTS // (weight[0] * weight[1]))
    weights = tuple(of(w * weight[0] ** -0.5) for w in _draw(2, count, *weight))
    array, *_ = jax.tree.leaves(weights[0])

    def with_pool(run, pool, layer, weights, *operands):
        return run(weights[layer % len(weights)], layer % INPUTS, *operands), pool

    return Case(
        op=op,
        about={
            "model": model,
            "product": name,
            "features": weight[0],
            "columns": weight[1],
            "dtype": array.dtype.name,
            "rows": tokens,
        },
        run=functools.partial(with_pool, run),
        reference=functools.partial(with_pool, reference),
        pool=lambda layers: (),
        layer_bytes=array.nbytes,
        operands=(weights, *operands),
        total_bytes=array.nbytes + other_bytes,
        calls=MANY,
        writes=False,
    )
