"""Tiles of `mamba2_prefill`: a block's walk over the chunks of a tile, and the kernel of tile sums.

A tile is a range of one sequence, in whole chunks. `add_tiles` computes what each tile adds to the
state; `prefill_kernel` then computes the outputs of all tiles at once.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, tensor_cores
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, VALUES, along, iota, limited, sums
from jaxspec.pallas.recurrent.chunks import CHUNK

_STAGES = 2  # chunks in shared memory; with two, two blocks fit on a multiprocessor
_LOG2E = math.log2(math.e)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)  # layout of vectors over a matrix's columns


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes of a launch; the first six are the pool's axes."""

    layers: int
    num_slots: int
    candidates: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    tokens: int
    tile: int  # tokens per tile
    dtype: Any  # dtype of operands of tensor cores


class Tile(NamedTuple):
    """One tile, or columns for all tiles: the schedule is `[tiles, fields]`, int32."""

    slot: Any  # 0 for a null sequence
    source: Any  # candidate that the sequence starts from; -1 starts from zero
    begin: Any  # first token; a tile beyond the last has none
    end: Any
    position: Any  # index among the sequence's tiles
    tiles: Any  # number of the sequence's tiles

    @classmethod
    def load(cls, schedule, row) -> "Tile":
        return cls(*(schedule[row, column] for column in range(len(cls._fields))))

    @property
    def start(self):
        """Aligned start of the first chunk."""
        return self.begin - lax.rem(self.begin, ALIGN)

    @property
    def chunks(self):
        count = lax.div(self.end - self.start + CHUNK - 1, CHUNK)
        return jnp.where(self.begin < self.end, count, 0)


class Operands(NamedTuple):
    """Operands of both kernels, without the pool; references within a kernel."""

    x: Any  # [tokens, heads * head_dim]
    b: Any  # [tokens, groups * state_dim]
    dt: Any  # [heads, tokens]: copies need a head's steps to be contiguous
    a: Any  # [heads]
    schedule: Any  # [tiles, fields of Tile]
    layer: Any  # [1]


class TileSums(NamedTuple):
    """Change of the state by the tile before each tile: to `left * state + added`.

    For a sequence's first tile, `added` is the initial state. A sequence of one tile has no sums.
    """

    added: Any  # [tiles, heads * head_dim, state_dim]
    left: Any  # [tiles, heads]: decay over the tile


class Scratch(NamedTuple):
    """Barriers, the ring of chunks and other shared memory of a walk.

    The first axis of the ring's arrays is stages. None marks an array that the kernel does not
    need.
    """

    arrived: Any
    keys: Any  # ring of `B`
    line: Any  # vector over a chunk's tokens
    queries: Any  # ring of `C`
    spare: Any  # as for `tensor_cores.operand`
    steps: Any  # ring of `dt`
    values: Any  # ring of `x`
    weights: Any  # matrix over a chunk's tokens


@dataclasses.dataclass(frozen=True)
class Chunk:
    """Chunk in shared memory: references to its `B`, `x`, `dt` and, for outputs, `C`."""

    start: jax.Array  # token of its first row
    low: jax.Array  # rows from `low` to `high` belong to the sequence
    high: jax.Array
    keys: Any
    values: Any
    steps: Any
    queries: Any  # None without outputs


@dataclasses.dataclass(frozen=True)
class Walk:
    """Loop of a block over the chunks of a tile, through a ring in shared memory."""

    tile: Tile
    copies: Callable  # (slice of tokens) -> pairs of a source and its ring
    rate: jax.Array  # `A` of the head
    scratch: Scratch

    def over(self, chunks, step, start):
        """Run `step(chunk, release, carry)` for each chunk, and return the last carry.

        `step` calls `release` when all threads have read the chunk. `start` returns the first
        carry, while the first chunks are being copied.
        """
        for stage in range(_STAGES):
            pl.when(stage < chunks)(functools.partial(self._fetch, stage, stage))

        def take_chunk(j, carry):
            stage, refill = lax.rem(j, _STAGES), j + _STAGES
            chunk = self._await(j, stage)

            def release():
                plgpu.commit_smem()
                pl.when(refill < chunks)(lambda: self._fetch(refill, stage))

            return step(chunk, release, carry)

        return lax.fori_loop(0, chunks, take_chunk, start())

    def _fetch(self, j, stage):
        tokens = pl.ds(pl.multiple_of(self.tile.start + j * CHUNK, ALIGN), CHUNK)
        for source, ring in self.copies(tokens):
            plgpu.copy_gmem_to_smem(source, ring.at[stage], self.scratch.arrived.at[stage])

    def _await(self, j, stage):
        start = self.tile.start + j * CHUNK
        ring = self.scratch
        chunk = Chunk(
            start=start,
            low=jnp.maximum(self.tile.begin - start, 0),
            high=jnp.minimum(self.tile.end - start, CHUNK),
            keys=ring.keys.at[stage],
            values=ring.values.at[stage],
            steps=ring.steps.at[stage],
            queries=None if ring.queries is None else ring.queries.at[stage],
        )
        plgpu.barrier_wait(ring.arrived.at[stage])

        @pl.when(chunk.high - chunk.low < CHUNK)
        def _():
            by_rows = plgpu.Layout.WGMMA.reduce(1)
            row = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=by_rows)
            new = access.load(chunk.steps, by_rows)
            new = jnp.where((chunk.low <= row) & (row < chunk.high), new, 0.0)
            access.store(chunk.steps, new)
            tensor_cores.clear(chunk.keys, chunk.low, chunk.high)
            tensor_cores.clear(chunk.values, chunk.low, chunk.high)

        return chunk

    def sum_up(self, chunk):
        """Return the log2 of decays up to each token, over a matrix's rows; store them in `line`.

        They are in units of log2 because exp2 takes them directly.
        """
        new = access.load(chunk.steps, _COLUMNS)
        by_rows = sums(along(limited(new * self.rate), 1), iota(0), iota(1)) * _LOG2E
        access.store(self.scratch.line, by_rows)
        plgpu.commit_smem()
        return by_rows

    def sums(self):
        """Load `line`, over a matrix's columns; repeated at each use to save registers."""
        return access.load(self.scratch.line, _COLUMNS)

    def written_by(self, chunk):
        """Return `x`, written values, these at the chunk's end, and the log2 of the chunk's decay.

        The first three are `[values, tokens]`; the second and third are rounded, as operands of
        matmuls.
        """
        x = access.load(chunk.values.transpose((1, 0)), plgpu.Layout.WGMMA)
        dtype, x, last = x.dtype, x.astype(jnp.float32), self.scratch.line[CHUNK - 1]
        written = x * along(access.load(chunk.steps, _COLUMNS), 1)
        left = written * along(jnp.exp2(last - self.sums()), 1)
        return x, written.astype(dtype), left.astype(dtype), last


class BlockIndex(NamedTuple):
    """Part of a tile that a block computes."""

    head: Any
    values: Any  # slice of the rows of a state, and of the columns of `x`
    keys: Any  # slice of the columns of `B` and `C`

    @classmethod
    def of_grid(cls, sizes) -> "BlockIndex":
        part, head = lax.axis_index("part"), lax.axis_index("head")
        group = lax.div(head, sizes.heads // sizes.groups)
        return cls(
            head=head,
            values=pl.ds(head * sizes.head_dim + part * VALUES, VALUES),
            keys=pl.ds(group * sizes.state_dim, sizes.state_dim),
        )


def adding_scratch(sizes, interpret):
    """Return the `Scratch` of a walk that computes no outputs."""
    spare = tensor_cores.tile(VALUES, CHUNK, dtype=sizes.dtype)
    return Scratch(
        arrived=plgpu.Barrier(num_arrivals=3, num_barriers=_STAGES),
        keys=tensor_cores.tile(_STAGES, CHUNK, sizes.state_dim, dtype=sizes.dtype),
        line=plgpu.SMEM((CHUNK,), jnp.float32),
        queries=None,
        spare=None if interpret is None else spare,
        steps=plgpu.SMEM((_STAGES, CHUNK), jnp.float32),
        values=tensor_cores.tile(_STAGES, CHUNK, VALUES, dtype=sizes.dtype),
        weights=None,
    )


def output_scratch(sizes, interpret):
    """Return the `Scratch` of a walk that computes outputs."""
    spare = tensor_cores.tile(VALUES, max(CHUNK, sizes.state_dim), dtype=sizes.dtype)
    return adding_scratch(sizes, interpret)._replace(
        arrived=plgpu.Barrier(num_arrivals=4, num_barriers=_STAGES),
        queries=tensor_cores.tile(_STAGES, CHUNK, sizes.state_dim, dtype=sizes.dtype),
        spare=None if interpret is None else spare,
        weights=tensor_cores.tile(CHUNK, CHUNK, dtype=sizes.dtype),
    )


def launch_options(sizes, tiles, interpret):
    """Return options of both kernels: a block for `VALUES` values of a head of a tile."""
    return {
        "grid": (sizes.head_dim // VALUES, sizes.heads, tiles),
        "grid_names": ("part", "head", "tile"),
        # The walk has explicit barriers where a thread reads another's writes.
        "compiler_params": plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    }


def zero_state(sizes):
    zeros = jnp.zeros((VALUES, sizes.state_dim), jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def initial_state(sizes, tile, pool, layer, values):
    """Return the block's part of the state that the tile's sequence starts from."""
    candidate_0 = (layer[0] * sizes.num_slots + tile.slot) * sizes.candidates
    source = pool.at[candidate_0 + jnp.maximum(tile.source, 0), values]
    state = access.load(source, plgpu.Layout.WGMMA).astype(jnp.float32)
    return jnp.where(jnp.broadcast_to(tile.source >= 0, state.shape), state, 0.0)


def add_tiles(sizes, operands, pool, interpret):
    tiles = operands.schedule.shape[0]
    state = (tiles, sizes.heads * sizes.head_dim, sizes.state_dim)
    tile_sums = TileSums(
        added=jax.ShapeDtypeStruct(state, jnp.float32),
        left=jax.ShapeDtypeStruct((tiles, sizes.heads), jnp.float32),
    )
    kernel = plgpu.kernel(
        functools.partial(_add_tile, sizes),
        kernel_name="mamba2_prefill_tiles",
        out_type=[tile_sums],
        scratch_types={"scratch": adding_scratch(sizes, interpret)},
        **launch_options(sizes, tiles, interpret),
    )
    (tile_sums,) = kernel(operands, pool)
    return tile_sums


def _add_tile(sizes, operands, pool, out, *, scratch):
    """Run the block of one tile, which walks the tile before it; array operands are references."""
    block, index = BlockIndex.of_grid(sizes), lax.axis_index("tile")
    tile = Tile.load(operands.schedule, index)
    before = Tile.load(operands.schedule, jnp.maximum(index - 1, 0))

    def copies(tokens):
        return (
            (operands.b.at[tokens, block.keys], scratch.keys),
            (operands.x.at[tokens, block.values], scratch.values),
            (operands.dt.at[block.head, tokens], scratch.steps),
        )

    walk = Walk(before, copies, operands.a[block.head], scratch)

    def step(chunk, release, carry):
        state, log = carry
        walk.sum_up(chunk)
        _, _, left, last = walk.written_by(chunk)
        decayed = state * jnp.exp2(last)
        (state,) = tensor_cores.accumulate(scratch.spare, (decayed, left, chunk.keys))
        release()
        return state, log + last

    def start():
        return zero_state(sizes), jnp.float32(0.0)

    def store_left(factor):
        @pl.when(lax.axis_index("part") == 0)
        def _():
            out.left[index, block.head] = factor

    @pl.when((tile.slot > 0) & (tile.tiles > 1))
    def _():
        @pl.when(tile.position == 0)
        def _():
            state = initial_state(sizes, tile, pool, operands.layer, block.values)
            access.store(out.added.at[index, block.values], state)
            store_left(jnp.float32(1.0))

        @pl.when(tile.position > 0)
        def _():
            state, log = walk.over(before.chunks, step, start)
            access.store(out.added.at[index, block.values], state)
            store_left(jnp.exp2(log))
