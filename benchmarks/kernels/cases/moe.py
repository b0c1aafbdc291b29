"""The cases of a mixture of experts: a whole layer, with the norm and the routing before it."""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import INPUTS, Case
from benchmarks.measure.mixtures import Mixture, mixture
from jaxspec.pallas.matmul.float8_terms import CHUNK
from jaxspec.pallas.matmul.products import BLOCK_N, matmul
from jaxspec.pallas.moe.experts import Experts, moe_experts_reference
from jaxspec.pallas.moe.feed_forward import Router, moe_feed_forward
from jaxspec.pallas.moe.latent import Columns, latent_moe_feed_forward
from jaxspec.pallas.moe.route import moe_route_reference
from jaxspec.pallas.norm.add_norm import add_norm_reference
from jaxspec.pallas.norm.residual import sum_parts
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import (
    Dense,
    DenseExperts,
    ExpertsWeight,
    Float8BlockExperts,
    Float8RowExperts,
    to_float8,
)

_DTYPE = jnp.bfloat16
_LAYERS = 4  # with weights of their own, 1.2 to 5.6 GB each
_TOKENS = {
    "qwen3.5-35b-a3b": (1, 4, 8, 64, 256, 2048, 4096),
    "qwen3-next-80b": (1, 64),
    "qwen3-30b-a3b": (1, 64),
    "nemotron-3-nano-30b-a3b": (1, 4, 8, 64, 256, 2048, 4096),
    "granite-4-small": (1, 8, 64, 256, 2048),
}
_PUBLISHED_TOKENS = {
    "qwen3.5-35b-a3b": (1, 8, 64, 256, 2048, 4096),
    "nemotron-3-nano-30b-a3b": (1, 8, 64, 2048),
}
_LATENT_TOKENS = {"nemotron-3-super-120b-a12b": (1, 4, 8, 64, 256, 2048, 4096)}
_MOST_BY_REFERENCE = 64  # tokens: it goes from tile to tile, which takes some 10 ms
_POOLS = 2**30  # bytes: `run.py` goes on with another layer until it has touched as many


def moe_feed_forward_cases() -> Iterator[Case]:
    """A layer from the addition before its norm to its output, which is pending."""
    for model, sizes in _TOKENS.items():
        yield from _cases(model, sizes, moe_feed_forward, _reference)
    for model, sizes in _PUBLISHED_TOKENS.items():
        stack = _in_blocks if model.startswith("qwen") else _in_rows
        yield from _cases(model, sizes, moe_feed_forward, _reference, stack)


def latent_moe_feed_forward_cases() -> Iterator[Case]:
    """The same of experts that read fewer features than the stream has."""
    for model, sizes in _LATENT_TOKENS.items():
        yield from _cases(model, sizes, latent_moe_feed_forward, _latent_reference)


def _cases(model, counts, op, reference, stack=DenseExperts) -> Iterator[Case]:
    layer = mixture(model)
    weights = tuple(_weights(layer, number, stack) for number in range(_LAYERS))
    for tokens in counts:
        yield _case(model, layer, weights, tokens, (op, reference))


def _shapes(layer: Mixture) -> tuple[tuple[int, ...], ...]:
    """The weights of the router, of up and down of the experts, and of what ends a latent layer."""
    features, sizes = layer
    rule, width, pieces = sizes.rule, sizes.intermediate_size, sizes.activation.pieces
    latent, columns = sizes.latent_size, rule.num_columns
    if latent is not None:
        columns = Columns.of(columns, latent, pieces * sizes.shared_size).shared.stop
    read, columns = latent or features, -(-columns // BLOCK_N) * BLOCK_N
    shapes = (features, columns), (rule.none, pieces * width, read), (rule.none, read, width)
    return shapes if latent is None else (*shapes, (latent + sizes.shared_size, features))


def _weights(
    layer: Mixture, number: int, stack: Callable[[jax.Array], ExpertsWeight]
) -> tuple[Any, ...]:
    """Those of the norm, and then of `_shapes`; `stack` makes weights of matrices of experts."""
    shapes = _shapes(layer)
    # A stack's product sums over its last axis, and another weight's over its first.
    inner = [dims[2] if len(dims) == 3 else dims[0] for dims in shapes]
    keys = jax.random.split(jax.random.key(number), len(shapes))
    router, up, down, *last = (_draw(*each) for each in zip(keys, shapes, inner, strict=True))
    if stack is not DenseExperts:  # in FP8 features are padded to whole chunks
        up, down = (
            jnp.pad(each, ((0, 0), (0, 0), (0, -each.shape[2] % CHUNK))) for each in (up, down)
        )
    return jnp.zeros(layer.features, _DTYPE), router, stack(up), stack(down), *last


def _in_blocks(array):
    array, scale = to_float8(array)
    experts, outer, inner = array.shape
    return Float8BlockExperts(array, jnp.full((experts, outer // 64, inner // 128), scale))


def _in_rows(array):
    array, scale = to_float8(array)
    return Float8RowExperts(array, jnp.full(array.shape[:2], scale))


def _draw(key, dims, inner):
    """So scaled that a product with tokens whose entries are about 1 has such entries."""
    return jax.random.normal(key, dims, _DTYPE) * jnp.asarray(inner**-0.5, _DTYPE)


def _case(model, layer, weights, tokens, ops):
    """A case without a pool: each call has other tokens than the one before, and other weights."""
    features, sizes = layer
    keys = jax.random.split(jax.random.key(tokens), 2 * INPUTS)
    drawn = [_draw(key, (tokens, features), 1) for key in keys]
    inputs = tuple(zip(drawn[:INPUTS], drawn[INPUTS:], strict=True))

    def run(op, pool, call, *operands):
        return op(*_operands(sizes, call, *operands)), pool

    operands = weights, inputs, jnp.ones(tokens, bool)
    dtype = weights[0][2].dtype  # of the experts
    read = sum(_experts_read(_operands(sizes, call, *operands)) for call in range(INPUTS)) / INPUTS
    return Case(
        op=ops[0].__name__,
        about={
            "model": model,
            "experts": sizes.rule.num_experts,
            "chosen": sizes.rule.num_chosen,
            "shared": sizes.rule.num_shared,
            "features": features,
            "expert_width": sizes.intermediate_size,
            "dtype": jnp.dtype(dtype).name,
            "rows": tokens,
            "experts_read": round(read, 1),
        },
        run=functools.partial(run, ops[0]),
        reference=functools.partial(run, ops[1]) if tokens <= _MOST_BY_REFERENCE else None,
        pool=lambda layers: (),
        layer_bytes=_POOLS // INPUTS,
        operands=operands,
        total_bytes=_bytes(layer, tokens, read, jnp.dtype(dtype).itemsize),
        calls=INPUTS,
        writes=False,
    )


def _operands(sizes, call, weights, inputs, live):
    """The layer's operands in one of `INPUTS` calls."""
    scale, router, up, down, *last = weights[call % _LAYERS]
    bias = jnp.zeros(sizes.rule.num_experts) if sizes.has_correction else None
    experts = Experts(up, down, sizes.activation)
    held = Norm(scale, 1e-6, zero_centred=True), Router(Dense(router), bias, sizes.rule), experts
    return *inputs[call], *held, *map(Dense, last), live


def _bytes(layer: Mixture, tokens: int, experts_read: float, itemsize: int) -> int:
    """Return the bytes that a call must move: chosen experts, the other weights, the stream."""
    features, sizes = layer
    pieces, read = sizes.activation.pieces, sizes.latent_size or features
    of_experts = round((pieces + 1) * experts_read * read * sizes.intermediate_size)
    numbers = features * sizes.rule.num_columns
    if sizes.latent_size is not None:
        numbers += features * (2 * read + (pieces + 1) * sizes.shared_size)
    # The stream and what is pending, as they come and as they go.
    others = jnp.dtype(_DTYPE).itemsize * (numbers + 4 * tokens * features)
    return itemsize * of_experts + others


def _reference(stream, pending, norm, router, experts, live):
    """`moe_feed_forward` by the references of what it consists of."""
    choices, stream, normed, _ = _choices(stream, pending, norm, router, live)
    return stream, moe_experts_reference(normed, experts, choices)


def _latent_reference(stream, pending, norm, router, experts, output, live):
    """`latent_moe_feed_forward` in the same way."""
    choices, stream, _, product = _choices(stream, pending, norm, router, live)
    latent = experts.down.outer
    shared = experts.activation.pieces * (output.inner - latent)
    columns = Columns.of(router.rule.num_columns, latent, shared)
    small, wide = (product[:, some].astype(stream.dtype) for some in columns)
    routed = sum_parts(moe_experts_reference(small, experts, choices), stream.dtype)
    both = jnp.concatenate([routed, experts.activation(wide)], axis=1)
    return stream, matmul(both, output)


@jax.jit
def _choices(stream, pending, norm, router, live) -> tuple[Any, Any, Any, Any]:
    """The tokens' experts, the sum that is normed, the norm, and its product with the router."""
    stream, normed = add_norm_reference(stream, pending, norm)
    product = matmul(normed, router.weight, jnp.float32)
    choices = moe_route_reference(product, router.bias, live, router.rule)
    return choices, stream, normed, product


def _experts_read(operands) -> int:
    """Return the number of distinct experts that the tokens chose."""
    stream, pending, norm, router, *_, live = operands
    choices, *_ = _choices(stream, pending, norm, router, live)
    return len(np.unique(choices.experts))
