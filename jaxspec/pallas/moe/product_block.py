"""A block's matmul of some tokens with columns of their expert's matrix, in 16 bits."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import DenseExperts, InputsFirstExperts


def _no_scales(j):
    return ()


class Chunks(NamedTuple):
    """Chunks of features that a matmul sums over."""

    fetch: Callable  # `fetch(j, stage)` starts the copies of chunk `j` to a stage of the ring
    # In FP8, for chunk `j`: scales of the matrix, and the rows or factors of the tokens.
    of_columns: Callable = _no_scales
    of_rows: Callable = _no_scales


def tile_of(x, index, rows):
    """Return the rows of tile `index` of `x`, which all tiles share if it has two axes."""
    # A traced 0, because jax 0.12 rejects rows that are statically out of bounds.
    return x.at[pl.ds(index * 0, rows)] if len(x.shape) == 2 else x.at[index]


def start_ring(stages: int, chunks: int, fetch: Callable, count: Any) -> None:
    """Fetch the first of `chunks` chunks, or of a traced `count` of them."""
    for j in range(stages):
        if count is not None:
            pl.when(j < count)(functools.partial(fetch, jnp.int32(j), j))
        elif j < chunks:
            fetch(j, j)


@dataclasses.dataclass(frozen=True)
class Product:
    """Tiling of a block's matmul: `rows` tokens and `pieces * BLOCK_N` columns."""

    rows: int
    pieces: int
    inner: int  # features
    chunk: int  # features per chunk
    stages: int  # chunks in the ring
    dtype: Any  # of both operands and of rounded results
    inputs_first: bool  # the matrix is `[inner, outer]`

    @staticmethod
    def of(rows: int, pieces: int, weight: DenseExperts, blocks: int) -> "Product":
        """Return the tiling with the largest ring such that `blocks` fit on a multiprocessor."""
        inner, size = weight.inner, weight.dtype.itemsize
        chunk = 128 if rows <= 32 and inner % 128 == 0 else 64
        stage = size * chunk * (rows + pieces * BLOCK_N)
        room = device.room(1) // blocks - 2048 - rows * BLOCK_N * pieces * 4
        stages = max(2, min(inner // chunk, room // stage))
        inputs_first = isinstance(weight, InputsFirstExperts)
        return Product(rows, pieces, inner, chunk, stages, weight.dtype, inputs_first)

    def operands(self, x, weight) -> tuple[Any, ...]:
        """Return the arrays that a kernel reads."""
        return x, weight.array

    def scratch(self) -> dict[str, Any]:
        tile = functools.partial(tensor_cores.tile, dtype=self.dtype)
        part = (self.chunk, BLOCK_N) if self.inputs_first else (BLOCK_N, self.chunk)
        return {
            "tokens": tile(self.stages, self.rows, self.chunk),
            "ring": tile(self.stages, self.pieces, *part),
            "filled": plgpu.Barrier(num_arrivals=self.pieces + 1, num_barriers=self.stages),
        }

    @property
    def chunks(self) -> int:
        return self.inner // self.chunk

    def start(self, chunks: Chunks, count: Any = None, **_: Any) -> None:
        start_ring(self.stages, self.chunks, chunks.fetch, count)

    def of_tile(self, operands, index, expert, columns, *, tokens, ring, filled) -> Chunks:
        """Return the chunks of tile `index` and of pieces of its expert's matrix."""
        x, matrix = tile_of(operands[0], index, self.rows), operands[1].at[expert]

        def fetch(j, stage):
            chunk = pl.ds(j * self.chunk, self.chunk)
            for piece, column in enumerate(columns):
                part = pl.ds(column, BLOCK_N), chunk
                part = matrix.at[part[::-1] if self.inputs_first else part]
                plgpu.copy_gmem_to_smem(part, ring.at[stage, piece], filled.at[stage])
            plgpu.copy_gmem_to_smem(x.at[:, chunk], tokens.at[stage], filled.at[stage])

        return Chunks(fetch)

    def run(self, chunks: Chunks, count: Any = None, *, tokens, ring, filled):
        """Return the transposed matmul of each piece, float32 `[BLOCK_N, rows]`.

        It sums over `count` chunks; None means all features.
        """
        count = self.chunks if count is None else count

        def all_chunks(*sums):
            def step(j, stage):
                plgpu.barrier_wait(filled.at[stage])
                rows = tokens.at[stage].transpose((1, 0))
                for piece, sum_ in enumerate(sums):
                    part = ring.at[stage, piece]
                    plgpu.wgmma(sum_, part.transpose((1, 0)) if self.inputs_first else part, rows)
                plgpu.wgmma_wait(self.pieces)  # the previous chunk's wgmmas are done
                refill = j - 1 + self.stages

                @pl.when((j > 0) & (refill < count))
                def _():
                    plgpu.commit_smem()  # also a barrier: all warps are done
                    chunks.fetch(refill, jnp.where(stage == 0, self.stages - 1, stage - 1))

                return access.next_stage(stage, self.stages)

            lax.fori_loop(0, count, step, jnp.int32(0))
            return [sum_[...] for sum_ in sums]

        sums = [plgpu.WGMMAAccumulatorRef((BLOCK_N, self.rows), jnp.float32)] * self.pieces
        return pl.run_scoped(all_chunks, *sums)
