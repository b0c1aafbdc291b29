"""Kernel of matmuls with published weights in 4 bits (Pallas, Mosaic GPU).

A block has some rows, 64 columns of the weight for each warpgroup that multiplies, and all or part
of the features. With few rows, two warpgroups have the same columns, and take turns in the stages.
One warp copies 256 features at a time into a ring: words of the weight, their scales and zero
points, and the rows. The other warpgroups make bfloat16 numbers of the words, which are the operand
in registers of wgmma, transposed as in `gemm_kernel`. A sum of products of integers over a group is
scaled and added in float32; numbers in FP4 are scaled before.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic_utils
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.matmul.four_bits import FEATURES, FEW_ROWS, FourBitsTiling
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import FLOAT4_GROUP, INT4_ZERO, PACKED, PACKED_UNIT, Int4Groups

_TILE_ROWS = 8
_MAX_STAGES = 16
_RESERVED = 10240  # bytes of barriers, and for rounding up allocations
_REGISTERS = 240, 24  # registers per thread that multiplies, or copies, with two warpgroups
_WORDS = FEATURES // 4  # of a column in a stage
_PIECE = 64  # features of an operand of wgmma at most
# The bfloat16 number with these bits and an integer below 128 is 128 plus that integer.
_MAGIC, _MAGIC_VALUE = 0x4300, 128
# Exponent and mantissa of FP4 at their places in bfloat16, with these bits, are a quarter of the
# number if that is 1 or more, and 1/8 and 3/16 in place of 0 and 1/8 for the two numbers below.
_EXPONENT, _FACTOR = 0x3E00, 4
_AND_OR = "lop3.b32 $0, $1, $2, $3, 0xEA;"  # ptxas makes two instructions of them otherwise
_WGMMA = plgpu.Layout.WGMMA
utils: Any = mosaic_utils  # pyright checks against jax 0.10, which has fewer; no kernel runs there
inline_mgpu: Any = plgpu.inline_mgpu


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
        num_threads=tiling.warpgroups * tiling.turns + 1,
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
    sums: Any  # of the other warpgroups with the same columns; None without any
    summed: Any
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
    copied: int  # words in a row of a tile of the weight
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
        stage = 2 * _WORDS * width + 2 * FEATURES * tiling.rows + per_scale * groups * width
        held = width * tiling.rows * jnp.dtype(dtype).itemsize + _RESERVED
        held += 4 * (tiling.turns - 1) * width * tiling.rows
        all_stages = pl.cdiv(weight.inner, FEATURES)
        # The registers of more rows are too many for two blocks on a multiprocessor.
        blocks = tiling.blocks(weight.outer) if tiling.rows <= FEW_ROWS else 1
        stages = min((device.room(blocks) - held) // stage, _MAX_STAGES)
        stages -= stages % tiling.turns  # each belongs to one warpgroup, which waits for all phases
        # Mosaic requires whole tiles of an array, and 2688 features have no whole number of stages.
        copied = PACKED if weight.inner % FEATURES else _WORDS
        return _Block(
            tiling,
            is_integer,
            has_zeros,
            weight.group,
            all_stages,
            copied,
            stages,
            dtype,
            is_interpreted,
        )

    @property
    def piece(self) -> int:
        """Features of an operand of wgmma."""
        return min(self.group, _PIECE) if self.is_integer else _PIECE

    def scratch(self):
        width, rows, stages = self.tiling.width, self.tiling.rows, self.stages
        warpgroups, others = self.tiling.warpgroups, self.tiling.turns - 1
        scales = stages, FEATURES // self.group, width
        scale = jnp.float32 if self.is_integer else jnp.float8_e4m3fn
        spare = tensor_cores.tile(warpgroups * self.tiling.turns, BLOCK_N, _PIECE)
        return {
            "weight": plgpu.SMEM(
                (stages, width, _WORDS), jnp.uint16, transforms=_rows_of(self.copied)
            ),
            "x": plgpu.SMEM(
                (stages, rows, FEATURES), jnp.bfloat16, transforms=_rows_of(self.piece)
            ),
            "scale": plgpu.SMEM(scales, scale),
            "zero": plgpu.SMEM(scales, jnp.uint8) if self.has_zeros else None,
            "filled": plgpu.Barrier(num_arrivals=3 + self.has_zeros, num_barriers=stages),
            "freed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages),
            "sums": plgpu.SMEM((others, BLOCK_N, rows), jnp.float32) if others else None,
            "summed": plgpu.Barrier(num_arrivals=others) if others else None,
            "out": tensor_cores.tile(warpgroups, rows, BLOCK_N, dtype=self.dtype),
            "spare": spare if self.is_interpreted else None,
        }

    def run(self, operands, buffers):
        """Run the block: the last warpgroup copies, the others multiply."""
        warpgroup, part = lax.axis_index("warpgroup"), lax.axis_index("part")
        first, end = (lax.div((part + i) * self.all_stages, self.tiling.parts) for i in range(2))
        is_copying = warpgroup == self.tiling.warpgroups * self.tiling.turns
        has_two = self.tiling.warpgroups > 1

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
        """Fill the ring, each stage once all warpgroups that multiply have freed it.

        Each array has a warp, because issuing the copies of a stage takes long.
        """
        columns = pl.ds(lax.axis_index("column") * self.tiling.width, self.tiling.width)
        rows = pl.ds(lax.axis_index("row") * self.tiling.rows, self.tiling.rows)
        groups = FEATURES // self.group

        def copy_weight(at, stage, filled):
            part = operands.weight.at[columns, pl.ds(at * _WORDS, _WORDS)]
            plgpu.copy_gmem_to_smem(part, buffers.weight.at[stage], filled)

        def copy_rows(at, stage, filled):
            part = operands.x.at[rows, pl.ds(at * FEATURES, FEATURES)]
            plgpu.copy_gmem_to_smem(part, buffers.x.at[stage], filled)

        def copy_scales(at, stage, filled):
            of_groups = pl.ds(at * groups, groups), columns
            plgpu.copy_gmem_to_smem(operands.scale.at[of_groups], buffers.scale.at[stage], filled)
            if self.has_zeros:
                plgpu.copy_gmem_to_smem(operands.last.at[of_groups], buffers.zero.at[stage], filled)

        def fill(copy):
            def fetch(j, stage):
                freed = buffers.freed.at[stage]
                pl.when(j >= self.stages)(lambda: plgpu.barrier_wait(freed))
                copy(first + j, stage, buffers.filled.at[stage])
                return access.next_stage(stage, self.stages)

            lax.fori_loop(0, count, fetch, jnp.int32(0))

        @plgpu.warp_map
        def _(warp):
            for i, copy in enumerate((copy_weight, copy_rows, copy_scales)):
                pl.when(warp == i)(functools.partial(fill, copy))

    def _multiply(self, warpgroup, count, operands, buffers):
        """Sum the products of a warpgroup's columns and stages, and write them."""
        turns = self.tiling.turns
        group, turn = (0, warpgroup) if turns > 1 else (warpgroup, 0)
        mine = pl.ds(group * BLOCK_N, BLOCK_N)
        shape = BLOCK_N, self.tiling.rows

        def step(i, carry):
            stage, total = carry
            plgpu.barrier_wait(buffers.filled.at[stage])
            total = self._add_stage(total, warpgroup, mine, stage, buffers)

            @pl.when(turn + i * turns + self.stages < count)
            def _():
                # Loads precede a copy to the same memory, of another proxy, only by such a fence.
                plgpu.commit_smem()
                plgpu.barrier_arrive(buffers.freed.at[stage])

            stage = stage + turns
            return jnp.where(stage < self.stages, stage, stage - self.stages), total

        total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), _WGMMA)
        steps = lax.div(count - turn + turns - 1, turns)
        _, total = lax.fori_loop(0, steps, step, (jnp.int32(turn), total))
        if turns == 1:
            self._write(total, group, operands, buffers)
            return

        @pl.when(turn > 0)
        def _():
            access.store(buffers.sums.at[turn - 1], total)
            plgpu.barrier_arrive(buffers.summed)

        @pl.when(turn == 0)
        def _():
            plgpu.barrier_wait(buffers.summed)
            sums = [access.load(buffers.sums.at[i], _WGMMA) for i in range(turns - 1)]
            self._write(sum(sums, total), group, operands, buffers)

    def _write(self, total, group, operands, buffers):
        """Write the sums of 64 columns."""
        first = lax.axis_index("column") * self.tiling.width + group * BLOCK_N
        columns = pl.ds(first, BLOCK_N)
        if not self.is_integer:
            factor = access.load(operands.last.at[columns], _WGMMA.reduce(1))
            total = total * lax.broadcast_in_dim(factor * _FACTOR, total.shape, (0,))
        # In this layout a thread holds adjacent columns, which are contiguous in a row of `y`.
        total = plgpu.layout_cast(total.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        tile = buffers.out.at[group]
        tile.T[...] = total
        plgpu.commit_smem()
        rows = pl.ds(lax.axis_index("row") * self.tiling.rows, self.tiling.rows)
        plgpu.copy_smem_to_gmem(tile, operands.y.at[lax.axis_index("part"), rows, columns])
        plgpu.wait_smem_to_gmem(0)

    def _add_stage(self, total, warpgroup, mine, stage, buffers):
        """Return `total` with the products of a stage's features added."""
        loaded = access.load(buffers.weight.at[stage, mine], _WGMMA)
        spare = buffers.spare.at[warpgroup] if self.is_interpreted else None
        tokens = buffers.x.at[stage]
        for first in range(0, FEATURES, self._scaled):
            operands = []
            for place in range(first, first + self._scaled, self.piece):
                numbers = functools.partial(self._piece, loaded, place, mine, stage, buffers)
                x = tokens.at[:, pl.ds(place, self.piece)].transpose((1, 0))
                operands.append((numbers, x))
            sums = tensor_cores.summed(spare, BLOCK_N, operands)
            if self.is_integer:
                of_group = buffers.scale.at[stage, first // self.group, mine]
                scale = access.load(of_group, _WGMMA.reduce(1))
                sums = sums * lax.broadcast_in_dim(scale, sums.shape, (0,))
            total = total + sums
        return total

    @property
    def _scaled(self) -> int:
        """Features whose sum is scaled and added in float32."""
        return self.group if self.is_integer else FEATURES

    def _piece(self, loaded, place, *where):
        """Return the weight of a piece of features that begins at `place`, in bfloat16."""
        places = range(place, place + self.piece, PACKED)
        return jnp.concatenate([self._numbers(loaded, each, *where) for each in places], axis=1)

    def _numbers(self, loaded, place, mine, stage, buffers):
        """Return the weight of the features from `place` that have a word each, in bfloat16."""
        unit, rest = divmod(place, PACKED_UNIT)
        words = loaded[:, unit * PACKED : (unit + 1) * PACKED]
        moved = functools.partial(self._moved, words, 4 * (rest // PACKED))
        if not self.is_integer:
            return _float4(moved) * self._scales(place, mine, stage, buffers)
        number = _bfloat16(moved(0, 0xF, _MAGIC))
        if not self.has_zeros:
            return number - jnp.bfloat16(_MAGIC_VALUE + INT4_ZERO)
        of_group = buffers.zero.at[stage, place // self.group, mine]
        zero = access.load(of_group, _WGMMA.reduce(1))
        zero = _bfloat16(zero.astype(jnp.uint16) | np.uint16(_MAGIC))
        return number - lax.broadcast_in_dim(zero, number.shape, (0,))

    def _moved(self, words, first, to, mask, others=0):
        """Return the bits from `first` on of each word, moved to bit `to`, that are in `mask`.

        `others` are set, too. A thread holds two adjacent words, which two instructions move.
        """
        left = to - first
        if self.is_interpreted:
            moved = words << left if left > 0 else lax.shift_right_logical(words, np.uint16(-left))
            return moved & np.uint16(mask) | np.uint16(others)

        @inline_mgpu(
            arg_types=(_WGMMA,),
            return_type=plgpu.ShapeDtypeStruct(words.shape, words.dtype, layout=_WGMMA),
        )
        def move(_: Any, words: Any) -> Any:
            integer = ir.IntegerType.get_signless(32)
            shift = arith.shli if left > 0 else arith.shrui

            def move_pair(pair: Any) -> Any:
                bits = utils.bitcast(pair, integer)
                bits = shift(bits, utils.c(abs(left), integer)) if left else bits
                constants = [utils.c(each << 16 | each, integer) for each in (mask, others)]
                bits = llvm.inline_asm(integer, [bits, *constants], _AND_OR, "=r,r,r,r")
                return utils.bitcast(bits, pair.type)

            return words._pointwise(move_pair)

        return move(words)

    def _scales(self, place, mine, stage, buffers):
        """Return the scales of numbers in FP4 for a piece of features, in bfloat16."""
        by_group = []
        for group in range(place // FLOAT4_GROUP, (place + PACKED) // FLOAT4_GROUP):
            scale = access.load(buffers.scale.at[stage, group, mine], _WGMMA.reduce(1))
            scale = scale.astype(jnp.float32).astype(jnp.bfloat16)
            by_group.append(lax.broadcast_in_dim(scale, (BLOCK_N, FLOAT4_GROUP), (0,)))
        return jnp.concatenate(by_group, axis=1)


def _rows_of(elements):
    """Return tiles with as many 16-bit elements in a row."""
    return plgpu.TilingTransform((8, elements)), plgpu.SwizzleTransform(2 * elements)


def _float4(moved):
    """Return FP4 numbers in bfloat16, divided by 4; `moved` moves their bits."""
    normal = _bfloat16(moved(6, 0x1C0, _EXPONENT))
    number = jnp.minimum(normal, normal + (normal - 1 / _FACTOR))
    return _bfloat16(lax.bitcast_convert_type(number, jnp.uint16) | moved(12, 0x8000))


def _bfloat16(bits):
    return lax.bitcast_convert_type(bits, jnp.bfloat16)
