"""Kernel of `argmax_matmul` (Pallas, Mosaic GPU).

A block scores 128 columns at a time for up to 256 rows, and keeps the best score so far of each
row. One warp copies chunks of rows and weight into a ring. One or two warpgroups multiply, each
with half of the rows. Four threads hold a row's scores, so its maximum takes two shuffles.

Every tile of columns reads the rows again. With more than 128 rows this exceeds the bandwidth of
the L2 cache, so two neighbouring blocks with the same rows form a cluster: each copies half of a
chunk's rows to both.

In 8 bits a chunk has twice the features, and the weight is transposed: tensor cores take 8-bit
operands only with the features of a column contiguous.
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
_CHUNK_BYTES = 128  # bytes of a row or column in a chunk: one row of a swizzled tile
_REGISTERS = 232, 40  # registers per thread that multiplies (in two warpgroups), or copies
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


@functools.partial(jax.jit, static_argnames=("cluster", "interpret"))
def argmax_matmul_kernel(x, weight, forbidden, *, cluster=None, interpret=None):
    """Run `best_columns` for `x` in the dtype of `weight`, a `Dense` or a `Float8`.

    `cluster` blocks share their rows, by default 1 or 2; the interpreter cannot copy to several.
    """
    rows, ids = x.shape[0], weight.outer
    cluster = cluster or (2 if rows > 128 else 1)  # re-reading up to 128 rows is cheap
    # Each block of a cluster copies the same number of rows, in groups of 8.
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
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    table, low, high = _forbidden_table(forbidden, ids, tiling.padded)
    parts = PartialArgmax(*kernel(x, weight.array, table, low, high))
    return PartialArgmax(*(part[:rows] for part in combine(parts, axis=0)))


def _forbidden_table(forbidden, ids, rows):
    """Return the forbidden columns as `[n, rows]`, padded, and the lowest and highest of them.

    Few tiles of a large vocabulary have a forbidden column, because stop ids are close together.
    Comparing with the lowest and the highest lets a block skip the mask for all other tiles.
    """
    padding = (0, max(0, 1 - forbidden.shape[1])), (0, rows - forbidden.shape[0])
    table = jnp.pad(forbidden.T, padding, constant_values=NO_TOKEN)
    is_column = (table >= 0) & (table < ids)
    low = jnp.min(jnp.where(is_column, table, ids))
    high = jnp.max(jnp.where(is_column, table, NO_TOKEN))
    return table, low[None], high[None]


class _Operands(NamedTuple):
    x: Any
    weight: Any
    forbidden: Any  # columns of `_forbidden_table`; `low` and `high` are its bounds
    low: Any
    high: Any
    ids: int  # columns of the weight


class _Buffers(NamedTuple):
    """Shared memory of a block; `filled` and `freed` have a barrier for each stage of the ring."""

    tokens: Any
    ring: Any
    filled: Any
    freed: Any


@dataclasses.dataclass(frozen=True)
class _Tiling:
    """Distribution of rows and columns over the blocks."""

    copied: int  # rows copied per tile, at most all rows
    rows: int  # rows per warpgroup
    warpgroups: int  # warpgroups of a block that multiply; another one copies
    row_tiles: int
    column_tiles: int  # each has `_BLOCK_N` columns per block of a cluster
    teams: int  # clusters that share a tile of rows
    cluster: int
    inner: int
    dtype: Any
    by_column: bool  # True if the weight is `[ids, inner]`
    stages: int  # stages of the ring

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
        """Rows per block."""
        return self.warpgroups * self.rows

    @property
    def padded(self) -> int:
        """Rows of all tiles."""
        return self.row_tiles * self.tile

    @property
    def chunk(self) -> int:
        """Features per chunk."""
        return _CHUNK_BYTES // self.dtype.itemsize

    @property
    def chunks(self) -> int:
        return self.inner // self.chunk

    def part(self, features, columns) -> tuple[Any, Any]:
        """Return the index of these features and columns in the weight."""
        return (columns, features) if self.by_column else (features, columns)

    def scratch(self) -> dict[str, Any]:
        """Return the ring, tiled for wgmma, and its barriers: the fields of `_Buffers`."""
        of_weight = self.part(self.chunk, _BLOCK_N)
        return {
            "tokens": tensor_cores.tile(self.stages, self.tile, self.chunk, dtype=self.dtype),
            "ring": tensor_cores.tile(self.stages, *of_weight, dtype=self.dtype),
            "filled": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            # A chunk's rows are copied to all blocks of a cluster, so all must have freed the
            # stage.
            "freed": plgpu.ClusterBarrier(
                collective_axes=("part",), num_arrivals=self.warpgroups, num_barriers=self.stages
            ),
        }


def _block(tiling, operands, out, buffers):
    """Run a block: one warpgroup copies, the others multiply a share of the rows each."""
    team, part, warpgroup = (lax.axis_index(name) for name in ("team", "part", "warpgroup"))
    row_tile, team = lax.rem(team, tiling.row_tiles), lax.div(team, tiling.row_tiles)
    first_row = row_tile * tiling.tile
    count = lax.div(tiling.column_tiles - team + tiling.teams - 1, tiling.teams)

    def column(i):
        """Return the first column of this block's tile `i`, of `count`."""
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
    """Fill the ring, each stage once all warpgroups that multiply have freed it.

    In a cluster these are the warpgroups of both blocks, because half of the rows is copied to
    both.
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

    @plgpu.warp_map  # a single warp: more would repeat the copies and their barrier arrivals
    def _(warp):
        pl.when(warp == 0)(lambda: pl.loop(0, count * tiling.chunks)(fetch))


def _multiply(tiling, count, tile, buffers):
    """Return the scores of a warpgroup's rows in the block's tile number `tile`, of `count`."""
    last = count * tiling.chunks - tiling.stages

    def release(j):
        """Free the stage of chunk `j` if a later chunk reuses it."""
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
            plgpu.wgmma_wait(1)  # the previous chunk's wgmma is done
            release(jnp.where(i > 0, j - 1, -1))

        scores = sums[...]
        release(first + tiling.chunks - 1)
        return scores

    sums = plgpu.WGMMAAccumulatorRef((tiling.rows, _BLOCK_N), jnp.float32)
    return pl.run_scoped(all_chunks, sums)


def _mask(scores, start, forbidden, bounds):
    """Mask forbidden columns and those past the last with -inf; `start` is the first column.

    `forbidden` has the same rows. `bounds` are the lowest and the highest forbidden column, and the
    number of columns.
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
    """Return each row's partial argmax with `scores` included; `start` is their first column."""
    score = jnp.max(scores, axis=1)
    is_best = scores == _broadcast(score, scores)
    # The lowest column, as the maximum of the negated ones.
    column = start - jnp.max(jnp.where(is_best, -_columns_of(scores), -NO_COLUMN), axis=1)
    wins = score > best.score  # a tie keeps the earlier column
    return PartialArgmax(
        jnp.where(wins, score, best.score),
        jnp.where(wins, column, best.column),
        jnp.maximum(best.nearest, jnp.max(-jnp.abs(scores), axis=1)),
    )


def _columns_of(scores):
    """Return the column within the tile of each score."""
    return plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)


def _broadcast(x, scores):
    return lax.broadcast_in_dim(x, scores.shape, (0,))
