"""The cases of the prefills; `table.OPS` lists them."""

import functools
import math
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import FEW, Case, about
from benchmarks.measure.shapes import GDN, KDA, MAMBA2
from jaxspec.pallas.gated_delta.heads import GdnTokens
from jaxspec.pallas.gated_delta.prefill import gdn_prefill, gdn_prefill_xla
from jaxspec.pallas.mamba2.heads import Mamba2Tokens
from jaxspec.pallas.mamba2.prefill import mamba2_prefill, mamba2_prefill_xla
from jaxspec.regions import PrefillRegion


def _run(op, pool, layer, new, region):
    return op(new, pool, layer, region)


def fresh_region(seqs, length):
    """Prompts of one length, from their first token on."""
    slots, zeros = 1 + jnp.arange(seqs, dtype=jnp.int32), jnp.zeros(seqs, jnp.int32)
    start = length * jnp.arange(seqs + 1, dtype=jnp.int32)
    return PrefillRegion(slots, num_computed=zeros, query_start=start, state_offset=zeros)


def gdn_prefill_cases() -> Iterator[Case]:
    """Prompts of one length, as in the published figures of other kernels."""
    for model, shape in GDN.items():
        for seqs, length in ((1, 2048), (1, 8192), (8, 4096)):
            if model == "qwen3.5-9b" or length == 8192:
                yield _gdn_prefill_case(model, shape, seqs, length)
    for model, shape in KDA.items():
        for seqs, length in ((1, 2048), (1, 8192), (8, 4096)):
            yield _gdn_prefill_case(model, shape, seqs, length, by_channel=True)


def _gdn_prefill_case(model, shape, seqs, length, *, by_channel=False):
    tokens, dtype = seqs * length, jnp.bfloat16
    keys = jax.random.split(jax.random.key(0), 6)
    key = (tokens, shape.key_heads, shape.key_dim)
    value = (tokens, shape.value_heads, shape.value_dim)
    q, k = (jax.random.normal(x, key) for x in keys[:2])
    q, k = (x / jnp.linalg.norm(x, axis=-1, keepdims=True) for x in (q, k))
    # In 16 bits already: in a model the rounding is fused into the kernel before.
    q, k = (q * shape.key_dim**-0.5).astype(dtype), k.astype(dtype)
    v = jax.random.normal(keys[2], value).astype(dtype)
    decays = (*value[:2], shape.key_dim) if by_channel else value[:2]
    g = -0.1 * jax.random.exponential(keys[3], decays)
    beta = jax.random.uniform(keys[4], value[:2])
    new = GdnTokens(q, k, v, g, beta)
    state = (shape.value_heads, shape.value_dim, shape.key_dim)

    return Case(
        op="gdn_prefill",
        about=about(model, shape, "bfloat16", seqs=seqs, length=length),
        run=functools.partial(_run, gdn_prefill),
        # The specification, token by token, would take minutes.
        reference=functools.partial(_run, gdn_prefill_xla),
        pool=lambda layers: jnp.zeros((layers, 1 + seqs, 1, *state)),
        layer_bytes=4 * seqs * math.prod(state),
        operands=(new, fresh_region(seqs, length)),
        total_bytes=sum(x.nbytes for x in new) + 4 * math.prod(value) + 4 * seqs * math.prod(state),
        calls=FEW,
    )


def mamba2_prefill_cases() -> Iterator[Case]:
    """The prompts of `gdn_prefill` for Nemotron-3-Nano, and one for Nemotron-H-8B."""
    for seqs, length in ((1, 2048), (1, 8192), (8, 4096)):
        yield _mamba2_prefill_case("nemotron-3-nano", seqs, length)
    yield _mamba2_prefill_case("nemotron-h-8b", 1, 8192)


def _mamba2_prefill_case(model, seqs, length):
    shape, tokens = MAMBA2[model], seqs * length
    new = mamba2_tokens(shape, tokens)
    state = (shape.heads, shape.head_dim, shape.state_dim)

    return Case(
        op="mamba2_prefill",
        about=about(model, shape, "bfloat16", seqs=seqs, length=length),
        run=functools.partial(_run, mamba2_prefill),
        # The specification, token by token, would take minutes.
        reference=functools.partial(_run, mamba2_prefill_xla),
        pool=lambda layers: jnp.zeros((layers, 1 + seqs, 1, *state)),
        layer_bytes=4 * seqs * math.prod(state),
        operands=(new, fresh_region(seqs, length)),
        total_bytes=sum(y.nbytes for y in new) + 4 * new.x.size + 4 * seqs * math.prod(state),
        calls=FEW,
    )


def mamba2_tokens(shape, *batch):
    """Tokens as a layer makes them, for rows or flat."""
    keys = jax.random.split(jax.random.key(0), 5)
    x = jax.random.normal(keys[0], (*batch, shape.heads, shape.head_dim), jnp.bfloat16)
    dt = 0.1 * jax.random.uniform(keys[1], (*batch, shape.heads))
    a = -16 * jax.random.uniform(keys[2], (shape.heads,))
    shared = (*batch, shape.groups, shape.state_dim)
    b, c = (jax.random.normal(key, shared, jnp.bfloat16) for key in keys[3:])
    return Mamba2Tokens(x, dt, a, b, c, jnp.ones(shape.heads))
