"""The kernels of `moe_experts` (Pallas, Mosaic GPU): the products of tiles with their experts.

A block has one tile, which is an expert and some tokens, and some columns. It computes the
transposed product, as the kernels of `matmul` do: `y.T = matrix @ x.T`. wgmma takes 64 columns of
the product on one side, which are rows of the matrix as published, and as few as 8 tokens on the
other. Matrix and tokens come through one ring, a chunk of features at a time. Blocks without work
end at once, so only the experts that were chosen are read.
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

_PARAMS = plgpu.CompilerParams(
    # Its own barriers are enough.
    unsafe_no_auto_barriers=True,
    reduction_scratch_bytes=0,
)


@dataclasses.dataclass(frozen=True)
class _Product:
    """The product of one block: `rows` tokens and `pieces * BLOCK_N` columns."""

    rows: int
    pieces: int
    inner: int  # features
    chunk: int  # of them
    stages: int  # chunks in the ring
    dtype: Any

    @staticmethod
    def of(rows: int, pieces: int, matrix: Any, blocks: int) -> "_Product":
        """The product with the largest ring of which a multiprocessor has room for `blocks`."""
        inner, size = matrix.shape[2], matrix.dtype.itemsize
        chunk = 128 if rows <= 32 and inner % 128 == 0 else 64
        stage = size * chunk * (rows + pieces * BLOCK_N)
        room = device.room(1) // blocks - 2048 - rows * BLOCK_N * pieces * 4
        stages = max(2, min(inner // chunk, room // stage))
        return _Product(rows, pieces, inner, chunk, stages, matrix.dtype)

    def scratch(self) -> dict[str, Any]:
        """Shared memory for the ring, as tensor cores read it."""
        tile = functools.partial(tensor_cores.tile, dtype=self.dtype)
        return {
            "tokens": tile(self.stages, self.rows, self.chunk),
            "ring": tile(self.stages, self.pieces, BLOCK_N, self.chunk),
            "filled": plgpu.Barrier(num_arrivals=self.pieces + 1, num_barriers=self.stages),
        }

    @property
    def chunks(self) -> int:
        """Chunks of the features."""
        return self.inner // self.chunk

    def start(self, fetch: Callable) -> None:
        """Start the copies of as many chunks as the ring holds."""
        for j in range(min(self.stages, self.chunks)):
            fetch(j, j)

    def fetch(self, x, matrix, columns, *, tokens, ring, filled):
        """What starts the copies of chunk `j` to a stage: rows of `x`, and pieces of `matrix`."""

        def fetch(j, stage):
            chunk = pl.ds(j * self.chunk, self.chunk)
            for piece, column in enumerate(columns):
                part = matrix.at[pl.ds(column, BLOCK_N), chunk]
                plgpu.copy_gmem_to_smem(part, ring.at[stage, piece], filled.at[stage])
            plgpu.copy_gmem_to_smem(x.at[:, chunk], tokens.at[stage], filled.at[stage])

        return fetch

    def run(self, fetch: Callable, chunks: Any = None, *, tokens, ring, filled):
        """The transposed product of each piece, float32 `[BLOCK_N, rows]`.

        It is over `chunks` chunks; None: over the features.
        """
        chunks = self.chunks if chunks is None else chunks

        def all_chunks(*sums):
            def step(j, stage):
                plgpu.barrier_wait(filled.at[stage])
                rows = tokens.at[stage].transpose((1, 0))
                for piece, sum_ in enumerate(sums):
                    plgpu.wgmma(sum_, ring.at[stage, piece], rows)
                plgpu.wgmma_wait(self.pieces)  # the products of the chunk before are done
                refill = j - 1 + self.stages

                @pl.when((j > 0) & (refill < chunks))
                def _():
                    plgpu.commit_smem()  # by all warps
                    fetch(refill, jnp.where(stage == 0, self.stages - 1, stage - 1))

                return access.next_stage(stage, self.stages)

            lax.fori_loop(0, chunks, step, jnp.int32(0))
            return [sum_[...] for sum_ in sums]

        sums = [plgpu.WGMMAAccumulatorRef((BLOCK_N, self.rows), jnp.float32)] * self.pieces
        return pl.run_scoped(all_chunks, *sums)


class _Row(NamedTuple):
    """A row of a tile: whether it is real, and where its output goes."""

    is_real: Any
    token: Any
    part: Any


@dataclasses.dataclass(frozen=True)
class Direct:
    """The tiles of up to 8 tokens, which every expert gets whole.

    Each choice asks for a tile; the first of an expert gets it. The arrays are those of `Choices`.
    """

    tokens: int
    parts: int  # experts of a token
    none: int  # the expert of padding
    rows = 8  # of a tile: the smallest N of wgmma

    @property
    def tiles(self) -> int:
        """Choices."""
        return self.tokens * self.parts

    def tile(self, arrays, index) -> "_DirectTile":
        """The tile that a choice asks for."""
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
    """A tile of `Direct`, with all choices in the registers of every warp."""

    work: Direct
    index: Any  # of the choice that asks for it
    expert: Any
    table: Any  # the expert of each choice
    place: Any  # the index of each choice
    weights_of: Any  # the weight of each choice, in memory

    @property
    def is_asked(self):
        """Whether it is to be done: no choice before this one asks for the same."""
        is_same = (self.place < self.index) & (self.table == self.expert)
        has_earlier = jnp.max(jnp.where(is_same, 1, 0)) > 0
        return (self.expert == self.work.none) | ~has_earlier

    def rows(self) -> list[_Row]:
        """Where the output of each row goes; there is one for each token."""
        found, parts = [], self.work.parts
        for token in range(self.work.tokens):
            first = token * parts
            is_mine = (self.table == self.expert) & (first <= self.place)
            is_mine &= self.place < first + parts
            at = jnp.max(jnp.where(is_mine, self.place, -1))
            # Padding has an expert several times; each of its choices does its own.
            of_own = jnp.where(lax.div(self.index, parts) == token, self.index, -1)
            at = jnp.where(self.expert == self.work.none, of_own, at)
            found.append(_Row(at >= 0, token, jnp.maximum(at - first, 0)))
        return found

    def weights(self, shape):
        """The weight of each row, in all columns of a transposed product."""
        place = plgpu.broadcasted_iota(jnp.int32, shape, 1, layout=plgpu.Layout.WGMMA)
        of_rows = jnp.zeros(shape, jnp.float32)
        for row in self.rows():
            weight = self.weights_of[row.token, row.part]
            of_rows = jnp.where(place == row.token, weight, of_rows)
        return of_rows


@dataclasses.dataclass(frozen=True)
class Listed:
    """The tiles of a `WorkList`.

    The arrays are its `expert` and `count`, then the choices and weights of `to_tiles_kernel`.
    """

    tokens: int
    parts: int
    none: int
    tiles: int
    rows: int

    def tile(self, arrays, index) -> "_ListedTile":
        """A tile of the list."""
        expert, count, choices, weights = arrays
        return _ListedTile(self, expert[index], count, choices.at[index], weights.at[index], index)


class _ListedTile(NamedTuple):
    """A tile of `Listed`."""

    work: Listed
    expert: Any
    count: Any  # of each tile, in memory, as the next two
    choices: Any  # of this tile's rows
    weights_of: Any
    index: Any

    @property
    def is_asked(self):
        """Whether there is work in it."""
        return self.expert <= self.work.none

    def rows(self) -> list[_Row]:
        """Where the output of each row goes."""
        held, found, parts = self.count[self.index], [], self.work.parts
        for row in range(self.work.rows):
            is_real = row < held
            choice = jnp.where(is_real, self.choices[row], 0)
            token = lax.div(choice, parts)
            found.append(_Row(is_real, token, choice - token * parts))
        return found

    def weights(self, shape):
        """The weight of each row, in all columns of a transposed product."""
        of_rows = access.load(self.weights_of, plgpu.Layout.WGMMA.reduce(0))
        return lax.broadcast_in_dim(of_rows, shape, (1,))


@functools.partial(jax.jit, static_argnames=("work", "activation", "interpret"))
def up_kernel(x, up, arrays, activation, *, work, interpret=None):
    """The activated product of each tile, times the rows' weights: `[tiles, rows, inner]`.

    The weights come in here, before the values are rounded, so that what follows need not know
    them. `x` is `[tokens, features]` for `Direct`, else `[tiles, rows, features]`; `arrays` are
    those of `work`. `interpret` has parameters of Mosaic's interpreter, here and below.

    A block has two pieces of the matrix: of gate and up, or of up alone two neighbours. Where the
    number of pieces is odd, the last block's second arrives as zeros and its output is dropped.
    """
    inner = up.shape[1] // activation.pieces
    neighbours = 2 // activation.pieces  # columns of the output that a block has, in pieces
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
            # A traced 0: jax 0.12 refuses rows where it can see that the array lacks them.
            rows = x.at[pl.ds(index * 0, work.rows)] if len(x.shape) == 2 else x.at[index]
            fetch = product.fetch(
                rows, up.at[tile.expert], [column + start for start in starts], **ring
            )
            product.start(fetch)
            weights = tile.weights((BLOCK_N, work.rows))
            # The product is rounded first, as if it had been put out.
            rounded = [
                sum_.astype(out.dtype).astype(jnp.float32) for sum_ in product.run(fetch, **ring)
            ]
            size = activation.pieces
            of_each = [rounded[i : i + size] for i in range(0, len(rounded), size)]
            activated = [activation.of_pieces(pieces) * weights for pieces in of_each]
            _put_tiles(activated, out, hidden.at[index], column)

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_up",
        out_type=jax.ShapeDtypeStruct((work.tiles, work.rows, inner), x.dtype),
        scratch_types=product.scratch()
        | {"out": tensor_cores.tile(work.rows, BLOCK_N, dtype=x.dtype)},
        grid=(work.tiles, columns),
        grid_names=("tile", "column"),
        compiler_params=_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, up, *arrays)


@functools.partial(jax.jit, static_argnames=("work", "interpret"))
def down_kernel(hidden, down, arrays, *, work, interpret=None):
    """Float32 `[parts, tokens, features]`: each row of `hidden` times its matrix."""
    features = down.shape[1]
    product = _Product.of(work.rows, 1, down, blocks=4)

    def body(hidden, down, *rest, out, **ring):
        *arrays, y = rest
        index, column = lax.axis_index("tile"), lax.axis_index("column") * BLOCK_N
        tile = work.tile(arrays, index)

        def put_out(rows):
            plgpu.commit_smem()  # by all warps
            for i, row in enumerate(rows):
                _put_row(out.at[i], y, row, column)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(tile.is_asked & (tile.expert < work.none))
        def _():
            fetch = product.fetch(hidden.at[index], down.at[tile.expert], [column], **ring)
            product.start(fetch)
            rows = tile.rows()  # while the copies are under way
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
        compiler_params=_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(hidden, down, *arrays)


def _put_row(values, y, row: _Row, column):
    """Start the copy of a row's columns to where they belong, if the row is real."""

    @pl.when(row.is_real)
    def _():
        target = y.at[row.part, row.token, pl.ds(column, values.shape[0])]
        plgpu.copy_smem_to_gmem(values, target)


@functools.partial(jax.jit, static_argnames=("parts", "interpret"))
def one_token_down_kernel(hidden, down, experts, *, parts, interpret=None):
    """`down_kernel` for one token, which sums its experts up: float32 `[parts, 1, features]`.

    `hidden` is `[choices, 8, inner]`, of which the first row of each is real; `experts` are those
    of `Choices`. Part `i` is the sum over the choices `i`, `i + parts`, `i + 2 * parts` and so on:
    one product, whose features are those of all these experts, one after the other.
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
            for j in range(product.stages):  # which may be those of one expert and some of the next
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
        compiler_params=_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(hidden, down, experts)


def _put_tiles(pieces, out, rows, column):
    """Write transposed pieces through `out` to `rows`, from a column on, side by side."""
    for i, piece in enumerate(pieces):
        if i:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            plgpu.commit_smem()  # by all warps
        values = piece.astype(out.dtype)
        out.T[...] = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out, rows.at[:, pl.ds(column + i * BLOCK_N, BLOCK_N)])
    plgpu.wait_smem_to_gmem(0)


@functools.partial(jax.jit, static_argnames=("work", "interpret"))
def tiled_down_kernel(hidden, down, arrays, *, work, interpret=None):
    """The rows of all tiles, `[tiles, rows, features]` in the dtype of `hidden`."""
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
        compiler_params=_PARAMS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(hidden, down, *arrays)
