"""The cases of the residual add and its norm; `table.OPS` lists them."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.kernels.case import Case
from benchmarks.measure.shapes import HIDDEN
from jaxspec.pallas.norm.add_norm import add_norm, add_norm_reference
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
