"""The cases of the residual add and its norm, and of Mamba2's; `table.OPS` lists them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import INPUTS, Case, about
from benchmarks.measure.shapes import HIDDEN, MAMBA2
from jaxspec.pallas.norm.add_norm import add_norm, add_norm_reference
from jaxspec.pallas.norm.gated_group_norm import GatedGroupNorm, gated_group_norm_reference
from jaxspec.pallas.norm.rms_norm import Norm


def add_norm_cases() -> Iterator[Case]:
    """The rows of a decode step of Qwen3.5-9B and of a prompt; the other models at one size."""
    for model, features in HIDDEN.items():
        for tokens in (256, 64, 8, 1, 8192):
            if model == "qwen3.5-9b" or tokens == 256:
                yield _case(model, features, tokens, jnp.dtype("bfloat16"))
    yield _case("qwen3.5-9b", HIDDEN["qwen3.5-9b"], 256, jnp.dtype("float32"))
    for tokens in (1, 64, 256):
        yield _case("nemotron-3-nano", 2688, tokens, jnp.dtype("bfloat16"))


def _case(model, features, tokens, dtype):
    """A call adds the output of the one before; few rows of it are in the cache, as in a model."""
    stream = jax.random.normal(jax.random.key(0), (tokens, features)).astype(dtype)
    weight = jnp.ones(features, dtype)

    def run(op, pool, layer, weight):
        stream, normed = op(*pool, Norm(weight, 1e-6))
        return (), (stream, normed)

    return Case(
        op="add_norm",
        about={"model": model, "features": features, "dtype": dtype.name, "rows": tokens},
        run=functools.partial(run, add_norm),
        reference=functools.partial(run, add_norm_reference),
        pool=lambda layers: (stream + jnp.zeros((), dtype), stream[::-1]),
        layer_bytes=4 * stream.nbytes,
        operands=(weight,),
        total_bytes=4 * stream.nbytes + weight.nbytes,
    )


def gated_group_norm_cases() -> Iterator[Case]:
    """Groups of 512 features in Nemotron-3-Nano, one of 5,120 in mamba2-2.7b."""
    for tokens in (256, 64, 8, 1):
        yield _group_case("nemotron-3-nano", tokens)
    yield _group_case("nemotron-h-8b", 64)
    for tokens in (64, 1):
        yield _group_case("mamba2-2.7b", tokens)


def _group_case(model, tokens):
    """A call's gates, heads and weight are others than those of the call before."""
    shape, dtype = MAMBA2[model], jnp.dtype("bfloat16")
    features = shape.heads * shape.head_dim
    keys = jax.random.split(jax.random.key(0), 2 * INPUTS)
    heads, gates = (
        tuple(jax.random.normal(key, size).astype(kind) for key in keys[first::2])
        for first, size, kind in (
            (0, (tokens, shape.heads, shape.head_dim), jnp.float32),
            (1, (tokens, shape.projected), dtype),
        )
    )

    def run(norm, pool, layer, heads, gates, weight):
        which = layer % INPUTS
        about_norm = {"first": shape.conv_dim, "groups": shape.groups, "eps": 1e-5}
        return norm(GatedGroupNorm(gates[which], weight, **about_norm), heads[which]), pool

    def op(norm, heads):
        return norm(heads)

    def reference(norm, heads):
        return gated_group_norm_reference(norm, heads.reshape(tokens, features))

    moved = tokens * features * (4 + 2 * dtype.itemsize)
    return Case(
        op="gated_group_norm",
        about=about(model, shape, dtype, rows=tokens),
        run=functools.partial(run, op),
        reference=functools.partial(run, reference),
        pool=lambda layers: (),
        layer_bytes=moved,
        operands=(heads, gates, jnp.ones(features)),
        total_bytes=moved + 4 * features,
        writes=False,
    )
