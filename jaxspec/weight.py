"""Representations of weight matrices, which layers own and pass to every matmul whole.

An op may select its kernel by `type(weight)`, as it does by the number of rows. This happens while
a program is traced, so the compiled program has only the weight's arrays as inputs.

`terms` of published weights in 8 bits is the number of e4m3 numbers whose sum an activation is: two
are exact for 16 bits, and one is the activation rounded. It is data of the weight, and static.
"""

import math

import flax.struct
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jaxtyping import Array, Float, Int

PUBLISHED_BLOCK = 128  # columns and features with one scale in published matrices
SCALED_COLUMNS = 64  # columns with one scale in `Float8Blocks`
PACKED = 32  # features between the four numbers of a word in matrices of 4 bits
PACKED_UNIT = 4 * PACKED  # features that are packed together
INT4_GROUPS = 128, 64, 32  # features with one scale in `Int4Groups`, from the largest on
FLOAT4_GROUP = 16  # features with one scale in `Float4Groups`
INT4_ZERO = 8  # the zero point of `Int4Groups` without zero points
_PLACES = np.array([0, 4, 8, 12], np.uint16).reshape(1, 1, 4, 1)  # of a word's numbers
E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6)  # values of FP4


@flax.struct.dataclass
class Dense:
    """A matrix in the dtype of the activations.

    Stored as `[inner, outer]` for `x @ array`, the transpose of the checkpoint's layout.
    """

    array: Float[Array, "inner outer"]

    @property
    def inner(self) -> int:
        """Size of the contracted axis."""
        return self.array.shape[0]

    @property
    def outer(self) -> int:
        """Number of output columns."""
        return self.array.shape[1]

    @property
    def dtype(self) -> jnp.dtype:
        return self.array.dtype

    def columns(self, ids: Int[Array, " ids"]) -> "Dense":
        """Copy the columns `ids` (int32, all in range) to a new weight."""
        return Dense(self.array[:, ids])


class _Published:
    """One matrix or a stack of them, `[..., outer, inner]`: the layout of checkpoints."""

    array: Float[Array, "*experts outer inner"]

    @property
    def inner(self) -> int:
        """Size of the contracted axis."""
        return self.array.shape[-1]

    @property
    def outer(self) -> int:
        """Number of output columns."""
        return self.array.shape[-2]

    @property
    def dtype(self) -> jnp.dtype:
        return self.array.dtype


class _Scaled(_Published):
    """The same with scales."""

    scale: Array

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(map(_bytes, jax.tree.leaves(self)))


@flax.struct.dataclass
class Float8(_Scaled):
    """A matrix in float8_e4m3fn: half the bytes of bfloat16, with 3 mantissa bits.

    Stored as `[outer, inner]`, the 8-bit layout of tensor cores. One power of two scales the whole
    matrix; entries down to 1/8192 of the largest keep all mantissa bits.
    """

    array: Float[Array, "outer inner"]
    scale: Float[Array, ""]  # the weight is `(scale * array).T`

    @staticmethod
    def of(weight: Dense) -> "Float8":
        """Round `weight` to 8 bits, in a copy; all entries may be NaN if one is not finite."""
        return Float8(*_float8_of(weight.array))

    def columns(self, ids: Int[Array, " ids"]) -> "Float8":
        """Copy the columns `ids` (int32, all in range) to a new weight."""
        return Float8(self.array[ids], self.scale)

    def dense(self) -> Dense:
        """Return the weight in float32."""
        return Dense(self.scale * self.array.T.astype(jnp.float32))


@flax.struct.dataclass
class Float8Blocks(_Scaled):
    """A published matrix in float8_e4m3fn, with a scale for each 64 columns and 128 features.

    Stored as `[outer, inner]`, the checkpoint's layout. Published blocks have 128 columns; half of
    that is held because the parts of a fused matrix may begin at any multiple of 64. Scales beyond
    the last column or feature belong to partial blocks. A rounded activation has a scale for each
    row's 128 features.
    """

    array: Float[Array, "outer inner"]
    scale: Float[Array, "rows columns"]  # float32
    terms: int = flax.struct.field(pytree_node=False, default=2)

    def columns(self, ids: Int[Array, " ids"]) -> Dense:
        """Copy the columns `ids` (int32, all in range) to a new weight in float32.

        Neighbours then have different scales, so no block has one.
        """
        scale = self.scale[ids // SCALED_COLUMNS]
        return Dense(_dequantised(self.array[ids], scale).T)

    def dense(self, start: int = 0, count: int | None = None) -> Dense:
        """Return up to `count` columns from `start` in float32, by default all.

        Both are multiples of 64.
        """
        stop = self.outer if count is None else min(start + count, self.outer)
        scale = self.scale[start // SCALED_COLUMNS : -(-stop // SCALED_COLUMNS)]
        array = self.array[start:stop]
        by_column = jnp.repeat(scale, SCALED_COLUMNS, axis=0)[: array.shape[0]]
        return Dense(_dequantised(array, by_column).T)


@flax.struct.dataclass
class Float8Rows(_Scaled):
    """A published matrix in float8_e4m3fn, with a scale for each column.

    Stored as `[outer, inner]`, the checkpoint's layout, whose rows are the columns. A scale per
    matrix, or per part of a fused one, is repeated. A rounded activation has a scale for each row.
    """

    array: Float[Array, "outer inner"]
    scale: Float[Array, " outer"]  # float32
    terms: int = flax.struct.field(pytree_node=False, default=2)

    def columns(self, ids: Int[Array, " ids"]) -> "Float8Rows":
        """Copy the columns `ids` (int32, all in range) to a new weight."""
        return Float8Rows(self.array[ids], self.scale[ids], self.terms)

    def dense(self, start: int = 0, count: int | None = None) -> Dense:
        """Return up to `count` columns from `start` in float32, by default all."""
        stop = self.outer if count is None else start + count
        array = self.array[start:stop].astype(jnp.float32)
        return Dense((array * self.scale[start:stop, None]).T)


class _FourBits(_Scaled):
    """A published matrix `[outer, inner]` in 4 bits, four numbers in a word of 16 bits.

    Of each 128 features, word `i` of a column has the numbers `i`, `32 + i`, `64 + i` and `96 + i`,
    from its low bits to its high bits (`pack`). Scales are stored as `[groups, outer]`.
    """

    array: Int[Array, "outer words"]

    @property
    def inner(self) -> int:
        """Size of the contracted axis."""
        return 4 * self.array.shape[1]

    @property
    def group(self) -> int:
        """Number of features with one scale."""
        return self.inner // self.scale.shape[0]

    def _some(self, start, count):
        """Return some columns' stored numbers and float32 scales, and the slice of these columns.

        The numbers and the scales are `[columns, inner]`.
        """
        columns = slice(start, self.outer if count is None else start + count)
        scale = self.scale[:, columns].astype(jnp.float32).T
        return _unpacked(self.array[columns]), jnp.repeat(scale, self.group, axis=1), columns


@flax.struct.dataclass
class Int4Groups(_FourBits):
    """A published matrix of integers from 0 to 15, less a zero point, times a scale.

    Each group of features of a column (`INT4_GROUPS`) has a scale, and a zero point or that of all
    groups, 8.
    """

    array: Int[Array, "outer words"]  # uint16
    scale: Float[Array, "groups outer"]  # float32
    zero: Int[Array, "groups outer"] | None = None  # uint8

    def dense(self, start: int = 0, count: int | None = None) -> Dense:
        """Return up to `count` columns from `start` in float32, by default all."""
        numbers, scale, columns = self._some(start, count)
        if self.zero is None:
            zero = jnp.float32(INT4_ZERO)
        else:
            zero = jnp.repeat(self.zero[:, columns].T, self.group, axis=1).astype(jnp.float32)
        return Dense(((numbers.astype(jnp.float32) - zero) * scale).T)


@flax.struct.dataclass
class Float4Groups(_FourBits):
    """A published matrix in FP4 (E2M1) with a scale for each 16 features, and one per column.

    NVFP4 has one factor for a matrix, which is repeated: parts of a fused matrix have their own.
    """

    array: Int[Array, "outer words"]  # uint16
    scale: Float[Array, "groups outer"]  # float8_e4m3fn
    factor: Float[Array, " outer"]  # float32

    def dense(self, start: int = 0, count: int | None = None) -> Dense:
        """Return up to `count` columns from `start` in float32, by default all."""
        numbers, scale, columns = self._some(start, count)
        values = jnp.asarray(E2M1, jnp.float32)[numbers]
        return Dense((values * scale * self.factor[columns, None]).T)


class _Experts(_Published):
    """One matrix per expert of a layer."""

    @property
    def num_experts(self) -> int:
        """Number of experts, including the slices of a shared expert."""
        return self.array.shape[0]


@flax.struct.dataclass
class DenseExperts(_Experts):
    """One matrix per expert of a layer, in the dtype of the activations.

    Stored as `[outer, inner]`, the checkpoint's layout, which the kernels read without a transpose.
    """

    array: Float[Array, "experts outer inner"]


@flax.struct.dataclass
class InputsFirstExperts(DenseExperts):
    """The same, stored as `[inner, outer]` (gpt-oss in 16 bits), which no kernel reads."""

    array: Float[Array, "experts inner outer"]

    @property
    def inner(self) -> int:
        return self.array.shape[1]

    @property
    def outer(self) -> int:
        return self.array.shape[2]


class _ScaledExperts(_Experts, _Scaled):
    """The same in 8 bits, with float32 scales."""

    def _some(self, start, count):
        """Return `count` matrices in float32, and their scales."""
        array = lax.dynamic_slice_in_dim(self.array, start, count)
        return array.astype(jnp.float32), lax.dynamic_slice_in_dim(self.scale, start, count)


@flax.struct.dataclass
class Float8BlockExperts(_ScaledExperts):
    """Published matrices in float8_e4m3fn, with a scale for each 64 columns and 128 features.

    One matrix per expert, stored as `[outer, inner]`; its scales are those of `Float8Blocks`.
    """

    array: Float[Array, "experts outer inner"]
    scale: Float[Array, "experts rows columns"]  # float32
    terms: int = flax.struct.field(pytree_node=False, default=2)

    def dense(self, start: Int[Array, ""] | int = 0, count: int | None = None) -> DenseExperts:
        """Return `count` experts from `start` in float32, by default all."""
        array, scale = self._some(start, self.num_experts if count is None else count)
        by_column = jnp.repeat(scale, SCALED_COLUMNS, axis=1)[:, : self.outer]
        by_feature = jnp.repeat(by_column, PUBLISHED_BLOCK, axis=2)[..., : self.inner]
        return DenseExperts(array * by_feature)


@flax.struct.dataclass
class Float8RowExperts(_ScaledExperts):
    """Published matrices in float8_e4m3fn, with a scale for each column.

    One matrix per expert, stored as `[outer, inner]`; its scales are those of `Float8Rows`.
    """

    array: Float[Array, "experts outer inner"]
    scale: Float[Array, "experts outer"]  # float32
    terms: int = flax.struct.field(pytree_node=False, default=2)

    def dense(self, start: Int[Array, ""] | int = 0, count: int | None = None) -> DenseExperts:
        """Return `count` experts from `start` in float32, by default all."""
        array, scale = self._some(start, self.num_experts if count is None else count)
        return DenseExperts(array * scale[:, :, None])


Published8Bit = Float8Blocks | Float8Rows
Published4Bit = Int4Groups | Float4Groups
Published = Published8Bit | Published4Bit
Weight = Dense | Float8 | Published
Published8BitExperts = Float8BlockExperts | Float8RowExperts
ExpertsWeight = DenseExperts | Published8BitExperts


@flax.struct.dataclass
class Columns:
    """Matrices side by side, such as columns in 8 bits and columns in 16."""

    parts: tuple[Weight, ...]

    @property
    def inner(self) -> int:
        """Size of the contracted axis."""
        return self.parts[0].inner

    @property
    def outer(self) -> int:
        """Number of output columns."""
        return sum(part.outer for part in self.parts)


def to_float8(
    array: Float[Array, "..."], axis: int | None = None
) -> tuple[Float[Array, "..."], Float[Array, "..."]]:
    """Return `array` in float8_e4m3fn and its scale, a power of two, per array or along `axis`.

    The largest number is scaled to 128 to 256; the format's maximum is 448. A number that is not
    finite becomes NaN, and all numbers with the same scale may do so.
    """
    numbers = array.astype(jnp.float32)
    _, exponent = jnp.frexp(jnp.max(jnp.abs(numbers), axis, keepdims=axis is not None))
    scale = jnp.ldexp(jnp.float32(1), exponent - 8)
    return (numbers / scale).astype(jnp.float8_e4m3fn), scale


def pack(numbers: np.ndarray) -> np.ndarray:
    """Pack numbers from 0 to 15, uint8 `[outer, inner]`, as `Int4Groups` stores them.

    `inner` is a multiple of `PACKED_UNIT`.
    """
    outer, inner = numbers.shape
    quarters = numbers.reshape(outer, inner // PACKED_UNIT, 4, PACKED)
    low, high = (quarters[:, :, i] | quarters[:, :, i + 1] << 4 for i in (0, 2))
    return (low | high.astype(np.uint16) << 8).reshape(outer, inner // 4)


@jax.jit  # one kernel each for scale and bytes, without temporaries of the array's size
def _float8_of(array):
    transposed, scale = to_float8(array.T)
    return transposed, scale


def _dequantised(array, scale):
    """Return `array` in float32, each row times its scales of 128 features."""
    by_feature = jnp.repeat(scale, PUBLISHED_BLOCK, axis=1)[:, : array.shape[1]]
    return array.astype(jnp.float32) * by_feature


def _unpacked(array):
    """Undo `pack`."""
    outer, words = array.shape
    quarters = array.reshape(outer, words // PACKED, 1, PACKED) >> _PLACES & 15
    return quarters.reshape(outer, 4 * words)


def _bytes(array):
    return math.prod(array.shape) * array.dtype.itemsize
