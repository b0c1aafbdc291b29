"""Published matrices in 8 bits, and what NumPy makes of them in float64."""

import jax.numpy as jnp
import numpy as np
from products import NAN_ROW, check

from benchmarks.measure.shapes import GDN, HIDDEN, INTERMEDIATE
from jaxspec.pallas.matmul.float8_terms import CHUNK, Terms, rounded, split
from jaxspec.pallas.norm.gated_norm import GatedNorm
from jaxspec.weight import Float8Blocks, Float8Rows


def published(outer, inner, seed=0):
    """A matrix in float8_e4m3fn and its scales, which differ by a factor of 20 and more."""
    rng = np.random.default_rng((seed, outer, inner))
    array = jnp.asarray(rng.normal(size=(outer, inner)) * 60, jnp.float32)
    scale = np.exp(1.5 * rng.normal(size=(-(-outer // 128), -(-inner // 128)))) * inner**-0.5 / 60
    return array.astype(jnp.float8_e4m3fn), jnp.asarray(scale, jnp.float32)


def blocks_of(inner, *outers):
    """A weight of parts with so many columns, and their published matrices and scales."""
    parts = [published(outer, inner, seed) for seed, outer in enumerate(outers)]
    return joined(parts), parts


def joined(parts, terms=2):
    """Published matrices side by side, each with its scales, held for 64 columns."""
    scales = [
        jnp.repeat(scale, 2, axis=0)[: -(-array.shape[0] // 64)].astype(jnp.float32)
        for array, scale in parts
    ]
    array = jnp.concatenate([array for array, _ in parts])
    return Float8Blocks(array, jnp.concatenate(scales), terms)


def rows_of(inner, outer):
    array, _ = published(outer, inner)
    scale = np.exp(np.random.default_rng(outer).normal(size=outer)) * inner**-0.5
    return Float8Rows(array, jnp.asarray(scale, jnp.float32))


def dequantised(parts):
    """`[inner, outer]` in float64, an entry's scale found by its place in its own part."""
    matrices = []
    for array, scale in parts:
        rows, columns = (np.arange(size) // 128 for size in array.shape)
        wide = np.asarray(array.astype(jnp.float32), np.float64)
        matrices.append(wide * np.asarray(scale, np.float64)[rows[:, None], columns])
    return np.concatenate(matrices).T


def dequantised_rows(weight):
    wide = np.asarray(weight.array.astype(jnp.float32), np.float64)
    return (wide * np.asarray(weight.scale, np.float64)[:, None]).T


def rows_with_nan(tokens, inner):
    """Rows of very different sizes, some features 200 times as large, one row with a NaN."""
    rng = np.random.default_rng(inner)
    x = rng.normal(size=(tokens, inner)) * np.exp(2 * rng.normal(size=(tokens, 1)))
    x[:, rng.integers(0, inner, 3)] *= 200
    x[NAN_ROW : NAN_ROW + 1, inner // 3] = np.nan
    return jnp.asarray(x, jnp.bfloat16)


def assert_is_product(y, x, matrix):
    """`y`, in parts or not, is `x @ matrix`: up to float32 sums, or rounded to bfloat16."""
    dtype = y.dtype
    y = np.asarray(y, np.float64)
    y, expected = y.sum(axis=0) if y.ndim == 3 else y, np.asarray(x, np.float64) @ matrix
    largest = np.nanmax(np.abs(expected), axis=1, keepdims=True, initial=1e-300)
    check(y / largest, expected / largest, dtype, roundings=4 if dtype == jnp.float32 else 1)


def gated_heads_of(tokens, heads, first):
    rng = np.random.default_rng(heads)
    x = rng.normal(size=(tokens, heads, 128)) * np.exp(rng.normal(size=(tokens, heads, 1)))
    x[NAN_ROW : NAN_ROW + 1, :, 40] = np.nan
    gates = np.full((tokens, first + heads * 128 + 64), np.nan)
    gates[:, first : first + heads * 128] = 3 * rng.normal(size=(tokens, heads * 128))
    weight = jnp.asarray(rng.normal(size=128), jnp.float32)
    norm = GatedNorm(jnp.asarray(gates, jnp.bfloat16), weight, first=first, eps=1e-6)
    return jnp.asarray(x, jnp.float32), norm


def terms_of(x, terms):
    """The `Terms` of the split kernel, by XLA; NaN of padding must not spread."""
    x = jnp.pad(x, ((0, -x.shape[0] % 8), (0, 0)), constant_values=jnp.nan)
    tokens, inner = x.shape
    chunks = x.astype(jnp.float32).reshape(tokens * inner // CHUNK, CHUNK)
    *numbers, factor = split(chunks) if terms == 2 else rounded(chunks)
    factors = factor.reshape(tokens, inner // CHUNK).T
    return Terms(tuple(number.reshape(x.shape) for number in numbers), factors)


def matmuls_of_layer(model):
    """Inner, outer and whether parts are allowed, of each matmul of a layer."""
    hidden, inner, shape = HIDDEN[model], INTERMEDIATE[model], GDN[model]
    values = shape.value_heads * shape.value_dim
    yield hidden, shape.conv_dim + values, False
    yield values, hidden, True
    yield hidden, 2 * inner, False
    yield inner, hidden, True


def inverted_scale(weight):
    return Float8Blocks(weight.array, 1 / weight.scale)


def scale_of_the_next_columns(weight):
    return Float8Blocks(weight.array, jnp.roll(weight.scale, 1, axis=0))


def scale_of_the_next_features(weight):
    return Float8Blocks(weight.array, jnp.roll(weight.scale, 1, axis=1))


SCALE_BUGS = inverted_scale, scale_of_the_next_columns, scale_of_the_next_features
"""They make another matrix of one in blocks, as a kernel would that read other scales."""
