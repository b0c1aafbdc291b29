"""The kernel of `argmax_matmul` (Pallas, Mosaic GPU).

A block scores 128 columns at a time for up to 256 rows, and keeps the best score of each row so
far. One warp copies chunks of rows and weight into a ring. One or two warpgroups multiply, each
half of the rows. Four threads hold a row's scores, so the best of them takes two exchanges.

Every tile of columns reads the rows again. With more than 128 rows that is more than the L2 cache
gives, so two neighbouring blocks with the same rows form a cluster: each copies half of a chunk's
rows to both.

In 8 bits a chunk has twice the features, and the weight lies the other way: tensor cores take bytes
only with a row's features side by side.
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
from jaxspec.pallas.matmul.scores import NO_COLUMN, NO_TOKEN, PartialArgmax, combine
from jaxspec.weight import Float8

_BLOCK_N = 128  # columns of a tile
_CHUNK_BYTES = 128  # of a row or a column in a chunk: a row of a swizzled tile
_REGISTERS = 232, 40  # of a thread that multiplies (with two warpgroups), and of one that copies
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


@functools.partial(jax.jit, static_argnames=("cluster", "interpret"))
def argmax_matmul_kernel(x, weight, forbidden, *, cluster=None, interpret=None):
    """`argmax_matmul`, for `x` in the dtype of `weight`.

    `cluster` is the number of blocks that share their rows, and `interpret` has parameters of
    Mosaic's interpreter, which cannot copy to several blocks.
    """
    rows, ids = x.shape[0], weight.outer
    cluster = cluster or (2 if rows > 128 else 1)  # up to 128 rows cost little to read again
    # The blocks of a cluster copy the same number of rows each, in groups of 8.
    x = jnp.pad(x, ((0, -rows % (8 * cluster)), (0, 0)))
    tiling = _Tiling.of(x.shape[0], weight, cluster)
    out = functools.partial(jax.ShapeDtypeStruct, (tiling.teams * cluster, tiling.padded))

    def body(x, weight, forbidden, low, high, score, column, nearest, **scratch):
        operands = _Operands(x, weight, forbidden, low, high, ids)
        _block(tiling, operands, PartialArgmax(score, column, nearest), _Buffers(**scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name="argmax_matmul",
        out_type=(out(jnp.float32), out(jnp.int32), out(jnp.float32)),
        scratch_types=tiling.scratch(),
        grid=(tiling.teams * tiling.row_tiles,),
        grid_names=("team",),
        cluster=(cluster,),
        cluster_names=("part",),
        num_threads=tiling.warpgroups + 1,
        thread_name="warpgroup",
        # Its own barriers are enough, and no maximum crosses warps.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    table, low, high = _forbidden_table(forbidden, ids, tiling.padded)
    parts = PartialArgmax(*kernel(x, weight.array, table, low, high))
    return combine(parts, axis=0)[:rows]


def _forbidden_table(forbidden, ids, rows):
    """The forbidden columns as `[n, rows]`, padded, and the lowest and the highest of them all.

    Few tiles of a large vocabulary have a forbidden column, because stop ids are neighbours. By the
    lowest and the highest a block sees that its tile has none.
    """
    padding = (0, max(0, 1 - forbidden.shape[1])), (0, rows - forbidden.shape[0])
    table = jnp.pad(forbidden.T, padding, constant_values=NO_TOKEN)
    is_column = (table >= 0) & (table < ids)
    low = jnp.min(jnp.where(is_column, table, ids))
    high = jnp.max(jnp.where(is_column, table, NO_TOKEN))
    return table, low[None], high[None]


class _Operands(NamedTuple):
    """What a block reads."""

    x: Any
    weight: Any
    forbidden: Any  # the table, and its bounds
    low: Any
    high: Any
    ids: int  # columns of the weight


class _Buffers(NamedTuple):
    """Shared memory of a block; `filled` and `freed` are barriers of each stage of the ring."""

    tokens: Any
    ring: Any
    filled: Any
    freed: Any


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """How rows and columns are shared out among the blocks."""

    copied: int  # rows that are copied for a tile: no more than there are
    rows: int  # of a warpgroup
    warpgroups: int  # of a block, without the one that copies
    row_tiles: int
    column_tiles: int  # each has `_BLOCK_N` columns for every block of a cluster
    teams: int  # clusters that share a tile of rows
    cluster: int
    inner: int
    dtype: Any
    by_column: bool  # the weight is `[ids, inner]`
    stages: int  # of the ring

    @staticmethod
    def of(rows, weight, cluster):
        warpgroups, of_warpgroup = min(2, pl.cdiv(rows, 64)), 64 if rows <= 128 else 128
        row_tiles = pl.cdiv(rows, warpgroups * of_warpgroup)
        column_tiles = pl.cdiv(weight.outer, cluster * _BLOCK_N)
        teams = min(max(1, device.MULTIPROCESSORS // cluster // row_tiles), column_tiles)
        stages = device.room(1) // (_CHUNK_BYTES * (warpgroups * of_warpgroup + _BLOCK_N))
        return _Tiling(
            copied=min(warpgroups * of_warpgroup, rows),
            rows=of_warpgroup,
            warpgroups=warpgroups,
            row_tiles=row_tiles,
            column_tiles=column_tiles,
            teams=teams,
            cluster=cluster,
            inner=weight.inner,
            dtype=weight.dtype,
            by_column=isinstance(weight, Float8),
            stages=stages,
        )

    @property
    def tile(self) -> int:
        """Rows of a block."""
        return self.warpgroups * self.rows

    @property
    def padded(self) -> int:
        """Rows of all tiles."""
        return self.row_tiles * self.tile

    @property
    def chunk(self) -> int:
        """Features of a chunk."""
        return _CHUNK_BYTES // self.dtype.itemsize

    @property
    def chunks(self) -> int:
        """Chunks of the features."""
        return self.inner // self.chunk

    def part(self, features, columns) -> tuple[Any, Any]:
        """The index of such a part in the weight."""
        return (columns, features) if self.by_column else (features, columns)

    def scratch(self) -> dict[str, Any]:
        """The ring, as tensor cores read it, and its barriers: the fields of `_Buffers`."""
        of_weight = self.part(self.chunk, _BLOCK_N)
        return {
            "tokens": tensor_cores.tile(self.stages, self.tile, self.chunk, dtype=self.dtype),
            "ring": tensor_cores.tile(self.stages, *of_weight, dtype=self.dtype),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            # A chunk's rows go to all blocks of a cluster, so all must be done with the stage.
            "freed": plgpu.ClusterBarrier(
                collective_axes=("part",), num_arrivals=self.warpgroups, num_barriers=self.stages
            ),
        }


def _block(tiling, operands, out, buffers):
    """Share a block's columns and rows among its warpgroups."""
    team, part, warpgroup = (lax.axis_index(name) for name in ("team", "part", "warpgroup"))
    row_tile, team = lax.rem(team, tiling.row_tiles), lax.div(team, tiling.row_tiles)
    first_row = row_tile * tiling.tile
    count = lax.div(tiling.column_tiles - team + tiling.teams - 1, tiling.teams)

    def column(i):
        """The first column of this block's tile `i`, of `count`."""
        return ((team + i * tiling.teams) * tiling.cluster + part) * _BLOCK_N

    @pl.when(warpgroup == tiling.warpgroups)
    def _():
        if tiling.warpgroups > 1:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        _copy(tiling, count, column, first_row, operands, buffers)

    @pl.when(warpgroup < tiling.warpgroups)
    def _():
        if tiling.warpgroups > 1:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
        offset = warpgroup * tiling.rows
        rows, of_tile = pl.ds(first_row + offset, tiling.rows), pl.ds(offset, tiling.rows)
        low, high = operands.low[0], operands.high[0]
        tokens = buffers.tokens.at[:, of_tile]
        forbidden = operands.forbidden.at[:, rows]

        def step(i, best):
            scores = _multiply(tiling, count, i, buffers._replace(tokens=tokens))
            scores = _mask(scores, column(i), forbidden, (low, high, operands.ids))
            return _update(best, scores, column(i))

        def full(value, dtype):
            return plgpu.layout_cast(jnp.full(tiling.rows, value, dtype), _BY_ROW)

        lowest, first = full(-jnp.inf, jnp.float32), full(0, jnp.int32)
        best = lax.fori_loop(0, count, step, PartialArgmax(lowest, first, lowest))
        for ref, values in zip(out, best, strict=True):
            access.store(ref.at[team * tiling.cluster + part, rows], values)


def _copy(tiling, count, column, first_row, operands, buffers):
    """Fill the ring, each stage as soon as all warpgroups that multiply are done with it.

    In a cluster these are the warpgroups of both blocks, because half of the rows goes to both.
    """
    axes = ("part",) if tiling.cluster > 1 else None

    def fetch(j):
        stage = lax.rem(j, tiling.stages)
        chunk = pl.ds(lax.rem(j, tiling.chunks) * tiling.chunk, tiling.chunk)
        columns = pl.ds(column(lax.div(j, tiling.chunks)), _BLOCK_N)
        filled = buffers.filled.at[stage]
        pl.when(j >= tiling.stages)(lambda: plgpu.barrier_wait(buffers.freed.at[stage]))
        part = operands.weight.at[tiling.part(chunk, columns)]
        plgpu.copy_gmem_to_smem(part, buffers.ring.at[stage], filled)
        rows = operands.x.at[pl.ds(first_row, tiling.copied), chunk]
        to_rows = buffers.tokens.at[stage, : tiling.copied]
        plgpu.copy_gmem_to_smem(rows, to_rows, filled, collective_axes=axes)

    @plgpu.warp_map  # one warp copies: arrivals count once, and other warps would do the same work
    def _(warp):
        pl.when(warp == 0)(lambda: pl.loop(0, count * tiling.chunks)(fetch))


def _multiply(tiling, count, tile, buffers):
    """The scores of a warpgroup's rows in the block's tile number `tile`, of `count`."""
    last = count * tiling.chunks - tiling.stages

    def release(j):
        """Free the stage of chunk `j`, if another chunk follows there."""
        pl.when((j >= 0) & (j < last))(
            lambda: plgpu.barrier_arrive(buffers.freed.at[lax.rem(j, tiling.stages)])
        )

    def all_chunks(sums):
        first = tile * tiling.chunks

        @pl.loop(0, tiling.chunks)
        def _(i):
            j = first + i
            stage = lax.rem(j, tiling.stages)
            plgpu.barrier_wait(buffers.filled.at[stage])
            weight = buffers.ring.at[stage]
            weight = weight.transpose((1, 0)) if tiling.by_column else weight
            plgpu.wgmma(sums, buffers.tokens.at[stage], weight)
            plgpu.wgmma_wait(1)  # the product of the chunk before this one is done
            release(jnp.where(i > 0, j - 1, -1))

        scores = sums[...]
        release(first + tiling.chunks - 1)
        return scores

    sums = plgpu.WGMMAAccumulatorRef((tiling.rows, _BLOCK_N), jnp.float32)
    return pl.run_scoped(all_chunks, sums)


def _mask(scores, start, forbidden, bounds):
    """`scores` of the columns from `start` on, with -inf at forbidden columns and beyond the last.

    `forbidden` has those of the same rows. `bounds` are the lowest and the highest forbidden
    column, and the number of columns.
    """
    low, high, ids = bounds

    def masked(scores):
        columns = start + _columns_of(scores)

        def mask_one(i, scores):
            column = access.load(forbidden.at[i], _BY_ROW)
            return jnp.where(columns == _broadcast(column, scores), -jnp.inf, scores)

        scores = jnp.where(columns < ids, scores, -jnp.inf)
        return lax.fori_loop(0, forbidden.shape[0], mask_one, scores)

    end = start + _BLOCK_N
    touches = (start <= high) & (low < end)
    return lax.cond((end > ids) | touches, masked, lambda scores: scores, scores)


def _update(best, scores, start):
    """The partial argmax of each row with these `scores`, whose first column is `start`."""
    score = jnp.max(scores, axis=1)
    is_best = scores == _broadcast(score, scores)
    # The lowest column, as the largest of the negated ones.
    column = start - jnp.max(jnp.where(is_best, -_columns_of(scores), -NO_COLUMN), axis=1)
    wins = score > best.score  # equal scores leave the column before
    return PartialArgmax(
        jnp.where(wins, score, best.score),
        jnp.where(wins, column, best.column),
        jnp.maximum(best.nearest, jnp.max(-jnp.abs(scores), axis=1)),
    )


def _columns_of(scores):
    """The column in the tile of each score."""
    return plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)


def _broadcast(x, scores):
    """A value a row, for each of the row's scores."""
    return lax.broadcast_in_dim(x, scores.shape, (0,))
