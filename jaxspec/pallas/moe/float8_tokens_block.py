"""Tokens of a block's matmul in FP8: split before the kernel, or by the block itself."""

import dataclasses
import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, layouts, tensor_cores
from jaxspec.pallas.matmul.float8_terms import CHUNK, ROWS, split
from jaxspec.pallas.moe.product_block import Chunks, tile_of

_STAGED = 8  # chunks of 16-bit rows in shared memory
_AT_ONCE = 4  # chunks that are split at once, which hides the latency of sums over a row
_tile = functools.partial(tensor_cores.tile, dtype=jnp.float8_e4m3fn)


@dataclasses.dataclass(frozen=True)
class RingTokens:
    """`Float8Tokens`, copied beside each chunk of the matrix."""

    rows: int
    starts: tuple[int, ...]  # first columns of the terms in their arrays

    @property
    def terms(self) -> int:
        return len(self.starts)

    @property
    def copies(self) -> int:
        """Copies per chunk."""
        return self.terms

    @property
    def stage_bytes(self) -> int:
        return CHUNK * self.terms * self.rows

    held_bytes = 0

    def operands(self, x) -> tuple[Any, ...]:
        return *x.numbers, x.factors

    def scratch(self, stages: int) -> dict[str, Any]:
        return {"numbers": _tile(stages, self.terms * self.rows, CHUNK)}

    def fetch(self, read, index, j, stage, buffers, filled):
        *numbers, _ = read
        for term, (of_term, start) in enumerate(zip(numbers, self.starts, strict=True)):
            part = of_term.at[self._rows(read, index), pl.ds(start + j * CHUNK, CHUNK)]
            target = buffers["numbers"].at[stage, pl.ds(term * self.rows, self.rows)]
            plgpu.copy_gmem_to_smem(part, target, filled)

    def of_rows(self, read, index, j):
        """Return the factors of the rows of chunk `j`."""
        factors = read[-1].at[j, self._rows(read, index)]
        return access.load(factors, plgpu.Layout.WGMMA.reduce(0))

    def _rows(self, read, index):
        """Return the rows of tile `index`, which are the same for all tiles of few tokens."""
        is_shared = read[0].shape[0] <= self.rows
        return pl.ds((index * 0 if is_shared else index) * self.rows, self.rows)

    def start(self, chunks: Chunks, buffers):
        """Do nothing: the tokens are in the ring."""

    def prepare(self, chunks: Chunks, buffers):
        """Do nothing: the tokens are split."""

    def ahead(self, chunks: Chunks, j):
        """Load early what is multiplied with the sum of chunk `j`."""
        return chunks.of_rows(j)

    def at(self, j, stage, ahead, buffers):
        """Return the numbers of chunk `j`, and the factors of its rows."""
        return buffers["numbers"].at[stage], ahead


@dataclasses.dataclass(frozen=True)
class SplitTokens:
    """Tiles of `ROWS` rows in bfloat16, which the block splits and holds.

    This happens while the first chunks of the matrix are in flight.
    """

    chunks: int  # of all experts that are multiplied one after the other

    rows, terms, copies, stage_bytes = ROWS, 2, 0, 0

    @property
    def held_bytes(self) -> int:
        """Bytes of the split rows with their factors, and of the rows before that."""
        of_chunk = self.terms * self.rows * CHUNK
        return self.chunks * (of_chunk + 4 * self.rows) + self.staged * of_chunk

    @property
    def staged(self) -> int:
        return min(_STAGED, self.chunks)

    def operands(self, x) -> tuple[Any, ...]:
        return (x,)

    def scratch(self, stages: int) -> dict[str, Any]:
        return {
            "staged": plgpu.SMEM((self.staged, self.rows, CHUNK), jnp.bfloat16),
            "filled": plgpu.Barrier(num_barriers=self.staged),
            "numbers": _tile(self.chunks, self.terms * self.rows, CHUNK),
            "factors": plgpu.SMEM((self.chunks * self.rows,), jnp.float32),  # 1 axis: not tiled
        }

    def fetch(self, read, index, j, stage, buffers, filled):
        """Do nothing: the block holds all chunks."""

    def of_rows(self, read, index, j):
        """Return the rows of chunk `j` in global memory."""
        return tile_of(read[0], index, self.rows).at[:, pl.ds(j * CHUNK, CHUNK)]

    def start(self, chunks: Chunks, buffers):
        for j in range(self.staged):
            self._stage(chunks, jnp.int32(j), j, buffers)

    def _stage(self, chunks, j, stage, buffers):
        target, filled = buffers["staged"].at[stage], buffers["filled"].at[stage]
        plgpu.copy_gmem_to_smem(chunks.of_rows(j), target, filled)

    def prepare(self, chunks: Chunks, buffers):
        """Split all chunks."""
        groups, rest = divmod(self.chunks, _AT_ONCE)

        def step(group, _):
            self._split(group * _AT_ONCE, _AT_ONCE, chunks, buffers)
            return ()

        lax.fori_loop(0, groups, step, ())
        if rest:
            self._split(jnp.int32(groups * _AT_ONCE), rest, chunks, buffers)
        plgpu.commit_smem()

    def _split(self, first, count, chunks, buffers):
        layout = layouts.piece_layout(self.rows, CHUNK, 2)
        stages = [lax.rem(first, _STAGED) + i for i in range(count)]
        for stage in stages:
            plgpu.barrier_wait(buffers["filled"].at[stage])
        loaded = [access.load(buffers["staged"].at[stage], layout) for stage in stages]
        for i, rows in enumerate(loaded):
            *halves, factor = split(rows.astype(jnp.float32))
            for half, numbers in enumerate(halves):
                place = pl.ds(half * self.rows, self.rows)
                access.store(buffers["numbers"].at[first + i, place], numbers)
            access.store(self._factors(first + i, buffers), factor)

        @pl.when(first + _STAGED < self.chunks)
        def _():
            plgpu.commit_smem()  # also a barrier: all warps have read the rows
            for i, stage in enumerate(stages):
                following = first + i + _STAGED
                stage_it = functools.partial(self._stage, chunks, following, stage, buffers)
                pl.when(following < self.chunks)(stage_it)

    def ahead(self, chunks: Chunks, j):
        return ()

    def at(self, j, stage, ahead, buffers):
        factors = access.load(self._factors(j, buffers), plgpu.Layout.WGMMA.reduce(0))
        return buffers["numbers"].at[j], factors

    def _factors(self, j, buffers):
        return buffers["factors"].at[pl.ds(j * self.rows, self.rows)]
