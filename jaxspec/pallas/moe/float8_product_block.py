"""A block's matmul of some tokens with columns of their expert's matrix, in FP8 as published.

As in `matmul/float8_kernel.py`, an activation is the sum of e4m3 numbers, and the weight's bytes
are multiplied as they are. The sum over each 128 features is scaled and added in float32.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.matmul.float8_terms import CHUNK, LOW
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.pallas.moe.float8_tokens import Float8Tokens
from jaxspec.pallas.moe.float8_tokens_block import RingTokens, SplitTokens
from jaxspec.pallas.moe.product_block import Chunks, start_ring
from jaxspec.weight import SCALED_COLUMNS, Float8BlockExperts, Published8BitExperts

_RESERVED = 2048  # bytes of barriers, and for rounding up allocations
_MOST_OUT = 8192  # bytes of the output's tile: 64 rows in 16 bits
_TOGETHER = 64  # numbers of a chunk in all pieces' sums, up to which these are computed together
_FEW_STAGES = 3  # a smaller ring is not worth a second block on the multiprocessor


@dataclasses.dataclass(frozen=True)
class Float8Product:
    """Tiling of a block's matmul, with the interface of `Product`."""

    tokens: RingTokens | SplitTokens
    pieces: int
    chunks: int
    stages: int
    by_block: bool  # True if blocks of a matrix have a scale, not columns
    outer: int
    dtype = jnp.bfloat16  # of rounded results

    @staticmethod
    def of(
        x: Any, rows: int, pieces: int, weight: Published8BitExperts, blocks: int, experts: int
    ) -> "Float8Product":
        """Return the tiling with the largest ring such that `blocks` fit on a multiprocessor.

        `x` are `Float8Tokens`, or bfloat16 rows for tiles of 8. Matrices of `experts` are
        multiplied one after the other.
        """
        chunks = weight.inner // CHUNK
        is_split = isinstance(x, Float8Tokens)
        tokens = RingTokens(rows, x.starts) if is_split else SplitTokens(chunks * experts)
        stage = tokens.stage_bytes + CHUNK * pieces * BLOCK_N
        held = _RESERVED + tokens.held_bytes + min(4 * rows * BLOCK_N, _MOST_OUT)
        fitting = ((device.room(1) // each - held) // stage for each in range(blocks, 0, -1))
        enough = min(_FEW_STAGES, chunks)
        stages = next((each for each in fitting if each >= enough), 2)
        by_block = isinstance(weight, Float8BlockExperts)
        stages = min(chunks * experts, stages)
        return Float8Product(tokens, pieces, chunks, stages, by_block, weight.outer)

    @property
    def rows(self) -> int:
        return self.tokens.rows

    def operands(self, x, weight) -> tuple[Any, ...]:
        return *self.tokens.operands(x), weight.array, weight.scale

    def scratch(self) -> dict[str, Any]:
        arrivals = self.pieces + self.tokens.copies
        return {
            "tokens": self.tokens.scratch(self.stages),
            "ring": tensor_cores.tile(
                self.stages, self.pieces, BLOCK_N, CHUNK, dtype=jnp.float8_e4m3fn
            ),
            "filled": plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.stages),
        }

    def start(self, chunks: Chunks, count: Any = None, *, tokens, **_: Any) -> None:
        self.tokens.start(chunks, tokens)
        start_ring(self.stages, self.chunks, chunks.fetch, count)

    def of_tile(self, operands, index, expert, columns, *, tokens, ring, filled) -> Chunks:
        *read, matrices, scales = operands
        # Columns beyond the last are zeros, times any scale.
        starts = [jnp.minimum(column, self.outer - BLOCK_N) for column in columns]

        def fetch(j, stage):
            for piece, column in enumerate(columns):
                part = matrices.at[expert, pl.ds(column, BLOCK_N), pl.ds(j * CHUNK, CHUNK)]
                plgpu.copy_gmem_to_smem(part, ring.at[stage, piece], filled.at[stage])
            self.tokens.fetch(read, index, j, stage, tokens, filled.at[stage])

        def of_columns(j):
            """Load a scale or a vector of scales for each piece."""
            if self.by_block:
                return [scales[expert, lax.div(start, SCALED_COLUMNS), j] for start in starts]
            parts = [scales.at[expert, pl.ds(start, BLOCK_N)] for start in starts]
            return [access.load(part, plgpu.Layout.WGMMA.reduce(1)) for part in parts]

        return Chunks(fetch, of_columns, lambda j: self.tokens.of_rows(read, index, j))

    def run(self, chunks: Chunks, count: Any = None, *, tokens, ring, filled):
        self.tokens.prepare(chunks, tokens)
        count = self.chunks if count is None else count

        def ahead(j):
            return self.tokens.ahead(chunks, j), chunks.of_columns(j)

        def step(j, carry):
            stage, (of_tokens, of_columns), totals = carry
            # Factors in global memory are loaded while the chunk before is multiplied.
            following = ahead(jnp.minimum(j + 1, count - 1))
            plgpu.barrier_wait(filled.at[stage])
            numbers, of_rows = self.tokens.at(j, stage, of_tokens, tokens)
            sums = self._products(ring.at[stage], numbers.transpose((1, 0)))
            totals = [
                total + self._scaled(sum_, of_rows, of_piece)
                for total, sum_, of_piece in zip(totals, sums, of_columns, strict=True)
            ]
            refill = j + self.stages

            @pl.when(refill < count)
            def _():
                plgpu.commit_smem()  # also a barrier: all warps are done
                chunks.fetch(refill, stage)

            return access.next_stage(stage, self.stages), following, totals

        zeros = jnp.zeros((BLOCK_N, self.rows), jnp.float32)
        totals = [plgpu.layout_cast(zeros, plgpu.Layout.WGMMA)] * self.pieces
        return lax.fori_loop(0, count, step, (jnp.int32(0), ahead(jnp.int32(0)), totals))[2]

    def _products(self, matrix, numbers):
        """Yield the sum of a chunk for each piece, `[BLOCK_N, terms * rows]`."""
        size = max(1, min(self.pieces, _TOGETHER // numbers.shape[1]))
        for first in range(0, self.pieces, size):
            pieces = [matrix.at[i] for i in range(first, min(first + size, self.pieces))]
            yield from _products(pieces, numbers)

    def _scaled(self, sums, of_rows, of_piece):
        if self.tokens.terms > 1:
            sums = sums[:, : self.rows] + sums[:, self.rows :] * LOW
        if self.by_block:
            return sums * lax.broadcast_in_dim(of_rows * of_piece, sums.shape, (1,))
        sums = sums * lax.broadcast_in_dim(of_rows, sums.shape, (1,))
        return sums * lax.broadcast_in_dim(of_piece, sums.shape, (0,))


def _products(pieces, numbers):
    """Return `piece @ numbers` in float32 for each piece; these matmuls are in flight together."""

    def run(*sums):
        for sum_, piece in zip(sums, pieces, strict=True):
            plgpu.wgmma(sum_, piece, numbers)
        return [sum_[...] for sum_ in sums]

    shape = pieces[0].shape[0], numbers.shape[1]
    return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef(shape, jnp.float32)] * len(pieces))
