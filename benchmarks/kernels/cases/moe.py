"""The cases of a mixture of experts: a whole layer, with the norm and the routing before it."""

import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.kernels.case import INPUTS, Case
from benchmarks.measure.model_shapes import SHAPES
from jaxspec.models import parse_config
from jaxspec.models.config import ModelConfig
from jaxspec.models.layers.moe import MoEConfig
from jaxspec.pallas.matmul.products import BLOCK_N, matmul
from jaxspec.pallas.moe.experts import Experts, moe_experts_reference
from jaxspec.pallas.moe.feed_forward import Router, moe_feed_forward
from jaxspec.pallas.moe.route import moe_route_reference
from jaxspec.pallas.norm.add_norm import add_norm_reference
from jaxspec.pallas.norm.rms_norm import Norm
from jaxspec.weight import Dense, DenseExperts

_DTYPE = jnp.bfloat16
_LAYERS = 4  # with weights of their own, 1.2 to 3.2 GB each
_TOKENS = {
    "qwen3.5-35b-a3b": (1, 4, 8, 64, 256, 2048, 4096),
    "qwen3-next-80b": (1, 64),
    "qwen3-30b-a3b": (1, 64),
}
_MOST_BY_REFERENCE = 64  # tokens: it goes from tile to tile, which takes some 10 ms
_POOLS = 2**30  # bytes: `run.py` goes on with another layer until it has touched as many


def moe_feed_forward_cases() -> Iterator[Case]:
    """A layer from the addition before its norm to its output, which is pending."""
    for model, sizes in _TOKENS.items():
        config = parse_config(SHAPES[model].config())
        weights = tuple(_weights(config, layer) for layer in range(_LAYERS))
        for tokens in sizes:
            yield _case(model, config, weights, tokens)


def _weights(config: ModelConfig, layer: int) -> tuple[jax.Array, ...]:
    """Those of the norm, the router, and gate, up and down of the experts."""
    sizes, features = config.part(MoEConfig), config.hidden_size
    rule, width = sizes.rule, sizes.intermediate_size
    columns = -(-rule.num_columns // BLOCK_N) * BLOCK_N
    shapes = (features, columns), (rule.none, 2 * width, features), (rule.none, features, width)
    inner = features, features, width
    keys = jax.random.split(jax.random.key(layer), len(shapes))
    drawn = (_draw(*each) for each in zip(keys, shapes, inner, strict=True))
    return jnp.zeros(features, _DTYPE), *drawn


def _draw(key, dims, inner):
    """So scaled that a product with tokens whose entries are about 1 has such entries."""
    return jax.random.normal(key, dims, _DTYPE) * jnp.asarray(inner**-0.5, _DTYPE)


def _case(model, config, weights, tokens):
    """A case without a pool: each call has other tokens than the one before, and other weights."""
    sizes, features = config.part(MoEConfig), config.hidden_size
    rule, width = sizes.rule, sizes.intermediate_size
    keys = jax.random.split(jax.random.key(tokens), 2 * INPUTS)
    drawn = [_draw(key, (tokens, features), 1) for key in keys]
    inputs = tuple(zip(drawn[:INPUTS], drawn[INPUTS:], strict=True))
    live = jnp.ones(tokens, bool)

    def layer_of(call, weights, inputs, live):
        """The layer's operands in one of `INPUTS` calls."""
        scale, router, *experts = weights[call % _LAYERS]
        norm = Norm(scale, config.rms_norm_eps, zero_centred=True)
        router = Router(Dense(router), None, rule)
        return *inputs[call], norm, router, Experts(*map(DenseExperts, experts)), live

    def run(op, pool, call, *operands):
        return op(*layer_of(call, *operands)), pool

    operands = weights, inputs, live
    read = [_experts_read(layer_of(call, *operands)) for call in range(INPUTS)]
    experts = sum(read) / INPUTS
    total = jnp.dtype(_DTYPE).itemsize * round(
        3 * experts * features * width  # gate, up and down
        + features * rule.num_columns
        + 4 * tokens * features  # the stream and what is pending, as they come and as they go
    )
    has_reference = tokens <= _MOST_BY_REFERENCE
    return Case(
        op="moe_feed_forward",
        about={
            "model": model,
            "experts": rule.num_experts,
            "chosen": rule.num_chosen,
            "shared": rule.num_shared,
            "features": features,
            "expert_width": width,
            "dtype": jnp.dtype(_DTYPE).name,
            "rows": tokens,
            "experts_read": round(experts, 1),
        },
        run=functools.partial(run, moe_feed_forward),
        reference=functools.partial(run, _reference) if has_reference else None,
        pool=lambda layers: (),
        layer_bytes=_POOLS // INPUTS,
        operands=operands,
        total_bytes=total,
        calls=INPUTS,
        writes=False,
    )


def _reference(stream, pending, norm, router, experts, live):
    """`moe_feed_forward` by the references of what it consists of."""
    choices, stream, normed = _choices(stream, pending, norm, router, live)
    return stream, moe_experts_reference(normed, experts, choices)


@jax.jit
def _choices(stream, pending, norm, router, live) -> tuple[Any, Any, Any]:
    """The tokens' experts, the sum that is normed, and the norm."""
    stream, normed = add_norm_reference(stream, pending, norm)
    scores = matmul(normed, router.weight, jnp.float32)
    return moe_route_reference(scores, router.bias, live, router.rule), stream, normed


def _experts_read(layer) -> int:
    """How many experts the tokens have, each counted once."""
    stream, pending, norm, router, _, live = layer
    choices, *_ = _choices(stream, pending, norm, router, live)
    return len(np.unique(choices.experts))
