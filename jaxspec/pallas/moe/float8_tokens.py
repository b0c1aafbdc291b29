"""Activations of experts in FP8, as the kernels read them."""

from math import prod

import flax.struct
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Float, Int

from jaxspec.pallas.matmul.float8_terms import CHUNK, LOW, split
from jaxspec.weight import Float8BlockExperts, Published8BitExperts

_LARGEST = 448.0  # of float8_e4m3fn
_SMALLEST_NORMAL, _STEP = 2.0**-6, 2.0**-9  # smaller numbers are multiples of the step
_MANTISSA_BITS = 3


@flax.struct.dataclass
class Float8Tokens:
    """Rows of activations in float8_e4m3fn, each padded with zeros to whole chunks.

    A chunk has 128 features. With `factor` that of a row's chunk, an activation is

        factor * (high + low / 16)    exactly, with two terms (`float8.split`)
        factor * high                 rounded, with one
    """

    numbers: Float[Array, "*tiles rows numbers"]  # all high numbers of a row, then all low ones
    factors: Float[Array, "*tiles chunks rows"]  # float32
    terms: int = flax.struct.field(pytree_node=False)

    @staticmethod
    def of(x: Float[Array, "*tiles rows features"], weight: Published8BitExperts) -> "Float8Tokens":
        """Return `x` in the terms of `weight`."""
        terms, factors = _terms(x, weight)
        flat = (*x.shape[:-1], factors.shape[-1] * CHUNK)
        numbers = [term.astype(jnp.float8_e4m3fn).reshape(flat) for term in terms]
        joined = jnp.concatenate(numbers, axis=-1)
        return Float8Tokens(joined, jnp.swapaxes(factors, -1, -2), weight.terms)

    def in_tiles(
        self, numbers: Float[Array, "tiles rows numbers"], tokens: Int[Array, "tiles rows"]
    ) -> "Float8Tokens":
        """Return tiles of `numbers`, with the factors of the tokens in them.

        A place without a token may have any number, and then any factors.
        """
        factors = jnp.take(self.factors.T, tokens, axis=0, mode="clip")
        return Float8Tokens(numbers, jnp.swapaxes(factors, -1, -2), self.terms)


def as_multiplied(
    x: Float[Array, "rows features"], weight: Published8BitExperts
) -> Float[Array, "rows features"]:
    """Return `x` in float32, rounded as it is for a matmul with `weight`: not at all by default."""
    if weight.terms > 1:
        return x.astype(jnp.float32)
    (high, *_), factors = _terms(x, weight)
    return (high * factors[..., None]).reshape(len(x), prod(high.shape[1:]))[:, : x.shape[1]]


def _terms(x, weight):
    """Return float32 terms `[..., rows, chunks, 128]`, representable in e4m3, and their factors."""
    *rows, features = x.shape
    padding = [(0, 0)] * len(rows) + [(0, -features % CHUNK)]
    padded = jnp.pad(x.astype(jnp.float32), padding)
    chunks = padded.reshape(*rows, padded.shape[-1] // CHUNK, CHUNK)
    if weight.terms == 1:
        factors = _rounding_factors(chunks, isinstance(weight, Float8BlockExperts))
    else:
        *_, factors = split(chunks.reshape(prod(chunks.shape[:-1]), CHUNK))
        factors = factors.reshape(chunks.shape[:-1])
    scaled = chunks / factors[..., None]
    # A conversion of infinity could saturate instead.
    high = jnp.where(jnp.isinf(scaled), jnp.nan, _rounded(scaled))
    if weight.terms == 1:
        return (high,), factors
    return (high, _rounded((scaled - high) * (1 / LOW))), factors


def _rounding_factors(chunks, by_chunk):
    """Return the factors with which the largest number of a chunk, or of a row, becomes 448."""
    largest = jnp.max(jnp.abs(chunks), axis=-1 if by_chunk else (-1, -2))
    factors = jnp.where(largest == 0, 1.0, largest / _LARGEST)
    return factors if by_chunk else jnp.broadcast_to(factors[..., None], chunks.shape[:-1])


def _rounded(x):
    """Round float32 numbers to those of e4m3. XLA removes a conversion to 8 bits and back."""
    subnormal = jnp.round(x / _STEP) * _STEP
    normal = lax.reduce_precision(x, exponent_bits=8, mantissa_bits=_MANTISSA_BITS)
    return jnp.where(jnp.abs(x) < _SMALLEST_NORMAL, subnormal, normal)
