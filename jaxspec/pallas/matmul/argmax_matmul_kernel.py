"""`argmax_matmul` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block scores 128 columns at a time for up to 256 rows, and keeps the best so far of each row. A
warp copies chunks of rows and weight into a ring, one or two warpgroups multiply, half of the rows
each; a row's scores lie in four threads, so the best of them takes two exchanges. Of
more than 128 rows two neighbouring blocks, a cluster, have the same ones, which are read again for
every tile of columns: each copies half of a chunk's to both, or it would be more than the L2 cache
gives.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.gpu.tensor_cores import CHUNK
from jaxspec.pallas.matmul.scores import NO_COLUMN, NOTHING, best_of

_COLUMNS = 128  # of a tile
_REGISTERS = 232, 40  # of a thread that multiplies, where two warpgroups do, and of one that copies
_BY_ROW = plgpu.Layout.WGMMA.reduce(1)


@functools.partial(jax.jit, static_argnames=("cluster", "interpret"))
def argmax_matmul_kernel(x, weight, forbidden, *, cluster=None, interpret=None):
    """`argmax_matmul`; `interpret`: parameters of Mosaic's interpreter.

    `cluster`: blocks that share their rows; the interpreter knows no copies to several.
    """
    (rows, _), ids = x.shape, weight.shape[1]
    cluster = cluster or (2 if rows > 128 else 1)  # fewer rows are read again for little
    # A tile's rows are copied in groups of 8, the same number by each block of a cluster.
    x = jnp.pad(x, ((0, -rows % (8 * cluster)), (0, 0)))
    sizes = _Sizes.of(x.shape[0], weight, cluster)
    found = functools.partial(jax.ShapeDtypeStruct, (sizes.teams * cluster, sizes.padded))
    kernel = plgpu.kernel(
        functools.partial(_block, sizes),
        kernel_name="argmax_matmul",
        out_type=(found(jnp.float32), found(jnp.int32), found(jnp.float32)),
        scratch_types=sizes.scratch(x.dtype),
        grid=(sizes.teams * sizes.row_tiles,),
        grid_names=("team",),
        cluster=(cluster,),
        cluster_names=("part",),
        num_threads=sizes.warpgroups + 1,
        thread_name="warpgroup",
        # Safe without barriers but its own, and no maximum crosses warps.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return best_of(kernel(x, weight, *_asked(forbidden, ids, sizes.padded)), axis=0)[:rows]


def _asked(forbidden, ids, rows):
    """Forbidden columns, `[slots, rows]` with padding, and the lowest and the highest of all.

    Few tiles of a large vocabulary have any, for stop ids are neighbours: by these two a block
    finds that a tile has none.
    """
    padding = (0, max(0, 1 - forbidden.shape[1])), (0, rows - forbidden.shape[0])
    never = jnp.pad(forbidden.T, padding, constant_values=NOTHING)
    is_column = (never >= 0) & (never < ids)
    low = jnp.min(jnp.where(is_column, never, ids))
    high = jnp.max(jnp.where(is_column, never, NOTHING))
    return never, low[None], high[None]


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Of one call: which rows and columns are whose."""

    copied: int  # rows of a tile: no more than there are
    rows: int  # of a warpgroup
    warpgroups: int  # that multiply
    row_tiles: int
    column_tiles: int  # of a cluster's columns
    teams: int  # clusters that share a tile of rows
    cluster: int
    inner: int
    stages: int  # of the ring

    @staticmethod
    def of(rows, weight, cluster):
        inner, ids = weight.shape
        warpgroups, of_warpgroup = min(2, pl.cdiv(rows, 64)), 64 if rows <= 128 else 128
        row_tiles = pl.cdiv(rows, warpgroups * of_warpgroup)
        column_tiles = pl.cdiv(ids, cluster * _COLUMNS)
        teams = min(max(1, device.MULTIPROCESSORS // cluster // row_tiles), column_tiles)
        stages = device.room(1) // (2 * CHUNK * (warpgroups * of_warpgroup + _COLUMNS))
        copied = min(warpgroups * of_warpgroup, rows)
        return _Sizes(
            copied, of_warpgroup, warpgroups, row_tiles, column_tiles, teams, cluster, inner, stages
        )

    @property
    def tile(self) -> int:
        """Rows of a block."""
        return self.warpgroups * self.rows

    @property
    def padded(self) -> int:
        return self.row_tiles * self.tile

    @property
    def chunks(self) -> int:
        return self.inner // CHUNK

    def scratch(self, dtype) -> dict[str, Any]:
        """The ring, as tensor cores want it."""
        return {
            "tokens": tensor_cores.tile(self.stages, self.tile, CHUNK, dtype=dtype),
            "ring": tensor_cores.tile(self.stages, CHUNK, _COLUMNS, dtype=dtype),
            "arrived": plgpu.Barrier(num_arrivals=2, num_barriers=self.stages),
            # A chunk's rows go to all blocks of a cluster, so all must be done with the last.
            "free": plgpu.ClusterBarrier(
                collective_axes=("part",), num_arrivals=self.warpgroups, num_barriers=self.stages
            ),
        }


def _block(
    sizes, x, weight, never, low, high, best, ids, nearest, *, tokens, ring, arrived, free
):  # fmt: skip
    """Share a block's columns and rows among its warpgroups."""
    team, part, warpgroup = (lax.axis_index(name) for name in ("team", "part", "warpgroup"))
    row_tile, team = lax.rem(team, sizes.row_tiles), lax.div(team, sizes.row_tiles)
    first_row = row_tile * sizes.tile
    count = lax.div(sizes.column_tiles - team + sizes.teams - 1, sizes.teams)

    def column(i):
        return ((team + i * sizes.teams) * sizes.cluster + part) * _COLUMNS

    @pl.when(warpgroup == sizes.warpgroups)
    def _():
        if sizes.warpgroups > 1:
            plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        _copy(sizes, count, column, x, first_row, weight, tokens, ring, arrived, free)

    @pl.when(warpgroup < sizes.warpgroups)
    def _():
        if sizes.warpgroups > 1:
            plgpu.set_max_registers(_REGISTERS[0], action="increase")
        mine = warpgroup * sizes.rows
        rows, here = pl.ds(first_row + mine, sizes.rows), pl.ds(mine, sizes.rows)
        bounds = low[0], high[0], weight.shape[1]

        def step(i, so_far):
            scores = _multiply(sizes, count, tokens.at[:, here], ring, arrived, free, i)
            scores = _without(scores, column(i), never.at[:, rows], bounds)
            return _better(so_far, scores, column(i))

        def everywhere(value, dtype):
            return plgpu.layout_cast(jnp.full(sizes.rows, value, dtype), _BY_ROW)

        none, first = everywhere(-jnp.inf, jnp.float32), everywhere(0, jnp.int32)
        so_far = lax.fori_loop(0, count, step, (none, first, none))
        for out, values in zip((best, ids, nearest), so_far, strict=True):
            access.store(out.at[team * sizes.cluster + part, rows], values)


def _copy(sizes, count, column, x, first_row, weight, tokens, ring, arrived, free):
    """Fill the ring, as soon as all that multiply are done with a chunk.

    In a cluster those of both blocks, for whom half of the rows are.
    """
    axes = ("part",) if sizes.cluster > 1 else None

    def fetch(j):
        stage = lax.rem(j, sizes.stages)
        chunk = pl.ds(lax.rem(j, sizes.chunks) * CHUNK, CHUNK)
        columns = pl.ds(column(lax.div(j, sizes.chunks)), _COLUMNS)
        pl.when(j >= sizes.stages)(lambda: plgpu.barrier_wait(free.at[stage]))
        plgpu.copy_gmem_to_smem(weight.at[chunk, columns], ring.at[stage], arrived.at[stage])
        part, to = x.at[pl.ds(first_row, sizes.copied), chunk], tokens.at[stage, : sizes.copied]
        plgpu.copy_gmem_to_smem(part, to, arrived.at[stage], collective_axes=axes)

    @plgpu.warp_map  # one warp: arrivals count once, and the others would run the same
    def _(warp):
        pl.when(warp == 0)(lambda: pl.loop(0, count * sizes.chunks)(fetch))


def _multiply(sizes, count, tokens, ring, arrived, free, tile):
    """The scores of a warpgroup's rows in a block's tile of columns."""
    last = count * sizes.chunks - sizes.stages

    def release(j):
        """Chunk `j`, where another comes in its place."""
        pl.when((j >= 0) & (j < last))(
            lambda: plgpu.barrier_arrive(free.at[lax.rem(j, sizes.stages)])
        )

    def all_chunks(sums):
        first = tile * sizes.chunks

        @pl.loop(0, sizes.chunks)
        def _(i):
            j = first + i
            stage = lax.rem(j, sizes.stages)
            plgpu.barrier_wait(arrived.at[stage])
            plgpu.wgmma(sums, tokens.at[stage], ring.at[stage])
            plgpu.wgmma_wait(1)  # the chunk before this one is done with
            release(jnp.where(i > 0, j - 1, -1))

        scores = sums[...]
        release(first + sizes.chunks - 1)
        return scores

    return pl.run_scoped(all_chunks, plgpu.WGMMAAccumulatorRef((sizes.rows, _COLUMNS), jnp.float32))


def _without(scores, start, never, bounds):
    """Scores of the columns from `start` on without those passed over, and those beyond the last.

    `never`: of each row. `bounds`: the lowest and the highest of all, and the number of columns.
    """
    low, high, ids = bounds

    def mask(scores):
        columns = start + _places(scores)

        def one(slot, scores):
            column = access.load(never.at[slot], _BY_ROW)
            return jnp.where(columns == _spread(column, scores), -jnp.inf, scores)

        scores = jnp.where(columns < ids, scores, -jnp.inf)
        return lax.fori_loop(0, never.shape[0], one, scores)

    end = start + _COLUMNS
    touches = (start <= high) & (low < end)
    return lax.cond((end > ids) | touches, mask, lambda scores: scores, scores)


def _better(so_far, scores, start):
    """The best of each row, the first column that has it, and minus how near to 0 a score is.

    The last is NaN if a score is, and -inf if none is finite. `start`: the scores' first column.
    """
    best, best_at, nearest = so_far
    score = jnp.max(scores, axis=1)
    is_best = scores == _spread(score, scores)
    at = start - jnp.max(jnp.where(is_best, -_places(scores), -NO_COLUMN), axis=1)
    wins = score > best  # of equals the first
    return (
        jnp.where(wins, score, best),
        jnp.where(wins, at, best_at),
        jnp.maximum(nearest, jnp.max(-jnp.abs(scores), axis=1)),
    )


def _places(scores):
    """Of each score, which of the tile's columns it is of."""
    return plgpu.broadcasted_iota(jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA)


def _spread(x, scores):
    """A row's value for each of its scores."""
    return lax.broadcast_in_dim(x, scores.shape, (0,))
