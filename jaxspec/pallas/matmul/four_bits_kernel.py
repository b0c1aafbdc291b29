"""Kernel of matmuls with published weights in 4 bits (Pallas, Mosaic GPU).

A block has some rows, 64 columns of the weight for each warpgroup that multiplies, and all or part
of the features. One warp copies 256 features at a time into a ring: bytes of the weight, their
scales and zero points, and the rows. The other warpgroups make bfloat16 numbers of the bytes, which
are the operand in registers of wgmma, transposed as in `gemm_kernel`. A sum of products of integers
over a group is scaled and added in float32; numbers in FP4 are scaled before.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.matmul.four_bits import FEATURES, FEW_ROWS, FourBitsTiling
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import FLOAT4_GROUP, INT4_ZERO, PACKED, PACKED_UNIT, Int4Groups

_TILE_ROWS = 8
_MAX_STAGES = 16
_RESERVED = 10240  # bytes of barriers, and for rounding up allocations
_REGISTERS = 240, 24  # registers per thread that multiplies, or copies, with two warpgroups
_BYTES = FEATURES // 2  # of a column in a stage
# The bfloat16 number with these bits and an integer below 128 is 128 plus that integer.
_MAGIC, _MAGIC_VALUE = 0x4300, 128
# Exponent and mantissa of FP4 at their places in bfloat16, with these bits, are a quarter of the
# number if that is 1 or more, and 1/8 and 3/16 in place of 0 and 1/8 for the two numbers below.
_EXPONENT, _FACTOR = 0x3E00, 4


@functools.partial(jax.jit, static_argnames=("is_split", "tiling", "interpret"))
def four_bits_kernel(x, weight, *, is_split=False, tiling=None, interpret=None):
    """Return `x @ weight` in the dtype of `x`, or float32 partial sums over several parts."""
    tokens, outer = x.shape[0], weight.outer
    tiling = tiling or FourBitsTiling.of(tokens, weight, is_split=is_split)
    dtype = x.dtype if tiling.parts == 1 else jnp.dtype(jnp.float32)
    block = _Block.of(weight, tiling, dtype, is_interpreted=interpret is not None)
    # Tiles have 8 rows, and Mosaic requires whole ones of an array that has more rows.
    padded = tokens if tokens < _TILE_ROWS else -(-tokens // _TILE_ROWS) * _TILE_ROWS
    x = jnp.pad(x, ((0, padded - tokens), (0, 0)))
    operands = x, weight.array, weight.scale
    operands += (weight.zero,) if block.has_zeros else ()
    operands += () if block.is_integer else (weight.factor,)

    def body(*refs, **scratch):
        *others, y = refs
        last = others[3] if len(others) > 3 else None
        x, numbers, scale = others[:3]
        block.run(_Operands(x, numbers, scale, last, y), _Buffers(**scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name="int4_matmul" if block.is_integer else "float4_matmul",
        out_type=jax.ShapeDtypeStruct((tiling.parts, padded, outer), dtype),
        scratch_types=block.scratch(),
        grid=(tiling.parts, outer // tiling.width, tiling.row_blocks),
        grid_names=("part", "column", "row"),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    y = kernel(*operands)[:, :tokens]
    return y[0] if tiling.parts == 1 else y


class _Operands(NamedTuple):
    x: Any
    weight: Any
    scale: Any
    last: Any  # zero points of integers or None; factors of numbers in FP4
    y: Any


class _Buffers(NamedTuple):
    """Shared memory of a block; `filled` and `freed` have a barrier for each stage of the ring."""

    weight: Any
    x: Any
    scale: Any
    zero: Any  # None without zero points
    filled: Any
    freed: Any
    out: Any
    spare: Any  # of the interpreter (`tensor_cores`)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the kernel: its sizes, and what its warpgroups do."""

    tiling: FourBitsTiling
    is_integer: bool
    has_zeros: bool
    group: int
    all_stages: int  # of all features
    stages: int  # of the ring
    dtype: Any  # of the output
    is_interpreted: bool

    @staticmethod
    def of(weight, tiling, dtype, *, is_interpreted):
        """Return the block with as many stages as fit beside its output."""
        is_integer = isinstance(weight, Int4Groups)
        has_zeros = is_integer and weight.zero is not None
        groups, width = FEATURES // weight.group, tiling.width
        per_scale = weight.scale.dtype.itemsize + has_zeros
        stage = _BYTES * width + 2 * FEATURES * tiling.rows + per_scale * groups * width
        held = width * tiling.rows * jnp.dtype(dtype).itemsize + _RESERVED
        all_stages = pl.cdiv(weight.inner, FEATURES)
        # The registers of more rows are too many for two blocks on a multiprocessor.
        blocks = tiling.blocks(weight.outer) if tiling.rows <= FEW_ROWS else 1
        stages = min((device.room(blocks) - held) // stage, _MAX_STAGES)
        return _Block(
            tiling, is_integer, has_zeros, weight.group, all_stages, stages, dtype, is_interpreted
        )

    @property
    def piece(self) -> int:
        """Features of an operand of wgmma."""
        return min(self.group, PACKED) if self.is_integer else PACKED

    def scratch(self):
        width, rows, stages = self.tiling.width, self.tiling.rows, self.stages
        tiles = plgpu.TilingTransform((8, self.piece)), plgpu.SwizzleTransform(2 * self.piece)
        # Mosaic requires whole tiles of an array, and 2688 features have an odd number of these.
        packed = plgpu.TilingTransform((8, PACKED)), plgpu.SwizzleTransform(PACKED)
        scales = stages, FEATURES // self.group, width
        scale = jnp.float32 if self.is_integer else jnp.float8_e4m3fn
        spare = tensor_cores.tile(self.tiling.warpgroups, BLOCK_N, PACKED)
        return {
            "weight": plgpu.SMEM((stages, width, _BYTES), jnp.uint8, transforms=packed),
            "x": plgpu.SMEM((stages, rows, FEATURES), jnp.bfloat16, transforms=tiles),
            "scale": plgpu.SMEM(scales, scale),
            "zero": plgpu.SMEM(scales, jnp.uint8) if self.has_zeros else None,
            "filled": plgpu.Barrier(num_arrivals=3 + self.has_zeros, num_barriers=stages),
            "freed": plgpu.Barrier(num_arrivals=self.tiling.warpgroups, num_barriers=stages),
            "out": tensor_cores.tile(self.tiling.warpgroups, rows, BLOCK_N, dtype=self.dtype),
            "spare": spare if self.is_interpreted else None,
        }

    def run(self, operands, buffers):
        """Run the block: the last warpgroup copies, the others multiply."""
        warpgroup, part = lax.axis_index("warpgroup"), lax.axis_index("part")
        first, end = (lax.div((part + i) * self.all_stages, self.tiling.parts) for i in range(2))
        is_copying, has_two = warpgroup == self.tiling.warpgroups, self.tiling.warpgroups > 1

        @pl.when(is_copying)
        def _():
            if has_two:
                plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self._copy(first, end - first, operands, buffers)

        @pl.when(jnp.logical_not(is_copying))
        def _():
            if has_two:
                plgpu.set_max_registers(_REGISTERS[0], action="increase")
            self._multiply(warpgroup, end - first, operands, buffers)

    def _copy(self, first, count, operands, buffers):
        """Fill the ring, each stage once all warpgroups that multiply have freed it."""
        columns = pl.ds(lax.axis_index("column") * self.tiling.width, self.tiling.width)
        rows = pl.ds(lax.axis_index("row") * self.tiling.rows, self.tiling.rows)
        groups = FEATURES // self.group

        def fetch(j, stage):
            is_refill = j >= self.stages
            pl.when(is_refill)(lambda: plgpu.barrier_wait(buffers.freed.at[stage]))
            filled, at = buffers.filled.at[stage], first + j
            part = operands.weight.at[columns, pl.ds(at * _BYTES, _BYTES)]
            plgpu.copy_gmem_to_smem(part, buffers.weight.at[stage], filled)
            part = operands.x.at[rows, pl.ds(at * FEATURES, FEATURES)]
            plgpu.copy_gmem_to_smem(part, buffers.x.at[stage], filled)
            of_groups = pl.ds(at * groups, groups), columns
            plgpu.copy_gmem_to_smem(operands.scale.at[of_groups], buffers.scale.at[stage], filled)
            if self.has_zeros:
                plgpu.copy_gmem_to_smem(operands.last.at[of_groups], buffers.zero.at[stage], filled)
            return access.next_stage(stage, self.stages)

        @plgpu.warp_map  # a single warp: more would repeat the copies and their barrier arrivals
        def _(warp):
            @pl.when(warp == 0)
            def _():
                lax.fori_loop(0, count, fetch, jnp.int32(0))

    def _multiply(self, warpgroup, count, operands, buffers):
        """Sum the products of a warpgroup's columns, and write them."""
        mine = pl.ds(warpgroup * BLOCK_N, BLOCK_N)
        shape = BLOCK_N, self.tiling.rows

        def step(j, carry):
            stage, total = carry
            plgpu.barrier_wait(buffers.filled.at[stage])
            total = self._add_stage(total, warpgroup, mine, stage, buffers)

            @pl.when(j + self.stages < count)
            def _():
                # Loads precede a copy to the same memory, of another proxy, only by such a fence.
                plgpu.commit_smem()
                plgpu.barrier_arrive(buffers.freed.at[stage])

            return access.next_stage(stage, self.stages), total

        zeros = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)
        _, total = lax.fori_loop(0, count, step, (jnp.int32(0), zeros))
        first = lax.axis_index("column") * self.tiling.width + warpgroup * BLOCK_N
        columns = pl.ds(first, BLOCK_N)
        if not self.is_integer:
            factor = access.load(operands.last.at[columns], plgpu.Layout.WGMMA.reduce(1))
            total = total * lax.broadcast_in_dim(factor * _FACTOR, shape, (0,))
        # In this layout a thread holds adjacent columns, which are contiguous in a row of `y`.
        total = plgpu.layout_cast(total.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        tile = buffers.out.at[warpgroup]
        tile.T[...] = total
        plgpu.commit_smem()
        rows = pl.ds(lax.axis_index("row") * self.tiling.rows, self.tiling.rows)
        plgpu.copy_smem_to_gmem(tile, operands.y.at[lax.axis_index("part"), rows, columns])
        plgpu.wait_smem_to_gmem(0)

    def _add_stage(self, total, warpgroup, mine, stage, buffers):
        """Return `total` with the products of a stage's features added."""
        loaded = access.load(buffers.weight.at[stage, mine], plgpu.Layout.WGMMA)
        spare = buffers.spare.at[warpgroup] if self.is_interpreted else None
        tokens = buffers.x.at[stage]
        for first in range(0, FEATURES, self._scaled):
            operands = []
            for place in range(first, first + self._scaled, self.piece):
                numbers = functools.partial(self._numbers, loaded, place, mine, stage, buffers)
                x = tokens.at[:, pl.ds(place, self.piece)].transpose((1, 0))
                operands.append((numbers, x))
            sums = tensor_cores.summed(spare, BLOCK_N, operands)
            if self.is_integer:
                of_group = buffers.scale.at[stage, first // self.group, mine]
                scale = access.load(of_group, plgpu.Layout.WGMMA.reduce(1))
                sums = sums * lax.broadcast_in_dim(scale, sums.shape, (0,))
            total = total + sums
        return total

    @property
    def _scaled(self) -> int:
        """Features whose sum is scaled and added in float32."""
        return self.group if self.is_integer else FEATURES

    def _numbers(self, loaded, place, mine, stage, buffers):
        """Return the weight of the features of a piece that begins at `place`, in bfloat16."""
        chunk, rest = divmod(place, PACKED_UNIT)
        is_high, column = divmod(rest, PACKED)
        column += chunk * PACKED
        stored = loaded[:, column : column + self.piece].astype(jnp.int16)
        if not self.is_integer:
            return _float4(stored, is_high) * self._scales(place, mine, stage, buffers)
        number = _bfloat16((stored >> 4 if is_high else stored & 15) | _MAGIC)
        if not self.has_zeros:
            return number - jnp.bfloat16(_MAGIC_VALUE + INT4_ZERO)
        of_group = buffers.zero.at[stage, place // self.group, mine]
        zero = access.load(of_group, plgpu.Layout.WGMMA.reduce(1))
        zero = _bfloat16(zero.astype(jnp.int16) | _MAGIC)
        return number - lax.broadcast_in_dim(zero, number.shape, (0,))

    def _scales(self, place, mine, stage, buffers):
        """Return the scales of numbers in FP4 for a piece, in bfloat16."""
        by_group = []
        for group in range(place // FLOAT4_GROUP, (place + self.piece) // FLOAT4_GROUP):
            scale = access.load(buffers.scale.at[stage, group, mine], plgpu.Layout.WGMMA.reduce(1))
            scale = scale.astype(jnp.float32).astype(jnp.bfloat16)
            by_group.append(lax.broadcast_in_dim(scale, (BLOCK_N, FLOAT4_GROUP), (0,)))
        return jnp.concatenate(by_group, axis=1)


def _float4(stored, is_high):
    """Return FP4 numbers, of the low or the high halves of bytes, in bfloat16 and divided by 4."""
    size = (stored & 0x70) << 2 if is_high else (stored & 7) << 6
    sign = (stored & 0x80) << 8 if is_high else (stored & 8) << 12
    normal = _bfloat16(size | _EXPONENT)
    number = jnp.minimum(normal, normal + (normal - 1 / _FACTOR))
    return _bfloat16(lax.bitcast_convert_type(number, jnp.int16) | sign)


def _bfloat16(bits):
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
