"""Kernel of matmuls with weights in FP8 as published (Pallas, Mosaic GPU).

A block has up to 64 rows, 64 or 128 columns of the weight, and all or part of its features. One
warp copies the weight into a ring, 128 features at a time, and another one the activations. Two
warpgroups take turns to compute the activations from what was copied, and split them into two e4m3
numbers each (`float8_terms.split`). One or two warpgroups multiply the weight's bytes by both
halves, scale the sum and add it in float32.

Everything before the matmul thus runs beside it: the activation of a feed-forward layer, and the
gated norm of Gated DeltaNet.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts, tensor_cores
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.float8 import Float8Tiling
from jaxspec.pallas.matmul.float8_activations_block import Activations, activated, normed, plain
from jaxspec.pallas.matmul.float8_terms import CHUNK, LOW, split
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import Float8Blocks

_MAX_STAGES = 24
_SMALL_ROWS = 16  # rows up to which the rings of activations have twice the stages
_SPLIT_ROWS = 8  # rows that are split at a time
_SPLITTERS = 2  # warpgroups that take turns to split activations
_RESERVED = 8192  # bytes of barriers, and for rounding up allocations
# Registers per thread that multiplies, or copies, of a block of five warpgroups. Others keep the 96
# with which all start, and the sum must not exceed that of the start.
_REGISTERS = 128, 24


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def matmul_kernel(x, weight, *, tiling=None, interpret=None):
    """Return `x @ weight` in the dtype of `x`; `weight` is a type of `float8`, as in all these."""
    tiling = tiling or _tiling(x, weight, is_split=False)
    (y,) = _launch("float8_matmul", plain(x), weight, tiling, x.dtype, interpret)
    return y


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def split_matmul_kernel(x, weight, *, tiling=None, interpret=None):
    """Run `split_matmul`: return partial sums, or the output itself if there is one part."""
    tiling = tiling or _tiling(x, weight, is_split=True)
    return _split("float8_split_matmul", plain(x), weight, tiling, interpret)


@functools.partial(jax.jit, static_argnames=("activation", "tiling", "interpret"))
def activated_matmul_kernel(x, weight, activation, *, tiling=None, interpret=None):
    """Run `gated_matmul` or `squared_relu_matmul`."""
    tiling = tiling or _tiling(x, weight, is_split=True)
    name = "float8_gated_matmul" if activation is Activation.SWIGLU else "float8_squared_relu"
    return _split(name, activated(x, activation), weight, tiling, interpret)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def gated_norm_matmul_kernel(heads, norm, weight, *, tiling=None, interpret=None):
    tiling = tiling or _tiling(heads, weight, is_split=True)
    name = "float8_gated_norm_matmul"
    return _split(name, normed(heads, norm), weight, tiling, interpret)


def _tiling(x, weight, is_split):
    return Float8Tiling.of(x.shape[0], weight.inner, weight.outer, is_split=is_split)


def _split(name, activations, weight, tiling, interpret):
    dtype = activations.dtype if tiling.parts == 1 else jnp.float32
    y = _launch(name, activations, weight, tiling, dtype, interpret)
    return y[0] if tiling.parts == 1 else y


def _launch(name, activations: Activations, weight, tiling, dtype, interpret):
    """Return `[parts, tokens, outer]` in `dtype`."""
    outer, width = weight.outer, tiling.warpgroups * BLOCK_N
    block = _Block.of(activations, weight, tiling, dtype)
    count = len(activations.operands)

    def body(*refs, **scratch):
        block.run(_Operands(refs[:count], *refs[count:]), _Buffers(**scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((tiling.parts, activations.tokens, outer), dtype),
        scratch_types=block.scratch(),
        # The last axis varies fastest: blocks that share a part of the weight run side by side.
        grid=(tiling.parts, outer // width, tiling.row_blocks),
        grid_names=("part", "column", "row"),
        num_threads=tiling.warpgroups + _SPLITTERS + 1,
        thread_name="warpgroup",
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*activations.operands, weight.array, weight.scale)


class _Operands(NamedTuple):
    activations: Any
    weight: Any
    scale: Any
    y: Any


class _Buffers(NamedTuple):
    """Shared memory of a block: three rings, each with barriers of its stages."""

    weight: Any
    weight_filled: Any
    weight_freed: Any
    copied: Any  # what the activations are computed from, a list
    copied_filled: Any
    copied_freed: Any
    tokens: Any  # the high halves of the activations, then the low halves
    factors: Any  # the power of two of each row
    tokens_filled: Any
    tokens_freed: Any
    scales: Any  # of the weight's blocks; None with a scale per column
    scaled: Any  # barrier of `scales`
    out: Any


class _Stages(NamedTuple):
    """Stages of each ring.

    Those of the activations are even: each belongs to one splitter, which waits for all its phases.
    """

    weight: int
    copied: int
    tokens: int

    @staticmethod
    def of(activations, tiling, held: int, room: int) -> "_Stages":
        """Return as many stages for the weight as fit beside `held` bytes and the other rings."""
        rows, is_small = tiling.rows, tiling.rows <= _SMALL_ROWS
        copied, tokens = (8, 4) if is_small else (4, 2)
        bytes_copied = sum(rows * CHUNK * piece.dtype.itemsize for piece in activations.pieces)
        held += copied * bytes_copied + tokens * rows * (2 * CHUNK + 4)
        stages = (room - held) // (CHUNK * tiling.warpgroups * BLOCK_N)
        return _Stages(max(2, min(stages, _MAX_STAGES)), copied, tokens)


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the kernel: its sizes, and what its warpgroups do."""

    activations: Activations
    tiling: Float8Tiling
    chunks: int  # of all parts
    by_block: bool  # True if blocks of the weight have a scale, not columns
    dtype: Any  # of the output
    stages: _Stages

    @staticmethod
    def of(activations, weight, tiling, dtype):
        chunks, by_block = weight.inner // CHUNK, isinstance(weight, Float8Blocks)
        width = tiling.warpgroups * BLOCK_N
        held = tiling.rows * width * jnp.dtype(dtype).itemsize + _RESERVED
        held += 4 * chunks * tiling.warpgroups * by_block
        room = device.room(tiling.blocks(weight.outer) if tiling.shares else 1)
        stages = _Stages.of(activations, tiling, held, room)
        return _Block(activations, tiling, chunks, by_block, dtype, stages)

    def scratch(self):
        rows, warpgroups, stages = self.tiling.rows, self.tiling.warpgroups, self.stages
        tile, f8 = tensor_cores.tile, jnp.float8_e4m3fn
        scales = plgpu.SMEM((warpgroups, self.chunks), jnp.float32) if self.by_block else None
        pieces = self.activations.pieces
        return {
            "weight": tile(stages.weight, warpgroups * BLOCK_N, CHUNK, dtype=f8),
            "weight_filled": plgpu.Barrier(num_barriers=stages.weight),
            "weight_freed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages.weight),
            "copied": [plgpu.SMEM((stages.copied, rows, CHUNK), piece.dtype) for piece in pieces],
            "copied_filled": plgpu.Barrier(num_arrivals=len(pieces), num_barriers=stages.copied),
            "copied_freed": plgpu.Barrier(num_barriers=stages.copied),
            "tokens": tile(stages.tokens, 2 * rows, CHUNK, dtype=f8),
            "factors": plgpu.SMEM((stages.tokens, rows), jnp.float32),
            "tokens_filled": plgpu.Barrier(num_barriers=stages.tokens),
            "tokens_freed": plgpu.Barrier(num_arrivals=warpgroups, num_barriers=stages.tokens),
            "scales": scales,
            "scaled": plgpu.Barrier(),
            "out": tile(warpgroups, rows, BLOCK_N, dtype=self.dtype),
        }

    def run(self, operands, buffers):
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.tiling.warpgroups
        part, copier = lax.axis_index("part"), warpgroups + _SPLITTERS
        first, end = (lax.div((part + i) * self.chunks, self.tiling.parts) for i in range(2))
        span = first, end - first

        @pl.when(warpgroup < warpgroups)
        def _():
            if warpgroups > 1:
                plgpu.set_max_registers(_REGISTERS[0], action="increase")
            self._multiply(warpgroup, span, operands, buffers)

        @pl.when((warpgroup >= warpgroups) & (warpgroup < copier))
        def _():
            self._split(warpgroup - warpgroups, span[1], operands, buffers)

        @pl.when(warpgroup == copier)
        def _():
            if warpgroups > 1:
                plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self._copy(span, operands, buffers)

    def _copy(self, span, operands, buffers):
        """Fill the rings of the weight and of the activations' pieces, with a warp for each."""
        first, count = span
        column = lax.axis_index("column") * self.tiling.warpgroups
        columns = pl.ds(column * BLOCK_N, self.tiling.warpgroups * BLOCK_N)
        rows = pl.ds(lax.axis_index("row") * self.tiling.rows, self.tiling.rows)

        def fetch_weight(j):
            stage = lax.rem(j, self.stages.weight)
            freed = buffers.weight_freed.at[stage]
            pl.when(j >= self.stages.weight)(lambda: plgpu.barrier_wait(freed))
            part = operands.weight.at[columns, pl.ds((first + j) * CHUNK, CHUNK)]
            filled = buffers.weight_filled.at[stage]
            plgpu.copy_gmem_to_smem(part, buffers.weight.at[stage], filled)

        def fetch_pieces(j):
            stage = lax.rem(j, self.stages.copied)
            freed = buffers.copied_freed.at[stage]
            pl.when(j >= self.stages.copied)(lambda: plgpu.barrier_wait(freed))
            filled = buffers.copied_filled.at[stage]
            for piece, copied in zip(self.activations.pieces, buffers.copied, strict=True):
                features = pl.ds(piece.first + (first + j) * CHUNK, CHUNK)
                part = operands.activations[piece.operand].at[rows, features]
                plgpu.copy_gmem_to_smem(part, copied.at[stage], filled)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                if self.by_block:
                    part = operands.scale.at[pl.ds(column, self.tiling.warpgroups)]
                    plgpu.copy_gmem_to_smem(part, buffers.scales, buffers.scaled)
                pl.loop(0, count)(fetch_weight)

            @pl.when(warp == 1)
            def _():
                pl.loop(0, count)(fetch_pieces)

    def _split(self, turn, count, operands, buffers):
        """Compute the activations of every other chunk, and split them into two e4m3 numbers."""
        layout = layouts.piece_layout(_SPLIT_ROWS, CHUNK, self.activations.itemsize)
        of_features = self.activations.constants(operands.activations, layout)

        def advance(stage, stages):
            return jnp.where(stage + _SPLITTERS >= stages, turn, stage + _SPLITTERS)

        def step(i, at):
            source, target = at
            j = turn + i * _SPLITTERS
            plgpu.barrier_wait(buffers.copied_filled.at[source])
            freed = buffers.tokens_freed.at[target]
            pl.when(j >= self.stages.tokens)(lambda: plgpu.barrier_wait(freed))
            for first in range(0, self.tiling.rows, _SPLIT_ROWS):
                rows, low = pl.ds(first, _SPLIT_ROWS), pl.ds(self.tiling.rows + first, _SPLIT_ROWS)
                loaded = [access.load(x.at[source, rows], layout) for x in buffers.copied]
                halves = split(self.activations.of(layout, loaded, of_features))
                access.store(buffers.tokens.at[target, rows], halves[0])
                access.store(buffers.tokens.at[target, low], halves[1])
                access.store(buffers.factors.at[target, rows], halves[2])
            plgpu.commit_smem()
            plgpu.barrier_arrive(buffers.tokens_filled.at[target])
            read = buffers.copied_freed.at[source]
            pl.when(j + self.stages.copied < count)(lambda: plgpu.barrier_arrive(read))
            return advance(source, self.stages.copied), advance(target, self.stages.tokens)

        lax.fori_loop(0, lax.div(count - turn + _SPLITTERS - 1, _SPLITTERS), step, (turn, turn))

    def _multiply(self, warpgroup, span, operands, buffers):
        """Sum the products of a warpgroup's columns, and write them."""
        (first, count), rows = span, self.tiling.rows
        mine = pl.ds(warpgroup * BLOCK_N, BLOCK_N)
        if self.by_block:
            plgpu.barrier_wait(buffers.scaled)

        def release(barrier, j, stages):
            """Free the stage of chunk `j` if a later chunk reuses it."""
            pl.when(j + stages < count)(lambda: plgpu.barrier_arrive(barrier))

        def step(j, carry):
            stage, at, total = carry
            plgpu.barrier_wait(buffers.weight_filled.at[stage])
            plgpu.barrier_wait(buffers.tokens_filled.at[at])
            tokens = buffers.tokens.at[at].transpose((1, 0))
            sums = tensor_cores.product(buffers.weight.at[stage, mine], tokens)
            release(buffers.weight_freed.at[stage], j, self.stages.weight)
            factor = access.load(buffers.factors.at[at], plgpu.Layout.WGMMA.reduce(0))
            release(buffers.tokens_freed.at[at], j, self.stages.tokens)
            factor = factor * buffers.scales[warpgroup, first + j] if self.by_block else factor
            sums = sums[:, :rows] + sums[:, rows:] * LOW
            total = total + sums * lax.broadcast_in_dim(factor, sums.shape, (1,))
            stage = access.next_stage(stage, self.stages.weight)
            return stage, access.next_stage(at, self.stages.tokens), total

        zeros = plgpu.layout_cast(jnp.zeros((BLOCK_N, rows), jnp.float32), plgpu.Layout.WGMMA)
        _, _, total = lax.fori_loop(0, count, step, (jnp.int32(0), jnp.int32(0), zeros))
        column = (lax.axis_index("column") * self.tiling.warpgroups + warpgroup) * BLOCK_N
        columns = pl.ds(column, BLOCK_N)
        if not self.by_block:
            scale = access.load(operands.scale.at[columns], plgpu.Layout.WGMMA.reduce(1))
            total = total * lax.broadcast_in_dim(scale, total.shape, (0,))
        out = buffers.out.at[warpgroup]
        # In this layout a thread holds adjacent columns, which are contiguous in a row of `y`.
        out.T[...] = plgpu.layout_cast(total.astype(out.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        part, first_row = lax.axis_index("part"), lax.axis_index("row") * rows
        plgpu.copy_smem_to_gmem(out, operands.y.at[part, pl.ds(first_row, rows), columns])
        plgpu.wait_smem_to_gmem(0)
