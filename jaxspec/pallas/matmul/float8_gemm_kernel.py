"""Kernel of matmuls of e4m3 rows with weights in FP8 as published (Pallas, Mosaic GPU).

One warp copies chunks of 128 features, of the weight, of the rows (`float8_terms.Terms`) and of
their factors, into a ring. Warpgroups multiply 64 columns each, transposed as in `gemm_kernel`.
Each adds the sum over a chunk, scaled, to a float32 sum in registers, while the tensor cores run
the matmul of another one. High and low halves of the rows are two halves of one operand.

Two blocks with neighbouring columns form a cluster: each copies half of a chunk's rows to both. A
block computes one tile of the output after the other, and copies the next tile's first chunks
before it has written the last one.
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
from jaxspec.pallas.matmul.float8_gemm import Float8GemmTiling
from jaxspec.pallas.matmul.float8_ring_block import Buffers, Operands, fill, freed_barriers
from jaxspec.pallas.matmul.float8_terms import CHUNK, LOW
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import SCALED_COLUMNS, Float8Blocks

_MAX_STAGES = 16
_PIECE = 64  # rows whose sums are scaled, and written, at a time
_ALIGNED = 32  # float32 factors of a stage: a copy begins at a multiple of 128 bytes
_RESERVED = 8192  # bytes of barriers, and for rounding up allocations
_REGISTERS = {2: (240, 24), 3: (160, 24)}  # registers per thread that multiplies, or copies


@functools.partial(jax.jit, static_argnames=("tokens", "dtype", "tiling", "interpret"))
def gemm_kernel(terms, weight, *, tokens, dtype, tiling, interpret=None):
    """Return the matmul of `Terms` of `tokens` rows in `dtype`, or float32 sums of several parts.

    `tiling` is a `Float8GemmTiling`; Mosaic's interpreter cannot copy to several blocks, so it
    takes tilings without clusters.
    """
    rows, outer = terms.numbers[0].shape[0], weight.outer
    dtype = dtype if tiling.parts == 1 else jnp.dtype(jnp.float32)
    block = _Block.of(terms, weight, tiling, dtype)

    def body(*refs, **scratch):
        block.run(Operands(refs[:-4], *refs[-4:]), Buffers(**scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name="float8_gemm",
        out_type=jax.ShapeDtypeStruct((tiling.parts, rows, outer), dtype),
        scratch_types=block.scratch(),
        grid=(block.teams,),
        grid_names=("team",),
        cluster=(tiling.cluster,),
        cluster_names=("member",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    y = kernel(*terms.numbers, terms.factors, weight.array, weight.scale)
    y = y if tokens == rows else y[:, :tokens]
    return y[0] if tiling.parts == 1 else y


class _Tile(NamedTuple):
    """A tile of the output: its part, its first chunk and their number, first row and column."""

    part: Any
    chunk: Any
    chunks: Any
    row: Any
    column: Any


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the kernel: its sizes, and what its warpgroups do."""

    tiling: Float8GemmTiling
    terms: int
    chunks: int  # of all parts
    by_block: bool  # True if blocks of the weight have a scale, not columns
    tiles: int  # tiles of the output for a cluster, of all clusters
    teams: int  # clusters
    stages: int
    dtype: Any  # of the output

    @staticmethod
    def of(terms, weight, tiling, dtype):
        tiles = tiling.blocks(weight.outer) // tiling.cluster
        teams = min(tiles, device.MULTIPROCESSORS // tiling.cluster)
        out = tiling.warpgroups * min(tiling.rows, _PIECE) * BLOCK_N * jnp.dtype(dtype).itemsize
        stage = CHUNK * (tiling.width + len(terms.numbers) * tiling.rows) + 4 * _aligned(tiling)
        stages = min(_MAX_STAGES, (device.room(1) - out - _RESERVED) // stage)
        chunks, by_block = weight.inner // CHUNK, isinstance(weight, Float8Blocks)
        terms = len(terms.numbers)
        return _Block(tiling, terms, chunks, by_block, tiles, teams, stages, jnp.dtype(dtype))

    def scratch(self):
        tiling, stages, f8 = self.tiling, self.stages, jnp.float8_e4m3fn
        out = tiling.warpgroups, min(tiling.rows, _PIECE), BLOCK_N
        axes = ("member",) if tiling.cluster > 1 else ()
        return {
            "weight": tensor_cores.tile(stages, tiling.width, CHUNK, dtype=f8),
            "tokens": tensor_cores.tile(stages, self.terms * tiling.rows, CHUNK, dtype=f8),
            "factors": plgpu.SMEM((stages, _aligned(tiling)), jnp.float32),
            "filled": plgpu.Barrier(num_arrivals=self.terms + 2, num_barriers=stages),
            "freed": freed_barriers(tiling.warpgroups, stages, axes),
            "out": tensor_cores.tile(*out, dtype=self.dtype),
        }

    def run(self, operands, buffers):
        """Run the block: the last warpgroup copies, the others multiply."""
        warpgroup, warpgroups = lax.axis_index("warpgroup"), self.tiling.warpgroups
        registers = _REGISTERS.get(warpgroups)
        team = lax.axis_index("team")
        count = lax.div(self.tiles - team + self.teams - 1, self.teams)

        @pl.when(warpgroup == warpgroups)
        def _():
            if registers:
                plgpu.set_max_registers(registers[1], action="decrease")
            self._copy(count, operands, buffers)

        @pl.when(warpgroup < warpgroups)
        def _():
            if registers:
                plgpu.set_max_registers(registers[0], action="increase")
            self._multiply(warpgroup, count, operands, buffers)

    def _tile(self, i, outer):
        """Return this block's tile number `i`; neighbours in time share columns of the weight."""
        tiling = self.tiling
        index = lax.axis_index("team") + i * self.teams
        row, index = lax.rem(index, tiling.row_blocks), lax.div(index, tiling.row_blocks)
        columns = outer // (tiling.width * tiling.cluster)
        part, index = lax.div(index, columns), lax.rem(index, columns)
        column = index * tiling.cluster + lax.axis_index("member")
        first, end = (lax.div((part + i) * self.chunks, tiling.parts) for i in range(2))
        return _Tile(part, first, end - first, row * tiling.rows, column * tiling.width)

    def _copy(self, count, operands, buffers):
        """Fill the ring; in a cluster half of the rows is copied to both blocks."""
        tiling, outer = self.tiling, operands.weight.shape[0]
        axes = ("member",) if tiling.cluster > 1 else None

        def fetch(j, at, stage):
            chunk, filled = at.chunk + j, buffers.filled.at[stage]
            features = pl.ds(chunk * CHUNK, CHUNK)
            part = operands.weight.at[pl.ds(at.column, tiling.width), features]
            plgpu.copy_gmem_to_smem(part, buffers.weight.at[stage], filled)
            for i, numbers in enumerate(operands.numbers):
                part = numbers.at[pl.ds(at.row, tiling.rows), features]
                rows = buffers.tokens.at[stage, pl.ds(i * tiling.rows, tiling.rows)]
                plgpu.copy_gmem_to_smem(part, rows, filled, collective_axes=axes)
            part = operands.factors.at[chunk, pl.ds(at.row, _aligned(tiling))]
            plgpu.copy_gmem_to_smem(part, buffers.factors.at[stage], filled)

        def tile(i):
            at = self._tile(i, outer)
            return at.chunks, lambda j, stage: fetch(j, at, stage)

        fill(count, self.stages, buffers.freed, tile)

    def _multiply(self, warpgroup, count, operands, buffers):
        """Compute the columns of a warpgroup in each tile, and write them."""
        outer = operands.weight.shape[0]
        sizes = [min(_PIECE, self.tiling.rows - row) for row in range(0, self.tiling.rows, _PIECE)]

        def tile(i, stage):
            at = self._tile(i, outer)
            at = at._replace(column=at.column + warpgroup * BLOCK_N)

            def step(j, carry):
                stage, totals = carry
                totals = self._add_chunk(totals, warpgroup, stage, at, j, operands, buffers)
                plgpu.barrier_arrive(buffers.freed.at[stage])
                return access.next_stage(stage, self.stages), totals

            zeros = tuple(_zeros(BLOCK_N, size) for size in sizes)
            stage, totals = lax.fori_loop(0, at.chunks, step, (stage, zeros))
            if not self.by_block:
                part = operands.scale.at[pl.ds(at.column, BLOCK_N)]
                scale = access.load(part, plgpu.Layout.WGMMA.reduce(1))
                totals = [x * lax.broadcast_in_dim(scale, x.shape, (0,)) for x in totals]
            self._put_out(totals, at, buffers.out.at[warpgroup], operands.y)
            return stage

        lax.fori_loop(0, count, tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def _add_chunk(self, totals, warpgroup, stage, at, j, operands, buffers):
        """Return `totals`, by rows, with the sum over chunk `j` of a tile added."""
        rows, mine = self.tiling.rows, pl.ds(warpgroup * BLOCK_N, BLOCK_N)
        plgpu.barrier_wait(buffers.filled.at[stage])

        def run(acc):
            tokens = buffers.tokens.at[stage].transpose((1, 0))
            plgpu.wgmma(acc, buffers.weight.at[stage, mine], tokens)
            # Loaded while the tensor cores run, by all warps before one of them frees the stage.
            of_block = lax.div(at.column, SCALED_COLUMNS), at.chunk + j
            scale = operands.scale[of_block] if self.by_block else None
            factors = []
            for i, total in enumerate(totals):
                part = buffers.factors.at[stage, pl.ds(i * _PIECE, total.shape[1])]
                factor = access.load(part, plgpu.Layout.WGMMA.reduce(0))
                factors.append(factor * scale if self.by_block else factor)
            plgpu.commit_smem()  # also a barrier: all warps are done
            return acc[...], factors

        shape = BLOCK_N, self.terms * rows
        sums, factors = pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
        added = []
        for i, (total, factor) in enumerate(zip(totals, factors, strict=True)):
            first, size = i * _PIECE, total.shape[1]
            part = sums[:, first : first + size]
            if self.terms == 2:
                part = part + sums[:, rows + first : rows + first + size] * LOW
            added.append(total + part * lax.broadcast_in_dim(factor, part.shape, (1,)))
        return tuple(added)

    def _put_out(self, totals, at, tile, y):
        """Write sums through a tile in shared memory, some rows after the others."""
        for i, total in enumerate(totals):
            rows = pl.ds(0, total.shape[1])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # also a barrier: all warps are done
            # In this layout a thread holds adjacent columns, which are contiguous in a row of `y`.
            tile.at[rows].T[...] = plgpu.layout_cast(
                total.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED
            )
            plgpu.commit_smem()
            part = y.at[at.part, pl.ds(at.row + i * _PIECE, total.shape[1])]
            plgpu.copy_smem_to_gmem(tile.at[rows], part.at[:, pl.ds(at.column, BLOCK_N)])


def _zeros(*shape):
    return plgpu.layout_cast(jnp.zeros(shape, jnp.float32), plgpu.Layout.WGMMA)


def _aligned(tiling):
    return -(-tiling.rows // _ALIGNED) * _ALIGNED
