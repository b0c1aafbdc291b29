"""Kernels of `moe_experts` (Pallas, Mosaic GPU): matmuls of tiles with their experts.

A block has one tile (an expert and some tokens) and some columns. It computes the transposed
matmul, as the kernels of `matmul` do: `y.T = matrix @ x.T`. The M of wgmma is 64 output columns,
which are rows of the matrix as published, and its N as few as 8 tokens. Matrix and tokens are
copied through one ring, a chunk of features at a time. Blocks without work exit at once, so only
chosen experts are read.
"""

import dataclasses
import functools
from collections.abc import Callable
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts, tensor_cores
from jaxspec.pallas.matmul.products import BLOCK_N


@dataclasses.dataclass(frozen=True)
class _Product:
    """Tiling of a block's matmul: `rows` tokens and `pieces * BLOCK_N` columns."""

    rows: int
    pieces: int
    inner: int  # features
    chunk: int  # features per chunk
    stages: int  # chunks in the ring
    dtype: Any

    @staticmethod
    def of(rows: int, pieces: int, matrix: Any, blocks: int) -> "_Product":
        """Return the tiling with the largest ring such that `blocks` fit on a multiprocessor."""
        inner, size = matrix.shape[2], matrix.dtype.itemsize
        chunk = 128 if rows <= 32 and inner % 128 == 0 else 64
        stage = size * chunk * (rows + pieces * BLOCK_N)
        room = device.room(1) // blocks - 2048 - rows * BLOCK_N * pieces * 4
        stages = max(2, min(inner // chunk, room // stage))
        return _Product(rows, pieces, inner, chunk, stages, matrix.dtype)

    def scratch(self) -> dict[str, Any]:
        tile = functools.partial(tensor_cores.tile, dtype=self.dtype)
        return {
            "tokens": tile(self.stages, self.rows, self.chunk),
            "ring": tile(self.stages, self.pieces, BLOCK_N, self.chunk),
            "filled": plgpu.Barrier(num_arrivals=self.pieces + 1, num_barriers=self.stages),
        }

    @property
    def chunks(self) -> int:
        return self.inner // self.chunk

    def start(self, fetch: Callable) -> None:
        for j in range(min(self.stages, self.chunks)):
            fetch(j, j)

    def fetch(self, x, matrix, columns, *, tokens, ring, filled):
        """Return a function that copies chunk `j` of `x` and of pieces of `matrix` to a stage."""

        def fetch(j, stage):
            chunk = pl.ds(j * self.chunk, self.chunk)
            for piece, column in enumerate(columns):
                part = matrix.at[pl.ds(column, BLOCK_N), chunk]
                plgpu.copy_gmem_to_smem(part, ring.at[stage, piece], filled.at[stage])
            plgpu.copy_gmem_to_smem(x.at[:, chunk], tokens.at[stage], filled.at[stage])

        return fetch

    def run(self, fetch: Callable, chunks: Any = None, *, tokens, ring, filled):
        """Return the transposed matmul of each piece, float32 `[BLOCK_N, rows]`.

        It sums over `chunks` chunks; None means all features.
        """
        chunks = self.chunks if chunks is None else chunks

        def all_chunks(*sums):
            def step(j, stage):
                plgpu.barrier_wait(filled.at[stage])
                rows = tokens.at[stage].transpose((1, 0))
                for piece, sum_ in enumerate(sums):
                    plgpu.wgmma(sum_, ring.at[stage, piece], rows)
                plgpu.wgmma_wait(self.pieces)  # the previous chunk's wgmmas are done
                refill = j - 1 + self.stages

                @pl.when((j > 0) & (refill < chunks))
                def _():
                    plgpu.commit_smem()  # also a barrier: all warps are done
                    fetch(refill, jnp.where(stage == 0, self.stages - 1, stage - 1))

                return access.next_stage(stage, self.stages)

            lax.fori_loop(0, chunks, step, jnp.int32(0))
            return [sum_[...] for sum_ in sums]

        sums = [plgpu.WGMMAAccumulatorRef((BLOCK_N, self.rows), jnp.float32)] * self.pieces
        return pl.run_scoped(all_chunks, *sums)


class _Row(NamedTuple):
    """Row of a tile: whether it is used, and the token and the part of its output."""

    is_real: Any
    token: Any
    part: Any


@dataclasses.dataclass(frozen=True)
class Direct:
    """Tiles of up to 8 tokens, which are passed whole to every expert.

    Each choice requests a tile; the first choice of an expert computes it. The arrays are those of
    `Choices`.
    """

    tokens: int
    parts: int  # experts per token
    none: int  # the expert of padding
    rows = 8  # rows per tile: the smallest N of wgmma

    @property
    def tiles(self) -> int:
        return self.tokens * self.parts

    def tile(self, arrays, index) -> "_DirectTile":
        experts, weights = arrays
        token, size = lax.div(index, self.parts), self.tiles
        layout = layouts.lane_layout(size)
        return _DirectTile(
            self,
            index,
            expert=experts[token, index - token * self.parts],
            table=access.load(experts.reshape(size), layout),
            place=plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout),
            weights_of=weights,
        )


class _DirectTile(NamedTuple):
    """Tile of `Direct`, with all choices in the registers of every warp."""

    work: Direct
    index: Any  # index of the tile's choice
    expert: Any
    table: Any  # expert of each choice
    place: Any  # index of each choice
    weights_of: Any  # weight of each choice, in global memory

    @property
    def is_asked(self):
        """True if no earlier choice has the same expert, or if it is padding."""
        is_same = (self.place < self.index) & (self.table == self.expert)
        has_earlier = jnp.max(jnp.where(is_same, 1, 0)) > 0
        return (self.expert == self.work.none) | ~has_earlier

    def rows(self) -> list[_Row]:
        """Return the output location of each row, one for each token."""
        found, parts = [], self.work.parts
        for token in range(self.work.tokens):
            first = token * parts
            is_mine = (self.table == self.expert) & (first <= self.place)
            is_mine &= self.place < first + parts
            at = jnp.max(jnp.where(is_mine, self.place, -1))
            # A padding token has the padding expert several times; each of its choices writes one
            # part.
            of_own = jnp.where(lax.div(self.index, parts) == token, self.index, -1)
            at = jnp.where(self.expert == self.work.none, of_own, at)
            found.append(_Row(at >= 0, token, jnp.maximum(at - first, 0)))
        return found

    def weights(self, shape):
        """Return the weight of each row, broadcast to a transposed matmul."""
        place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        of_rows = jnp.zeros(shape, jnp.float32)
        for row in self.rows():
            weight = self.weights_of[row.token, row.part]
            of_rows = jnp.where(place == row.token, weight, of_rows)
        return of_rows


@dataclasses.dataclass(frozen=True)
class Listed:
    """Tiles of a `WorkList`.

    The arrays are its `expert` and `count`, then the choices and weights of `to_tiles_kernel`.
    """

    tokens: int
    parts: int
    none: int
    tiles: int
    rows: int

    def tile(self, arrays, index) -> "_ListedTile":
        expert, count, choices, weights = arrays
        return _ListedTile(self, expert[index], count, choices.at[index], weights.at[index], index)


class _ListedTile(NamedTuple):
    work: Listed
    expert: Any
    count: Any  # real rows of each tile; in global memory, like the next two
    choices: Any  # choices of this tile's rows
    weights_of: Any
    index: Any

    @property
    def is_asked(self):
        return self.expert <= self.work.none

    def rows(self) -> list[_Row]:
        held, found, parts = self.count[self.index], [], self.work.parts
        for row in range(self.work.rows):
            is_real = row < held
            choice = jnp.where(is_real, self.choices[row], 0)
            token = lax.div(choice, parts)
            found.append(_Row(is_real, token, choice - token * parts))
        return found

    def weights(self, shape):
        of_rows = access.load(self.weights_of, plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(of_rows, shape, (1,))


@functools.partial(jax.jit, static_argnames=("work", "activation", "interpret"))
def up_kernel(x, up, arrays, activation, *, work, interpret=None):
    """Return each tile's activated first matmul, times the rows' weights: `[tiles, rows, inner]`.

    The weights are applied here, before the values are rounded, so that later kernels need not read
    them. `x` is `[tokens, features]` for `Direct`, else `[tiles, rows, features]`; `arrays` are
    those of `work`.

    A block has two pieces of the matrix: one of gate and one of up, or two adjacent ones of up
    alone. If the number of pieces is odd, the last block's second piece is filled with zeros, and
    its output is dropped.
    """
    inner = up.shape[1] // activation.pieces
    neighbours = 2 // activation.pieces  # output columns per block, in pieces
    starts = [BLOCK_N * i + inner * j for i in range(neighbours) for j in range(activation.pieces)]
    columns = pl.cdiv(inner, BLOCK_N * neighbours)
    is_alone = work.rows > 64 or work.tiles * columns <= device.MULTIPROCESSORS
    product = _Product.of(work.rows, len(starts), up, blocks=1 if is_alone else 2)

    def body(x, up, *rest, out, **ring):
        *arrays, hidden = rest
        index, column = lax.axis_index("tile"), lax.axis_index("column") * BLOCK_N * neighbours
        tile = work.tile(arrays, index)

        @pl.when(tile.is_asked & (tile.expert < work.none))
        def _():
            # A traced 0, because jax 0.12 rejects rows that are statically out of bounds.
            rows = x.at[pl.ds(index * 0, work.rows)] if len(x.shape) == 2 else x.at[index]
            fetch = product.fetch(
                rows, up.at[tile.expert], [column + start for start in starts], **ring
            )
            product.start(fetch)
            weights = tile.weights((BLOCK_N, work.rows))
            # The matmul is rounded first, as if it had been stored.
            rounded = [
                sum_.astype(out.dtype).astype(jnp.float32) for sum_ in product.run(fetch, **ring)
            ]
            size = activation.pieces
            of_each = [rounded[i : i + size] for i in range(0, len(rounded), size)]
            activated = [activation.of_blocks(pieces) * weights for pieces in of_each]
            _put_tiles(activated, out, hidden.at[index], column)

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_up",
        out_type=jax.ShapeDtypeStruct((work.tiles, work.rows, inner), x.dtype),
        scratch_types=product.scratch()
        | {"out": tensor_cores.tile(work.rows, BLOCK_N, dtype=x.dtype)},
        grid=(work.tiles, columns),
        grid_names=("tile", "column"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, up, *arrays)


@functools.partial(jax.jit, static_argnames=("work", "interpret"))
def down_kernel(hidden, down, arrays, *, work, interpret=None):
    """Multiply each row of `hidden` with its matrix: float32 `[parts, tokens, features]`."""
    features = down.shape[1]
    product = _Product.of(work.rows, 1, down, blocks=4)

    def body(hidden, down, *rest, out, **ring):
        *arrays, y = rest
        index, column = lax.axis_index("tile"), lax.axis_index("column") * BLOCK_N
        tile = work.tile(arrays, index)

        def put_out(rows):
            plgpu.commit_smem()  # also a barrier: all warps are done
            for i, row in enumerate(rows):
                _put_row(out.at[i], y, row, column)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(tile.is_asked & (tile.expert < work.none))
        def _():
            fetch = product.fetch(hidden.at[index], down.at[tile.expert], [column], **ring)
            product.start(fetch)
            rows = tile.rows()  # while the copies are in flight
            (sum_,) = product.run(fetch, **ring)
            access.store(out.T, plgpu.layout_cast(sum_, plgpu.Layout.WGMMA_TRANSPOSED))
            put_out(rows)

        @pl.when(tile.is_asked & (tile.expert == work.none))
        def _():
            out[...] = jnp.zeros(out.shape, out.dtype)
            put_out(tile.rows())

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_down",
        out_type=jax.ShapeDtypeStruct((work.parts, work.tokens, features), jnp.float32),
        scratch_types=product.scratch() | {"out": plgpu.SMEM((work.rows, BLOCK_N), jnp.float32)},
        grid=(work.tiles, features // BLOCK_N),
        grid_names=("tile", "column"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(hidden, down, *arrays)


def _put_row(values, y, row: _Row, column):
    """Start the copy of a row's columns to its output location, if the row is real."""

    @pl.when(row.is_real)
    def _():
        target = y.at[row.part, row.token, pl.ds(column, values.shape[0])]
        plgpu.copy_smem_to_gmem(values, target)


@functools.partial(jax.jit, static_argnames=("parts", "interpret"))
def one_token_down_kernel(hidden, down, experts, *, parts, interpret=None):
    """Run `down_kernel` for one token, and sum its experts: float32 `[parts, 1, features]`.

    `hidden` is `[choices, 8, inner]`, with only the first row of each real; `experts` are those of
    `Choices`. Part `i` is the sum over the choices `i`, `i + parts`, `i + 2 * parts` and so on: one
    matmul over the features of all these experts, one after the other.
    """
    (none, features, _), count = down.shape, hidden.shape[0]
    product = _Product.of(hidden.shape[1], 1, down, blocks=1)

    def body(hidden, down, experts, y, *, out, **ring):
        part, column = lax.axis_index("part"), lax.axis_index("column") * BLOCK_N
        layout = layouts.lane_layout(count)
        table = access.load(experts.at[0], layout)
        place = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
        is_live = experts[0, 0] < none

        def fetch(j, stage):
            index = lax.div(j, product.chunks)
            choice = part + index * parts
            expert = jnp.max(jnp.where(place == choice, table, 0))
            one = product.fetch(hidden.at[choice], down.at[expert], [column], **ring)
            one(j - index * product.chunks, stage)

        @pl.when(is_live)
        def _():
            chunks = product.chunks * lax.div(count - part + parts - 1, parts)
            for j in range(product.stages):  # possibly of one expert and part of the next
                pl.when(j < chunks)(functools.partial(fetch, jnp.int32(j), j))
            (sum_,) = product.run(fetch, chunks, **ring)
            access.store(out.T, plgpu.layout_cast(sum_, plgpu.Layout.WGMMA_TRANSPOSED))

        @pl.when(~is_live)
        def _():
            out[...] = jnp.zeros(out.shape, out.dtype)

        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out.at[0], y.at[part, 0, pl.ds(column, BLOCK_N)])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_one_token_down",
        out_type=jax.ShapeDtypeStruct((parts, 1, features), jnp.float32),
        scratch_types=product.scratch()
        | {"out": plgpu.SMEM((hidden.shape[1], BLOCK_N), jnp.float32)},
        grid=(parts, features // BLOCK_N),
        grid_names=("part", "column"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(hidden, down, experts)


def _put_tiles(pieces, out, rows, column):
    """Write transposed pieces side by side through `out` to `rows`, from `column` on."""
    for i, piece in enumerate(pieces):
        if i:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # also a barrier: all warps are done
        values = piece.astype(out.dtype)
        out.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, rows.at[:, pl.ds(column + i * BLOCK_N, BLOCK_N)])
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("work", "interpret"))
def tiled_down_kernel(hidden, down, arrays, *, work, interpret=None):
    """Multiply the rows of all tiles: `[tiles, rows, features]` in the dtype of `hidden`."""
    features = down.shape[1]
    pieces, blocks = (4, 2) if work.rows <= 64 else (2, 1)
    pieces = gcd(pieces, features // BLOCK_N)
    width, product = pieces * BLOCK_N, _Product.of(work.rows, pieces, down, blocks)

    def body(hidden, down, *rest, out, **ring):
        *arrays, y = rest
        index, column = lax.axis_index("tile"), lax.axis_index("column") * width
        tile = work.tile(arrays, index)

        @pl.when(tile.expert < work.none)
        def _():
            columns = [column + piece * BLOCK_N for piece in range(pieces)]
            fetch = product.fetch(hidden.at[index], down.at[tile.expert], columns, **ring)
            product.start(fetch)
            _put_tiles(product.run(fetch, **ring), out, y.at[index], column)

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_tiled_down",
        out_type=jax.ShapeDtypeStruct((work.tiles, work.rows, features), hidden.dtype),
        scratch_types=product.scratch()
        | {"out": tensor_cores.tile(work.rows, BLOCK_N, dtype=hidden.dtype)},
        grid=(work.tiles, features // width),
        grid_names=("tile", "column"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(hidden, down, *arrays)
