"""Kernel of matmuls of many e4m3 rows with weights in FP8 as published (Pallas, Mosaic GPU).

As in `float8_gemm_kernel`, one warp copies chunks of 128 features into a ring, and warpgroups
multiply them and add the sum over each chunk, scaled, to a float32 sum in registers. Here a
warpgroup has 64 rows and all columns of the block. A row is wgmma's M, so a thread has the factors
of two rows only.

A warpgroup starts a product before it scales and adds the one before, so the tensor cores do not
wait for that: two accumulators are in use in turns, also from one tile of the output to the next,
which runs while a tile is written. The high and the low halves of the rows are two products of a
chunk; with rounded rows two chunks are. Such a pair is a unit of work.

Blocks of a cluster share copies: of the weight if they have other rows, of the rows if they have
other columns.
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
from jaxspec.pallas.matmul.float8_many_rows import COLUMNS, ROWS, Float8ManyRowsTiling
from jaxspec.pallas.matmul.float8_ring_block import Buffers, Operands, fill, freed_barriers
from jaxspec.pallas.matmul.float8_terms import CHUNK, LOW
from jaxspec.weight import SCALED_COLUMNS, Float8Blocks

_WARPGROUPS = 2  # that multiply
_MAX_STAGES = 16
_PIECE = SCALED_COLUMNS  # columns that are scaled at a time
_ROW_OF_OUT = 128  # bytes of a row that are written at a time
_GROUP = 16  # blocks of rows that are computed with all columns before the next ones: for the L2
_RESERVED = 8192  # bytes of barriers, and for rounding up allocations
_REGISTERS = 240, 24  # per thread that multiplies, or copies
_PER_WARPGROUP = ROWS // _WARPGROUPS
_AXES = "row_member", "column_member"


@functools.partial(jax.jit, static_argnames=("tokens", "dtype", "tiling", "interpret"))
def many_rows_kernel(terms, weight, *, tokens, dtype, tiling, interpret=None):
    """Return the matmul of `Terms` of `tokens` rows in `dtype`, or float32 sums of several parts.

    `tiling` is a `Float8ManyRowsTiling`; Mosaic's interpreter cannot copy to several blocks, so it
    takes tilings without clusters.
    """
    rows, outer = terms.numbers[0].shape[0], weight.outer
    dtype = dtype if tiling.parts == 1 else jnp.dtype(jnp.float32)
    block = _Block.of(terms, weight, tiling, dtype)

    def body(*refs, **scratch):
        block.run(Operands(refs[:-4], *refs[-4:]), Buffers(**scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name="float8_many_rows",
        out_type=jax.ShapeDtypeStruct((tiling.parts, rows, outer), dtype),
        scratch_types=block.scratch(),
        grid=(block.teams,),
        grid_names=("team",),
        cluster=tiling.cluster,
        cluster_names=_AXES,
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    y = kernel(*terms.numbers, terms.factors, weight.array, weight.scale)
    y = y if tokens == rows else y[:, :tokens]
    return y[0] if tiling.parts == 1 else y


class _Tile(NamedTuple):
    """A tile of the output: its part, its first chunk, row and column."""

    part: Any
    chunk: Any
    row: Any
    column: Any


class _Product(NamedTuple):
    """A product that tensor cores may not have computed yet, and what scales it."""

    sums: Any
    factors: Any  # of the rows
    scales: tuple  # of pieces of columns in this chunk; none if each column has one
    stage: Any


class _Warpgroup(NamedTuple):
    """A warpgroup that multiplies: its first row of a block, and its memory."""

    row: Any
    operands: Any
    buffers: Any

    @property
    def out(self):
        return self.buffers.out.at[lax.div(self.row, _PER_WARPGROUP)]


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the kernel: its sizes, and what its warpgroups do."""

    tiling: Float8ManyRowsTiling
    terms: int
    chunks: int  # of a part
    by_block: bool  # True if blocks of the weight have a scale, not columns
    columns: int  # blocks of columns
    tiles: int  # tiles of the output for a cluster, of all clusters
    teams: int  # clusters
    stages: int
    dtype: Any  # of the output

    @staticmethod
    def of(terms, weight, tiling, dtype):
        of_cluster = tiling.cluster[0] * tiling.cluster[1]
        tiles = tiling.blocks(weight.outer) // of_cluster
        teams = min(tiles, device.MULTIPROCESSORS // of_cluster)
        number, out = len(terms.numbers), ROWS * _ROW_OF_OUT
        stage = CHUNK * (COLUMNS + number * ROWS) + 4 * ROWS
        stages = min(_MAX_STAGES, (device.room(1) - out - _RESERVED) // stage)
        return _Block(
            tiling=tiling,
            terms=number,
            chunks=weight.inner // CHUNK // tiling.parts,
            by_block=isinstance(weight, Float8Blocks),
            columns=weight.outer // COLUMNS,
            tiles=tiles,
            teams=teams,
            stages=stages,
            dtype=jnp.dtype(dtype),
        )

    @property
    def chunks_of_unit(self):
        return 2 // self.terms

    def scratch(self):
        stages, f8, width = self.stages, jnp.float8_e4m3fn, _ROW_OF_OUT // self.dtype.itemsize
        axes = () if self.tiling.cluster == (1, 1) else _AXES
        return {
            "weight": tensor_cores.tile(stages, COLUMNS, CHUNK, dtype=f8),
            "tokens": tensor_cores.tile(stages, self.terms * ROWS, CHUNK, dtype=f8),
            "factors": plgpu.SMEM((stages, ROWS), jnp.float32),
            "filled": plgpu.Barrier(num_arrivals=self.terms + 2, num_barriers=stages),
            "freed": freed_barriers(_WARPGROUPS, stages, axes),
            "out": tensor_cores.tile(_WARPGROUPS, _PER_WARPGROUP, width, dtype=self.dtype),
        }

    def run(self, operands, buffers):
        """Run the block: the last warpgroup copies, the others multiply."""
        warpgroup, team = lax.axis_index("warpgroup"), lax.axis_index("team")
        count = lax.div(self.tiles - team + self.teams - 1, self.teams)

        @pl.when(warpgroup == _WARPGROUPS)
        def _():
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
            self._copy(count, operands, buffers)

        @pl.when(warpgroup < _WARPGROUPS)
        def _():
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
            self._multiply(warpgroup, count, operands, buffers)

    def _tile(self, i):
        """Return this block's tile number `i`; neighbours in time share columns of the weight."""
        tiling = self.tiling
        in_rows, in_columns = tiling.cluster
        rows, columns = tiling.row_blocks // in_rows, self.columns // in_columns
        index = lax.axis_index("team") + i * self.teams
        part, index = lax.div(index, rows * columns), lax.rem(index, rows * columns)
        most = max(1, _GROUP // in_rows)
        first = lax.div(index, most * columns) * most
        index, size = index - first * columns, jnp.minimum(most, rows - first)
        column, row = lax.div(index, size), first + lax.rem(index, size)
        row = row * in_rows + lax.axis_index(_AXES[0])
        column = column * in_columns + lax.axis_index(_AXES[1])
        return _Tile(part, part * self.chunks, row * ROWS, column * COLUMNS)

    def _copy(self, count, operands, buffers):
        """Fill the ring."""

        def tile(i):
            at = self._tile(i)
            return self.chunks, lambda j, stage: self._fetch(
                at, at.chunk + j, stage, operands, buffers
            )

        fill(count, self.stages, buffers.freed, tile)

    def _fetch(self, at, chunk, stage, operands, buffers):
        filled, features = buffers.filled.at[stage], pl.ds(chunk * CHUNK, CHUNK)
        with_rows, with_columns = (
            (axis,) if size > 1 else None
            for axis, size in zip(_AXES, self.tiling.cluster, strict=True)
        )
        part = operands.weight.at[pl.ds(at.column, COLUMNS), features]
        plgpu.copy_gmem_to_smem(part, buffers.weight.at[stage], filled, collective_axes=with_rows)
        for i, numbers in enumerate(operands.numbers):
            part = numbers.at[pl.ds(at.row, ROWS), features]
            rows = buffers.tokens.at[stage, pl.ds(i * ROWS, ROWS)]
            plgpu.copy_gmem_to_smem(part, rows, filled, collective_axes=with_columns)
        part = operands.factors.at[chunk, pl.ds(at.row, ROWS)]
        plgpu.copy_gmem_to_smem(part, buffers.factors.at[stage], filled)

    def _multiply(self, warpgroup, count, operands, buffers):
        """Compute the rows of a warpgroup in each tile, and write them."""
        mine = _Warpgroup(warpgroup * _PER_WARPGROUP, operands, buffers)
        last = self.chunks - self.chunks_of_unit

        def tile(i, carry, *, is_last=False):
            at = self._tile(i)

            def step(j, carry):
                chunk = at.chunk + j * self.chunks_of_unit
                return self._unit(carry, at, chunk, (at, chunk + self.chunks_of_unit), mine)

            units = self.chunks // self.chunks_of_unit
            carry = lax.fori_loop(0, units - 1, step, (*carry, _zeros()))
            after = None if is_last else self._tile(i + 1)
            following = None if after is None else (after, after.chunk)
            *carry, totals = self._unit(carry, at, at.chunk + last, following, mine)
            self._put_out(totals, at, mine)
            return tuple(carry)

        at = self._tile(0)
        carry = jnp.int32(0), self._start(at, at.chunk, jnp.int32(0), mine)
        tile(count - 1, lax.fori_loop(0, count - 1, tile, carry), is_last=True)
        plgpu.wait_smem_to_gmem(0)

    def _unit(self, carry, at, chunk, following, mine):
        """Add the two products of a unit to the totals; the first one was started before.

        Each is added once the next one was started. `chunk` is the first one's; `following` is the
        tile and the chunk of the product after the unit, or None.
        """
        stage, first, totals = carry
        if self.terms == 2:
            second = self._start(at, chunk, stage, mine, of_chunk=first, is_after_loop=True)
        else:
            next_ = access.next_stage(stage, self.stages)
            second = self._start(at, chunk + 1, next_, mine, is_after_loop=True)
        totals = self._added(totals, first, mine, in_flight=1, frees=self.terms == 1)
        stage = access.next_stage(second.stage, self.stages)
        if following is None:
            return stage, None, self._added(totals, second, mine, in_flight=0)
        at, chunk = following
        first = self._start(at, chunk, stage, mine)
        return stage, first, self._added(totals, second, mine, in_flight=1)

    def _start(self, at, chunk, stage, mine, *, of_chunk=None, is_after_loop=False):
        """Start a product, and load what scales it; `of_chunk` is the first one of this chunk.

        `is_after_loop`: the one before may have been started in another iteration of a loop, so
        wait for it. ptxas does not count products in flight through loops: if one of several was
        read then, it would let all of them run one by one.
        """
        buffers, term = mine.buffers, int(of_chunk is not None)
        if not term:
            plgpu.barrier_wait(buffers.filled.at[stage])
        if is_after_loop:
            plgpu.wgmma_wait(0)

        def run(acc):
            rows = buffers.tokens.at[stage, pl.ds(term * ROWS + mine.row, _PER_WARPGROUP)]
            plgpu.wgmma(acc, rows, buffers.weight.at[stage].transpose((1, 0)))
            return plgpu.wgmma_accumulator_load(acc, wait_n=None)

        acc = plgpu.WGMMAAccumulatorRef((_PER_WARPGROUP, COLUMNS), jnp.float32)
        sums = pl.run_scoped(run, acc)
        if of_chunk is not None:
            return of_chunk._replace(sums=sums, factors=of_chunk.factors * LOW)
        part = buffers.factors.at[stage, pl.ds(mine.row, _PER_WARPGROUP)]
        factors, scales = access.load(part, plgpu.Layout.WGMMA.reduce(1)), ()
        if self.by_block:
            scale, column = mine.operands.scale, lax.div(at.column, SCALED_COLUMNS)
            scales = tuple(scale[column + i, chunk] for i in range(COLUMNS // _PIECE))
        return _Product(sums, factors, scales, stage)

    def _added(self, totals, product, mine, *, in_flight, frees=True):
        """Return `totals` with a product added, once all but `in_flight` later ones have run.

        If it `frees`, its stage is free then.
        """
        plgpu.wgmma_wait(in_flight)
        sums = lax.optimization_barrier(product.sums)  # no use of it precedes the wait
        added = []
        for i, total in enumerate(totals):
            factors = product.factors * product.scales[i] if self.by_block else product.factors
            part = sums[:, i * _PIECE : (i + 1) * _PIECE]
            added.append(total + part * lax.broadcast_in_dim(factors, part.shape, (0,)))
        if frees:
            plgpu.commit_smem()  # also a barrier: all warps have loaded their factors
            plgpu.barrier_arrive(mine.buffers.freed.at[product.stage])
        return tuple(added)

    def _put_out(self, totals, at, mine):
        """Write sums through a tile in shared memory, some columns after the others."""
        tile, width = mine.out, mine.out.shape[1]
        rows = pl.ds(at.row + mine.row, _PER_WARPGROUP)
        for column in range(0, COLUMNS, width):
            i, first = divmod(column, _PIECE)
            columns = pl.ds(at.column + column, width)
            part = totals[i][:, first : first + width]
            if not self.by_block:
                scale = access.load(mine.operands.scale.at[columns], plgpu.Layout.WGMMA.reduce(0))
                part = part * lax.broadcast_in_dim(scale, part.shape, (1,))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # also a barrier: all warps are done
            access.store(tile, part.astype(self.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(tile, mine.operands.y.at[at.part, rows, columns])


def _zeros():
    zeros = jnp.zeros((_PER_WARPGROUP, _PIECE), jnp.float32)
    return (plgpu.layout_cast(zeros, plgpu.Layout.WGMMA),) * (COLUMNS // _PIECE)
