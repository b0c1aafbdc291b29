"""Kernels of `moe_experts` (Pallas, Mosaic GPU): matmuls of tiles with their experts.

A block has one tile (an expert and some tokens) and some columns. It computes the transposed
matmul, as the kernels of `matmul` do: `y.T = matrix @ x.T`. The M of wgmma is 64 output columns,
which are rows of the matrix as published, and its N as few as 8 tokens. Matrix and tokens are
copied through one ring, a chunk of features at a time. Blocks without work exit at once, so only
chosen experts are read.
"""

import dataclasses
import functools
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts, tensor_cores
from jaxspec.pallas.matmul.float8_terms import ROWS
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.float8_product_block import Float8Product
from jaxspec.pallas.moe.product_block import Chunks, Product
from jaxspec.weight import DenseExperts


def _product(x, rows, pieces, weight, blocks, experts=1):
    """Return the tiling of `x @ weight` such that `blocks` fit on a multiprocessor."""
    if isinstance(weight, DenseExperts):
        return Product.of(rows, pieces, weight, blocks)
    return Float8Product.of(x, rows, pieces, weight, blocks, experts)


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
    rows = ROWS  # rows per tile: the smallest N of wgmma

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
    them. `x` is `[tokens, features]` for `Direct`, else `[tiles, rows, features]`, or, for experts
    in FP8, what `operand` makes of that; `arrays` are those of `work`.

    A block has two pieces of the matrix: one of gate and one of up, or two adjacent ones of up
    alone. If the number of pieces is odd, the last block's second piece is filled with zeros, and
    its output is dropped.
    """
    inner = up.outer // activation.pieces
    neighbours = 2 // activation.pieces  # output columns per block, in pieces
    starts = [BLOCK_N * i + inner * j for i in range(neighbours) for j in range(activation.pieces)]
    blocks = pl.cdiv(inner, BLOCK_N * neighbours)
    # In FP8 an odd piece's zeros pad the output to whole chunks of features.
    width = inner if isinstance(up, DenseExperts) else blocks * BLOCK_N * neighbours
    is_alone = work.rows > 64 or work.tiles * blocks <= device.MULTIPROCESSORS
    product = _product(x, work.rows, len(starts), up, blocks=1 if is_alone else 2)
    operands = product.operands(x, up)

    def body(*refs, out, **ring):
        read, (*arrays, hidden) = refs[: len(operands)], refs[len(operands) :]
        index, column = lax.axis_index("tile"), lax.axis_index("column") * BLOCK_N * neighbours
        tile = work.tile(arrays, index)

        @pl.when(tile.is_asked & (tile.expert < work.none))
        def _():
            columns = [column + start for start in starts]
            chunks = product.of_tile(read, index, tile.expert, columns, **ring)
            product.start(chunks, **ring)
            weights = tile.weights((BLOCK_N, work.rows))
            # The matmul is rounded first, as if it had been stored.
            rounded = [
                sum_.astype(out.dtype).astype(jnp.float32) for sum_ in product.run(chunks, **ring)
            ]
            size = activation.pieces
            of_each = [rounded[i : i + size] for i in range(0, len(rounded), size)]
            activated = [activation.of_blocks(pieces) * weights for pieces in of_each]
            _put_tiles(activated, out, hidden.at[index], column)

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_up",
        out_type=jax.ShapeDtypeStruct((work.tiles, work.rows, width), product.dtype),
        scratch_types=product.scratch()
        | {"out": tensor_cores.tile(work.rows, BLOCK_N, dtype=product.dtype)},
        grid=(work.tiles, blocks),
        grid_names=("tile", "column"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*operands, *arrays)


@functools.partial(jax.jit, static_argnames=("work", "interpret"))
def down_kernel(hidden, down, arrays, *, work, interpret=None):
    """Multiply each row of `hidden` with its matrix: float32 `[parts, tokens, features]`."""
    features, product = down.outer, _product(hidden, work.rows, 1, down, blocks=4)
    operands = product.operands(hidden, down)

    def body(*refs, out, **ring):
        read, (*arrays, y) = refs[: len(operands)], refs[len(operands) :]
        index, column = lax.axis_index("tile"), lax.axis_index("column") * BLOCK_N
        tile = work.tile(arrays, index)

        def put_out(rows):
            plgpu.commit_smem()  # also a barrier: all warps are done
            for i, row in enumerate(rows):
                _put_row(out.at[i], y, row, column)
            plgpu.wait_smem_to_gmem(0)

        @pl.when(tile.is_asked & (tile.expert < work.none))
        def _():
            chunks = product.of_tile(read, index, tile.expert, [column], **ring)
            product.start(chunks, **ring)
            rows = tile.rows()  # while the copies are in flight
            (sum_,) = product.run(chunks, **ring)
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
    return kernel(*operands, *arrays)


def _put_row(values, y, row: _Row, column):
    """Start the copy of a row's columns to its output location, if the row is real."""

    @pl.when(row.is_real)
    def _():
        target = y.at[row.part, row.token, pl.ds(column, values.shape[0])]
        plgpu.copy_smem_to_gmem(values, target)


@functools.partial(jax.jit, static_argnames=("parts", "interpret"))
def one_token_down_kernel(hidden, down, experts, *, parts, interpret=None):
    """Run `down_kernel` for one token, and sum its experts: float32 `[parts, 1, features]`.

    `hidden` is the `operand` of `[choices, 8, inner]`, with only the first row of each real;
    `experts` are those of `Choices`. Part `i` is the sum over the choices `i`, `i + parts`,
    `i + 2 * parts` and so on: one matmul over the features of all these experts, one after the
    other.
    """
    none, features, count = down.num_experts, down.outer, experts.shape[1]
    most = pl.cdiv(count, parts)  # experts of a part
    product = _product(hidden, Direct.rows, 1, down, blocks=1, experts=most)
    operands = product.operands(hidden, down)

    def body(*refs, out, **ring):
        read, (experts, y) = refs[: len(operands)], refs[len(operands) :]
        part, column = lax.axis_index("part"), lax.axis_index("column") * BLOCK_N
        layout = layouts.lane_layout(count)
        table = access.load(experts.at[0], layout)
        place = plgpu.broadcasted_iota(jnp.int32, (count,), 0, layout=layout)
        is_live = experts[0, 0] < none

        def chunk_of_expert(j):
            index = lax.div(j, product.chunks)
            choice = jnp.minimum(part + index * parts, count - 1)
            expert = jnp.max(jnp.where(place == choice, table, 0))
            of_choice = product.of_tile(read, choice, expert, [column], **ring)
            return of_choice, j - index * product.chunks

        def fetch(j, stage):
            chunks, chunk = chunk_of_expert(j)
            chunks.fetch(chunk, stage)

        def of_columns(j):
            chunks, chunk = chunk_of_expert(j)
            return chunks.of_columns(chunk)

        def of_rows(j):
            chunks, chunk = chunk_of_expert(j)
            return chunks.of_rows(chunk)

        @pl.when(is_live)
        def _():
            total = product.chunks * lax.div(count - part + parts - 1, parts)
            chunks = Chunks(fetch, of_columns, of_rows)
            product.start(chunks, total, **ring)  # possibly of one expert and part of the next
            (sum_,) = product.run(chunks, total, **ring)
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
        scratch_types=product.scratch() | {"out": plgpu.SMEM((Direct.rows, BLOCK_N), jnp.float32)},
        grid=(parts, features // BLOCK_N),
        grid_names=("part", "column"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*operands, experts)


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


def _wide_tiling(rows, weight):
    """Return the pieces per block, and the blocks on a multiprocessor."""
    if isinstance(weight, DenseExperts):
        return (4, 2) if rows <= 64 else (2, 1)
    return 2, 2  # two numbers per row take twice the registers and shared memory


@functools.partial(jax.jit, static_argnames=("work", "interpret"))
def tiled_kernel(x, weight, arrays, *, work, interpret=None):
    """Multiply the rows of all tiles, `[tiles, rows, features]`, in their dtype.

    `arrays` are the expert of each tile, and the experts' biases of the product or None.
    """
    (expert, bias), features = arrays, weight.outer
    pieces, blocks = _wide_tiling(work.rows, weight)
    pieces = gcd(pieces, features // BLOCK_N)
    width, product = pieces * BLOCK_N, _product(x, work.rows, pieces, weight, blocks)
    operands = product.operands(x, weight)
    biases = [] if bias is None else [bias]

    def body(*refs, out, **ring):
        read, (expert, *biases, y) = refs[: len(operands)], refs[len(operands) :]
        index, column = lax.axis_index("tile"), lax.axis_index("column") * width
        chosen = expert[index]

        @pl.when(chosen < work.none)
        def _():
            columns = [column + piece * BLOCK_N for piece in range(pieces)]
            chunks = product.of_tile(read, index, chosen, columns, **ring)
            product.start(chunks, **ring)
            sums = product.run(chunks, **ring)
            for bias in biases:
                sums = [
                    sum_ + _bias_of(bias.at[chosen, pl.ds(start, BLOCK_N)], sum_.shape)
                    for sum_, start in zip(sums, columns, strict=True)
                ]
            _put_tiles(sums, out, y.at[index], column)

    kernel = plgpu.kernel(
        body,
        kernel_name="moe_tiled",
        out_type=jax.ShapeDtypeStruct((work.tiles, work.rows, features), product.dtype),
        scratch_types=product.scratch()
        | {"out": tensor_cores.tile(work.rows, BLOCK_N, dtype=product.dtype)},
        grid=(work.tiles, features // width),
        grid_names=("tile", "column"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*operands, expert, *biases)


def _bias_of(columns, shape):
    """Return the bias of each row of a transposed matmul, in float32."""
    loaded = access.load(columns, plgpu.Layout.WGMMA.reduce(1)).astype(jnp.float32)
    return lax.broadcast_in_dim(loaded, shape, (0,))
