"""Tiles of `mamba2_prefill`: how blocks walk their chunks, and what they add to a state.

Import only where kernels run.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, tensor_cores
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, VALUES, along, iota, limited, sums
from jaxspec.pallas.recurrent.chunks import CHUNK

# Chunks in shared memory: with two, two blocks fit on a multiprocessor.
_STAGES = 2
_LOG2E = math.log2(math.e)
_OVER = plgpu.Layout.WGMMA.reduce(0)  # of vectors over a matrix's columns


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Static sizes a block knows."""

    layers: int
    num_slots: int
    candidates: int
    heads: int
    head_dim: int
    state_dim: int
    groups: int
    tokens: int
    tile: int  # tokens of a tile
    dtype: Any  # of what tensor cores multiply


@dataclasses.dataclass(frozen=True)
class Tile:
    """Some chunks of a sequence: values on the device."""

    slot: jax.Array  # 0: of nobody
    source: jax.Array  # the candidate that the sequence starts from, -1: from zero
    begin: jax.Array  # the first token
    end: jax.Array
    index: jax.Array  # among the sequence's tiles
    number: jax.Array  # of those

    @classmethod
    def find(cls, work, index) -> "Tile":
        """The one in that row of the schedule."""
        return cls(*(work[index, i] for i in range(6)))

    @property
    def start(self):
        """Of the first chunk."""
        return self.begin - lax.rem(self.begin, ALIGN)

    @property
    def chunks(self):
        """Their number."""
        count = lax.div(self.end - self.start + CHUNK - 1, CHUNK)
        return jnp.where(self.begin < self.end, count, 0)


@dataclasses.dataclass(frozen=True)
class Chunk:
    """A chunk that has arrived: where its `B`, `x`, `dt` and, if asked for, `C` are."""

    start: jax.Array  # token
    low: jax.Array  # its tokens are the sequence's from here
    high: jax.Array
    keys: Any
    values: Any
    steps: Any
    queries: Any = None


@dataclasses.dataclass(frozen=True)
class Walk:
    """A block's way over the chunks of a tile, through a ring in shared memory."""

    tile: Tile
    sources: Callable  # (tokens) -> where a chunk comes from, in the order of `Chunk`
    ring: tuple
    arrived: Any
    rate: jax.Array  # `A` of the head
    line: Any  # shared memory for a vector
    spare: Any  # as for `tensor_cores.operand`

    def over(self, chunks, step, start):
        """`step(chunk, done, carry)` for each; it calls `done` when all have read the chunk.

        `start` gives the first carry, while the first chunks are on their way.
        """
        for stage in range(_STAGES):
            pl.when(stage < chunks)(functools.partial(self._fetch, stage, stage))

        def one(j, carry):
            stage, again = lax.rem(j, _STAGES), j + _STAGES
            chunk = self._await(j, stage)

            def done():
                plgpu.commit_smem()
                pl.when(again < chunks)(lambda: self._fetch(again, stage))

            return step(chunk, done, carry)

        return lax.fori_loop(0, chunks, one, start())

    def _fetch(self, j, stage):
        here = pl.ds(pl.multiple_of(self.tile.start + j * CHUNK, ALIGN), CHUNK)
        for source, target in zip(self.sources(here), self.ring, strict=True):
            plgpu.copy_gmem_to_smem(source, target.at[stage], self.arrived.at[stage])

    def _await(self, j, stage):
        start = self.tile.start + j * CHUNK
        low = jnp.maximum(self.tile.begin - start, 0)
        high = jnp.minimum(self.tile.end - start, CHUNK)
        chunk = Chunk(start, low, high, *(x.at[stage] for x in self.ring))
        plgpu.barrier_wait(self.arrived.at[stage])

        @pl.when(high - low < CHUNK)
        def _():
            by_rows = plgpu.Layout.WGMMA.reduce(1)
            place = plgpu.broadcasted_iota(jnp.int32, (CHUNK,), 0, layout=by_rows)
            new = access.load(chunk.steps, by_rows)
            new = jnp.where((low <= place) & (place < high), new, 0.0)
            access.store(chunk.steps, new)
            tensor_cores.clear(chunk.keys, low, high)
            tensor_cores.clear(chunk.values, low, high)

        return chunk

    def sum_up(self, chunk):
        """The logs of decays up to each token, over a matrix's rows; over its columns in `line`.

        In units of log2, which exp2 takes as they are.
        """
        new = access.load(chunk.steps, _OVER)
        by_rows = sums(along(limited(new * self.rate), 1), iota(0), iota(1)) * _LOG2E
        access.store(self.line, by_rows)
        plgpu.commit_smem()
        return by_rows

    def sums(self):
        """Those in `line`: loaded again and again, since registers are scarce."""
        return access.load(self.line, _OVER)

    def left_of(self, chunk):
        """`[values, tokens]`: `x`, what of it is written, and what is left of that at the end.

        The last two rounded, for products. And the log2 of the whole chunk's decay.
        """
        there = access.load(chunk.values.transpose((1, 0)), plgpu.Layout.WGMMA)
        dtype, there, last = there.dtype, there.astype(jnp.float32), self.line[CHUNK - 1]
        written = there * along(access.load(chunk.steps, _OVER), 1)
        left = written * along(jnp.exp2(last - self.sums()), 1)
        return there, written.astype(dtype), left.astype(dtype), last


def scratch(sizes, columns, interpreted):
    """Shared memory of a `Walk`, with `columns` of operands that are in registers."""
    shared = {
        "keys": tensor_cores.tile(_STAGES, CHUNK, sizes.state_dim, dtype=sizes.dtype),
        "values": tensor_cores.tile(_STAGES, CHUNK, VALUES, dtype=sizes.dtype),
        "steps": plgpu.SMEM((_STAGES, CHUNK), jnp.float32),
        "line": plgpu.SMEM((CHUNK,), jnp.float32),
    }
    if interpreted:
        shared["spare"] = tensor_cores.tile(VALUES, columns, dtype=sizes.dtype)
    return shared


def queries(sizes):
    """More of it, for outputs."""
    return tensor_cores.tile(_STAGES, CHUNK, sizes.state_dim, dtype=sizes.dtype)


def arrived(copies):
    """The barriers of a ring of so many kinds."""
    return plgpu.Barrier(num_arrivals=copies, num_barriers=_STAGES)


def launch(sizes, tiles, params):
    """How both kernels are started: a block for some values of a head of a tile."""
    return {
        "grid": (sizes.head_dim // VALUES, sizes.heads, tiles),
        "grid_names": ("part", "head", "tile"),
        # Safe without barriers but the walk's own, where threads read what others wrote.
        "compiler_params": plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        **params,
    }


def place(sizes):
    """Of this block: its rows of a tile's states, its head's columns of `B` and `C`, its head."""
    part, head = lax.axis_index("part"), lax.axis_index("head")
    rows = pl.ds(head * sizes.head_dim + part * VALUES, VALUES)
    group = lax.div(head, sizes.heads // sizes.groups)
    return rows, pl.ds(group * sizes.state_dim, sizes.state_dim), head


def nothing(sizes):
    """A block's state of zeros."""
    zeros = jnp.zeros((VALUES, sizes.state_dim), jnp.float32)
    return plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)


def initial(sizes, tile, pool, layer, rows):
    """The state that the tile's sequence starts from."""
    first = (layer[0] * sizes.num_slots + tile.slot) * sizes.candidates
    source = pool.at[first + jnp.maximum(tile.source, 0), rows]
    state = access.load(source, plgpu.Layout.WGMMA).astype(jnp.float32)
    return jnp.where(jnp.broadcast_to(tile.source >= 0, state.shape), state, 0.0)


def add_tiles(sizes, x, b, steps, rates, work, layer, pool, params):
    """Of every tile, what the one before adds to the state, and how much of the state it leaves.

    `[tiles, heads * head_dim, state_dim]` and `[tiles, heads]`. A sequence's first tile has its
    initial state; nothing is there for a sequence of one tile.
    """
    tiles = work.shape[0]
    state = (tiles, sizes.heads * sizes.head_dim, sizes.state_dim)
    return plgpu.kernel(
        functools.partial(_add_tile, sizes),
        kernel_name="mamba2_prefill_tiles",
        out_type=[
            jax.ShapeDtypeStruct(state, jnp.float32),
            jax.ShapeDtypeStruct((tiles, sizes.heads), jnp.float32),
        ],
        scratch_types={**scratch(sizes, CHUNK, bool(params)), "arrived": arrived(3)},
        **launch(sizes, tiles, params),
    )(x, b, steps, rates, work, layer, pool)


def _add_tile(
    sizes, x, b, steps_in, rates, work, layer, pool, added, factors,
    *, keys, values, steps, arrived, line, spare=None
):  # fmt: skip
    """The block of one tile."""
    (rows, shared, head), index = place(sizes), lax.axis_index("tile")
    tile = Tile.find(work, index)
    before = Tile.find(work, jnp.maximum(index - 1, 0))

    def sources(here):
        return b.at[here, shared], x.at[here, rows], steps_in.at[head, here]

    walk = Walk(before, sources, (keys, values, steps), arrived, rates[head], line, spare)

    def step(chunk, done, carry):
        state, log = carry
        walk.sum_up(chunk)
        _, _, left, last = walk.left_of(chunk)
        (state,) = tensor_cores.accumulate(spare, (state * jnp.exp2(last), left, chunk.keys))
        done()
        return state, log + last

    def start():
        return nothing(sizes), jnp.float32(0.0)

    def leave(factor):
        @pl.when(lax.axis_index("part") == 0)
        def _():
            factors[index, head] = factor

    @pl.when((tile.slot > 0) & (tile.number > 1))
    def _():
        @pl.when(tile.index == 0)
        def _():
            access.store(added.at[index, rows], initial(sizes, tile, pool, layer, rows))
            leave(jnp.float32(1.0))

        @pl.when(tile.index > 0)
        def _():
            state, log = walk.over(before.chunks, step, start)
            access.store(added.at[index, rows], state)
            leave(jnp.exp2(log))
