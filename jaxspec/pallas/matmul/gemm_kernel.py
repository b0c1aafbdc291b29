"""Kernels of matmuls of 16 to 256 rows (Pallas, Mosaic GPU).

A block multiplies up to 128 rows with 64 or 128 columns of the weight. It computes the transposed
matmul, as `skinny_gemm_kernel` does: `y.T = weight.T @ x.T`. The M of wgmma is 64 columns of the
weight; its N is the number of rows, in steps of 8. Rows and weight are copied through one ring, a
chunk of features at a time. All chunks of the weight that fit into shared memory are in flight
together, because up to about 64 rows the matmul is memory-bound. With more rows, wide models use
`one_wave_gemm_kernel`.
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
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.gemm import num_parts, split_rows
from jaxspec.pallas.matmul.one_wave_gemm_kernel import one_wave_kernel
from jaxspec.pallas.matmul.products import BLOCK_N

_MAX_STAGES = 32  # Mosaic's limit on barriers


@dataclasses.dataclass(frozen=True)
class GemmTiling:
    """Tiling of a block's matmul: `rows` tokens by `pieces * BLOCK_N` columns of the weight."""

    rows: int
    pieces: int
    inner: int  # features of a part
    dtype: Any
    stages: int  # stages of the ring, `CHUNK` features each

    @staticmethod
    def of(x: Any, rows: int, pieces: int, inner: int, blocks: int, reserved: int) -> "GemmTiling":
        """Return the tiling with the largest ring that fits beside `reserved` bytes.

        Raises:
            ValueError: two chunks do not fit, one to be copied while the other is multiplied.
        """
        chunks, stage = inner // CHUNK, 2 * CHUNK * (rows + pieces * BLOCK_N)
        stages = min(chunks, (device.room(blocks) - reserved) // stage, _MAX_STAGES)
        if stages < min(2, chunks):
            raise ValueError(
                f"A ring must have room for 2 chunks of {stage} bytes, but beside {reserved} bytes "
                f"there is room for {stages}. Take fewer rows or pieces."
            )
        return GemmTiling(rows, pieces, inner, x.dtype, stages)

    @property
    def chunks(self) -> int:
        return self.inner // CHUNK

    def scratch(self) -> dict[str, Any]:
        rows = self.stages, self.rows, CHUNK
        columns = self.stages, self.pieces, CHUNK, BLOCK_N
        return {
            "tokens": tensor_cores.tile(*rows, dtype=self.dtype),
            "ring": tensor_cores.tile(*columns, dtype=self.dtype),
            "filled": plgpu.Barrier(num_arrivals=self.pieces + 1, num_barriers=self.stages),
        }

    def multiply(self, x, weight, token, feature, columns, *, tokens, ring, filled):
        """Return the transposed matmul of each piece, float32 `[BLOCK_N, rows]`.

        The block starts at `token` and `feature`, and each piece at one of `columns`.
        """

        def fetch(j):
            """Start the copies of chunk `j`; tokens and columns past the last become zeros."""
            stage = lax.rem(j, self.stages)
            chunk = pl.ds(feature + j * CHUNK, CHUNK)
            for piece, column in enumerate(columns):
                part = weight.at[chunk, pl.ds(column, BLOCK_N)]
                plgpu.copy_gmem_to_smem(part, ring.at[stage, piece], filled.at[stage])
            part = x.at[pl.ds(token, self.rows), chunk]
            plgpu.copy_gmem_to_smem(part, tokens.at[stage], filled.at[stage])

        def all_chunks(*sums):
            def step(j, _):
                stage = lax.rem(j, self.stages)
                plgpu.barrier_wait(filled.at[stage])
                rows = tokens.at[stage].transpose((1, 0))
                for piece, sum_ in enumerate(sums):
                    plgpu.wgmma(sum_, ring.at[stage, piece].transpose((1, 0)), rows)
                plgpu.wgmma_wait(self.pieces)  # the previous chunk's wgmmas are done
                refill = j - 1 + self.stages

                @pl.when((j > 0) & (refill < self.chunks))
                def _():
                    plgpu.commit_smem()  # also a barrier: all warps are done
                    fetch(refill)

            lax.fori_loop(0, self.chunks, step, None)
            return [sum_[...] for sum_ in sums]

        for j in range(self.stages):
            fetch(jnp.int32(j))
        sums = [plgpu.WGMMAAccumulatorRef((BLOCK_N, self.rows), jnp.float32)] * self.pieces
        return pl.run_scoped(all_chunks, *sums)


@functools.partial(jax.jit, static_argnames=("wave", "interpret"))
def gemm_kernel(x, weight, wave=None, *, interpret=None):
    """Return `x @ weight` in their dtype; `weight` is the array of a `Dense` here and below.

    `wave` is the tiling from `gemm.choose`.
    """
    if wave is not None:
        return one_wave_kernel("gemm", x, weight, wave, _cast, interpret=interpret)
    (y,) = _launch("gemm", x, weight, *_neighbours(x, weight), _cast, _whole(x, weight), interpret)
    return y


@functools.partial(jax.jit, static_argnames=("wave", "interpret"))
def matmul_squared_relu_kernel(x, weight, wave=None, *, interpret=None):
    finish, y = _squared_relu, _whole(x, weight)
    if wave is not None:
        return one_wave_kernel("matmul_squared_relu", x, weight, wave, finish, interpret=interpret)
    pieces = _neighbours(x, weight)
    (y,) = _launch("matmul_squared_relu", x, weight, *pieces, finish, y, interpret)
    return y


@functools.partial(jax.jit, static_argnames=("wave", "interpret"))
def split_gemm_kernel(x, weight, wave=None, *, interpret=None):
    """Run `split_matmul`: return partial sums, or the output itself if there is one part."""
    if wave is not None:
        return one_wave_kernel("split_gemm", x, weight, wave, _cast, interpret=interpret)
    parts = num_parts(x.shape[0], *weight.shape)
    if parts == 1:
        return gemm_kernel(x, weight, interpret=interpret)
    y = jax.ShapeDtypeStruct((parts, x.shape[0], weight.shape[1]), jnp.float32)
    return _launch("split_gemm", x, weight, [0], BLOCK_N, _cast, y, interpret)


@functools.partial(jax.jit, static_argnames=("wave", "interpret"))
def matmul_silu_kernel(x, weight, wave=None, *, interpret=None):
    outer = weight.shape[1] // 2
    if wave is not None:
        return one_wave_kernel(
            "matmul_silu", x, weight, wave, _swiglu, gate_up=True, interpret=interpret
        )
    y = jax.ShapeDtypeStruct((1, x.shape[0], outer), x.dtype)
    (y,) = _launch("matmul_silu", x, weight, [0, outer], BLOCK_N, _swiglu, y, interpret)
    return y


def _whole(x, weight):
    """Return the shape of a matmul that is not split, as one part."""
    return jax.ShapeDtypeStruct((1, x.shape[0], weight.shape[1]), x.dtype)


def _neighbours(x, weight):
    """Return the first columns of the first block's pieces, and the step to the next block.

    Pieces of a block are adjacent. A block has two if there are more blocks of one piece than
    multiprocessors.
    """
    blocks = split_rows(x.shape[0])[1] * pl.cdiv(weight.shape[1], BLOCK_N)
    pieces = 1 if blocks <= device.MULTIPROCESSORS else 2
    return [BLOCK_N * piece for piece in range(pieces)], BLOCK_N * pieces


def _cast(sums, dtype):
    return [sum_.astype(dtype) for sum_ in sums]


def _swiglu(sums, dtype):
    """Return `silu(gate) * up`; both are rounded first, as if they had been stored."""
    rounded = [sum_.astype(dtype).astype(jnp.float32) for sum_ in sums]
    return [Activation.SWIGLU.of_blocks(rounded).astype(dtype)]


def _squared_relu(sums, dtype):
    """Return `relu(up) ** 2`; the matmul is rounded first, as if it had been stored."""
    rounded = [sum_.astype(dtype).astype(jnp.float32) for sum_ in sums]
    return [Activation.SQUARED_RELU.of_blocks([up]).astype(dtype) for up in rounded]


def _launch(name, x, weight, starts, step, finish, y, interpret):
    """Run the kernel; return `y`, `[parts, tokens, columns]`: the matmuls after `finish`.

    The pieces of the first block start at the columns `starts` of the weight, those of the next
    block `step` columns further. `finish` returns `step` columns, in arrays of `BLOCK_N`.
    """
    (tokens, inner), (parts, _, outer) = x.shape, y.shape
    rows, row_blocks = split_rows(tokens)
    columns, size = pl.cdiv(outer, step), y.dtype.itemsize
    blocks, reserved = parts * columns * row_blocks, rows * BLOCK_N * size
    tiling = GemmTiling.of(x, rows, len(starts), inner // parts, blocks, reserved)

    def body(x, weight, y, *, out, **scratch):
        part, block, row = (lax.axis_index(name) for name in ("part", "column", "row"))
        token, column = row * rows, block * step
        feature, pieces = part * tiling.inner, [start + column for start in starts]
        sums = tiling.multiply(x, weight, token, feature, pieces, **scratch)
        for i, finished in enumerate(finish(sums, y.dtype)):
            if i:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                plgpu.commit_smem()  # also a barrier: all warps are done
            # In this layout a thread holds adjacent columns, which are contiguous in a row of `y`.
            out.T[...] = plgpu.layout_cast(finished, plgpu.Layout.WGMMA_TRANSPOSED)
            plgpu.commit_smem()
            target = y.at[part, pl.ds(token, rows), pl.ds(column + i * BLOCK_N, BLOCK_N)]
            plgpu.copy_smem_to_gmem(out, target)
        plgpu.wait_smem_to_gmem(0)

    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=y,
        scratch_types=tiling.scratch() | {"out": tensor_cores.tile(rows, BLOCK_N, dtype=y.dtype)},
        # The last axis varies fastest: blocks that share a part of the weight run side by side.
        grid=(parts, columns, row_blocks),
        grid_names=("part", "column", "row"),
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(x, weight)
