"""Products of 16 to 256 rows on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block multiplies up to 128 rows with 64 or 128 columns of the weight, transposed, as
`few_rows_kernel` does: `y.T = weight.T @ x.T`. Tensor cores take 64 columns and as many rows as
there are, in steps of 8. Rows and weight come through one ring, a chunk of features at a time; the
weight's chunks that fit into shared memory are under way together, for the memory is what the
products of up to about 64 rows wait for. More rows of wide models are `gemm_wave_kernel`'s.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import device, tensor_cores
from jaxspec.pallas.gpu.tensor_cores import CHUNK
from jaxspec.pallas.matmul.gemm import parts_of, rows_of
from jaxspec.pallas.matmul.gemm_wave_kernel import wave_kernel
from jaxspec.pallas.matmul.products import COLUMNS

_MOST_STAGES = 32  # Mosaic's limit of barriers


@dataclasses.dataclass(frozen=True)
class Tile:
    """What a block multiplies at a time: `rows` tokens with `pieces` times `COLUMNS` columns."""

    rows: int
    pieces: int
    inner: int  # features
    dtype: Any
    stages: int  # of the ring, of `CHUNK` features each

    @staticmethod
    def of(x: Any, rows: int, pieces: int, inner: int, blocks: int, beside: int) -> "Tile":
        """As large a ring as fits beside so many bytes of what else is kept there.

        Raises:
            ValueError: that is none: a chunk arrives while another is multiplied.
        """
        chunks, stage = inner // CHUNK, 2 * CHUNK * (rows + pieces * COLUMNS)
        stages = min(chunks, (device.room(blocks) - beside) // stage, _MOST_STAGES)
        if stages < min(2, chunks):
            raise ValueError(
                f"A ring must have room for 2 chunks of {stage} bytes, but beside {beside} bytes "
                f"there is room for {stages}. Take fewer rows or pieces."
            )
        return Tile(rows, pieces, inner, x.dtype, stages)

    @property
    def chunks(self) -> int:
        """Of a tile's features."""
        return self.inner // CHUNK

    def scratch(self) -> dict[str, Any]:
        """Shared memory for the ring, as tensor cores want it."""
        rows = self.stages, self.rows, CHUNK
        columns = self.stages, self.pieces, CHUNK, COLUMNS
        return {
            "tokens": tensor_cores.tile(*rows, dtype=self.dtype),
            "ring": tensor_cores.tile(*columns, dtype=self.dtype),
            "arrived": plgpu.Barrier(num_arrivals=self.pieces + 1, num_barriers=self.stages),
        }

    def multiply(self, x, weight, token, feature, columns, *, tokens, ring, arrived):
        """The products of a tile, transposed: `[COLUMNS, rows]` float32 for each piece.

        They begin at this token, feature, and each of these columns.
        """

        def fetch(j):
            """Start the copies of a chunk; what lies beyond the last token or column is zeros."""
            stage = lax.rem(j, self.stages)
            chunk = pl.ds(feature + j * CHUNK, CHUNK)
            for piece, column in enumerate(columns):
                part = weight.at[chunk, pl.ds(column, COLUMNS)]
                plgpu.copy_gmem_to_smem(part, ring.at[stage, piece], arrived.at[stage])
            part = x.at[pl.ds(token, self.rows), chunk]
            plgpu.copy_gmem_to_smem(part, tokens.at[stage], arrived.at[stage])

        def all_chunks(*sums):
            def step(j, _):
                stage = lax.rem(j, self.stages)
                plgpu.barrier_wait(arrived.at[stage])
                rows = tokens.at[stage].transpose((1, 0))
                for piece, sum_ in enumerate(sums):
                    plgpu.wgmma(sum_, ring.at[stage, piece].transpose((1, 0)), rows)
                plgpu.wgmma_wait(self.pieces)  # the chunk before this one is done with
                again = j - 1 + self.stages

                @pl.when((j > 0) & (again < self.chunks))
                def _():
                    plgpu.commit_smem()  # by all warps
                    fetch(again)

            lax.fori_loop(0, self.chunks, step, None)
            return [sum_[...] for sum_ in sums]

        for j in range(self.stages):
            fetch(jnp.int32(j))
        sums = [plgpu.WGMMAAccumulatorRef((COLUMNS, self.rows), jnp.float32)] * self.pieces
        return pl.run_scoped(all_chunks, *sums)


@functools.partial(jax.jit, static_argnames=("wave", "interpret"))
def gemm_kernel(x, weight, wave=None, *, interpret=None):
    """`x @ weight` in their dtype.

    `wave`: what `gemm.choose` says. `interpret`: parameters of Mosaic's interpreter.
    """
    if wave is not None:
        return wave_kernel("gemm", x, weight, wave, _as_is, interpret=interpret)
    columns, (_, row_blocks) = weight.shape[1], rows_of(x.shape[0])
    pieces = 1 if row_blocks * pl.cdiv(columns, COLUMNS) <= device.MULTIPROCESSORS else 2
    starts, step = [COLUMNS * piece for piece in range(pieces)], COLUMNS * pieces
    y = jax.ShapeDtypeStruct((1, x.shape[0], columns), x.dtype)
    (y,) = _launch("gemm", x, weight, starts, step, _as_is, y, interpret)
    return y


@functools.partial(jax.jit, static_argnames=("wave", "interpret"))
def split_gemm_kernel(x, weight, wave=None, *, interpret=None):
    """`split_matmul`, of one part as tokens; `interpret`: as above."""
    if wave is not None:
        return wave_kernel("split_gemm", x, weight, wave, _as_is, interpret=interpret)
    parts = parts_of(x.shape[0], *weight.shape)
    if parts == 1:
        return gemm_kernel(x, weight, interpret=interpret)
    y = jax.ShapeDtypeStruct((parts, x.shape[0], weight.shape[1]), jnp.float32)
    return _launch("split_gemm", x, weight, [0], COLUMNS, _as_is, y, interpret)


@functools.partial(jax.jit, static_argnames=("wave", "interpret"))
def matmul_silu_kernel(x, weight, wave=None, *, interpret=None):
    """`matmul_silu`; `interpret`: as above."""
    outer = weight.shape[1] // 2
    if wave is not None:
        return wave_kernel("matmul_silu", x, weight, wave, _gated, gates=True, interpret=interpret)
    y = jax.ShapeDtypeStruct((1, x.shape[0], outer), x.dtype)
    (y,) = _launch("matmul_silu", x, weight, [0, outer], COLUMNS, _gated, y, interpret)
    return y


def _as_is(sums, dtype):
    return [sum_.astype(dtype) for sum_ in sums]


def _gated(sums, dtype):
    """Gates and others are rounded first, as if they had been put out."""
    gate, other = (sum_.astype(dtype).astype(jnp.float32) for sum_ in sums)
    return [(gate / (1.0 + jnp.exp(-gate)) * other).astype(dtype)]


def _launch(name, x, weight, starts, step, finish, y, interpret):
    """`y`, `[parts, tokens, columns]`, of what `finish` makes of each block's products.

    `starts`: the columns of the weight where the pieces of the first block begin, those of the next
    begin `step` columns behind. `finish` gives `step` columns, in arrays of `COLUMNS`.
    """
    (tokens, inner), (parts, _, outer) = x.shape, y.shape
    (rows, row_blocks), pieces = rows_of(tokens), len(starts)
    columns, size = pl.cdiv(outer, step), y.dtype.itemsize
    blocks, beside = parts * columns * row_blocks, rows * COLUMNS * size
    tile = Tile.of(x, rows, pieces, inner // parts, blocks, beside)

    def body(x, weight, y, *, out, **scratch):
        part, block, row = (lax.axis_index(name) for name in ("part", "column", "row"))
        token, column = row * rows, block * step
        begin = token, part * tile.inner, [start + column for start in starts]
        sums = tile.multiply(x, weight, *begin, **scratch)
        for i, done in enumerate(finish(sums, y.dtype)):
            if i:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()  # by all warps
            # Neighbouring columns in one thread, as they lie in a row of `y`.
            out.T[...] = plgpu.layout_cast(done, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            here = pl.ds(token, rows), pl.ds(column + i * COLUMNS, COLUMNS)
            plgpu.copy_smem_to_gmem(out, y.at[part, *here])
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=y,
        scratch_types=tile.scratch() | {"out": tensor_cores.tile(rows, COLUMNS, dtype=y.dtype)},
        # The last varies fastest: blocks with the same part of the weight run side by side.
        grid=(parts, columns, row_blocks),
        grid_names=("part", "column", "row"),
        # Safe without barriers but its own.
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=0
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, weight)
