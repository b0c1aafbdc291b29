"""Kernel of matmuls of few rows with weights in FP8 as published (Pallas, Mosaic GPU).

A block has all rows, 64 columns of the weight, and all or part of its features. One warp copies the
weight into a ring, 128 features at a time, and another one the activations. Two warpgroups take
turns to compute the activations from what was copied, and to make e4m3 numbers of them: two each,
or one that is rounded (`float8_terms`). Another warpgroup multiplies the weight's bytes by these,
scales the sum and adds it in float32.

Everything before the matmul thus runs beside it: the activation of a feed-forward layer, and the
gated norm of Gated DeltaNet.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, layouts, tensor_cores
from jaxspec.pallas.matmul.activation import Activation
from jaxspec.pallas.matmul.float8 import Float8Tiling
from jaxspec.pallas.matmul.float8_activations_block import Activations, activated, normed, plain
from jaxspec.pallas.matmul.float8_terms import CHUNK, LOW, ROWS, rounded, split
from jaxspec.pallas.matmul.products import BLOCK_N
from jaxspec.weight import SCALED_COLUMNS, Float8Blocks

_MAX_STAGES = 24
# Stages of what the activations are computed from, and of their e4m3 numbers. Both are even: each
# stage belongs to one splitter, which waits for all its phases.
_COPIED_STAGES, _TOKEN_STAGES = 8, 4
_SPLITTERS = 2  # warpgroups that take turns to split activations
_RESERVED = 8192  # bytes of barriers, and for rounding up allocations


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def matmul_kernel(x, weight, *, tiling=None, interpret=None):
    """Return `x @ weight` in the dtype of `x`; `weight` is a type of `float8`, as in all these."""
    tiling = tiling or _tiling(x, weight, is_split=False)
    (y,) = _launch("float8_matmul", plain(x), weight, tiling, x.dtype, interpret)
    return y


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def split_matmul_kernel(x, weight, *, tiling=None, interpret=None):
    """Run `split_matmul`: return partial sums, or the output itself if there is one part."""
    tiling = tiling or _tiling(x, weight, is_split=True)
    return _split("float8_split_matmul", plain(x), weight, tiling, interpret)


@functools.partial(jax.jit, static_argnames=("activation", "tiling", "interpret"))
def activated_matmul_kernel(x, weight, activation, *, tiling=None, interpret=None):
    """Run `gated_matmul` or `squared_relu_matmul`."""
    tiling = tiling or _tiling(x, weight, is_split=True)
    name = "float8_gated_matmul" if activation is Activation.SWIGLU else "float8_squared_relu"
    return _split(name, activated(x, activation), weight, tiling, interpret)


@functools.partial(jax.jit, static_argnames=("tiling", "interpret"))
def gated_norm_matmul_kernel(heads, norm, weight, *, tiling=None, interpret=None):
    tiling = tiling or _tiling(heads, weight, is_split=True)
    name = "float8_gated_norm_matmul"
    return _split(name, normed(heads, norm), weight, tiling, interpret)


def _tiling(x, weight, is_split):
    return Float8Tiling.of(x.shape[0], weight.inner, weight.outer, is_split=is_split)


def _split(name, activations, weight, tiling, interpret):
    dtype = activations.dtype if tiling.parts == 1 else jnp.float32
    y = _launch(name, activations, weight, tiling, dtype, interpret)
    return y[0] if tiling.parts == 1 else y


def _launch(name, activations: Activations, weight, tiling, dtype, interpret):
    """Return `[parts, tokens, outer]` in `dtype`."""
    outer = weight.outer
    block = _Block.of(activations, weight, tiling, dtype)
    count = len(activations.operands)

    def body(*refs, **scratch):
        block.run(_Operands(refs[:count], *refs[count:]), _Buffers(**scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=jax.ShapeDtypeStruct((tiling.parts, activations.tokens, outer), dtype),
        scratch_types=block.scratch(),
        grid=(tiling.parts, outer // BLOCK_N),
        grid_names=("part", "column"),
        num_threads=_SPLITTERS + 2,
        thread_name="warpgroup",
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(*activations.operands, weight.array, weight.scale)


class _Operands(NamedTuple):
    activations: Any
    weight: Any
    scale: Any
    y: Any


class _Buffers(NamedTuple):
    """Shared memory of a block: three rings, each with barriers of its stages."""

    weight: Any
    weight_filled: Any
    weight_freed: Any
    copied: Any  # what the activations are computed from, a list
    copied_filled: Any
    copied_freed: Any
    tokens: Any  # the terms of the activations, one after the other
    factors: Any  # of each row
    tokens_filled: Any
    tokens_freed: Any
    scales: Any  # of the weight's blocks; None with a scale per column
    scaled: Any  # barrier of `scales`
    out: Any


@dataclasses.dataclass(frozen=True)
class _Block:
    """A block of the kernel: its sizes, and what its warpgroups do."""

    activations: Activations
    terms: int
    tiling: Float8Tiling
    chunks: int  # of all parts
    by_block: bool  # True if blocks of the weight have a scale, not columns
    dtype: Any  # of the output
    stages: int  # of the weight

    @staticmethod
    def of(activations, weight, tiling, dtype):
        """Return the block with as many stages of the weight as fit beside everything else."""
        chunks, by_block = weight.inner // CHUNK, isinstance(weight, Float8Blocks)
        rows, terms = tiling.rows, weight.terms
        held = rows * BLOCK_N * jnp.dtype(dtype).itemsize + _RESERVED + 4 * chunks * by_block
        bytes_copied = sum(rows * CHUNK * piece.dtype.itemsize for piece in activations.pieces)
        held += _COPIED_STAGES * bytes_copied + _TOKEN_STAGES * rows * (terms * CHUNK + 4)
        stages = (device.room(tiling.blocks(weight.outer)) - held) // (CHUNK * BLOCK_N)
        stages = max(2, min(stages, _MAX_STAGES))
        return _Block(activations, terms, tiling, chunks, by_block, dtype, stages)

    def scratch(self):
        rows, pieces = self.tiling.rows, self.activations.pieces
        tile, f8 = tensor_cores.tile, jnp.float8_e4m3fn
        copied = _COPIED_STAGES, rows, CHUNK
        return {
            "weight": tile(self.stages, BLOCK_N, CHUNK, dtype=f8),
            "weight_filled": plgpu.Barrier(num_barriers=self.stages),
            "weight_freed": plgpu.Barrier(num_barriers=self.stages),
            "copied": [plgpu.SMEM(copied, piece.dtype) for piece in pieces],
            "copied_filled": plgpu.Barrier(num_arrivals=len(pieces), num_barriers=_COPIED_STAGES),
            "copied_freed": plgpu.Barrier(num_barriers=_COPIED_STAGES),
            "tokens": tile(_TOKEN_STAGES, self.terms * rows, CHUNK, dtype=f8),
            "factors": plgpu.SMEM((_TOKEN_STAGES, rows), jnp.float32),
            "tokens_filled": plgpu.Barrier(num_barriers=_TOKEN_STAGES),
            "tokens_freed": plgpu.Barrier(num_barriers=_TOKEN_STAGES),
            "scales": plgpu.SMEM((1, self.chunks), jnp.float32) if self.by_block else None,
            "scaled": plgpu.Barrier(),
            "out": tile(rows, BLOCK_N, dtype=self.dtype),
        }

    def run(self, operands, buffers):
        warpgroup, part = lax.axis_index("warpgroup"), lax.axis_index("part")
        first, end = (lax.div((part + i) * self.chunks, self.tiling.parts) for i in range(2))
        span = first, end - first

        @pl.when(warpgroup == 0)
        def _():
            self._multiply(span, operands, buffers)

        @pl.when((warpgroup > 0) & (warpgroup <= _SPLITTERS))
        def _():
            self._split(warpgroup - 1, span[1], operands, buffers)

        @pl.when(warpgroup > _SPLITTERS)
        def _():
            self._copy(span, operands, buffers)

    def _copy(self, span, operands, buffers):
        """Fill the rings of the weight and of the activations' pieces, with a warp for each."""
        first, count = span
        column, rows = lax.axis_index("column"), pl.ds(0, self.tiling.rows)
        columns = pl.ds(column * BLOCK_N, BLOCK_N)

        def fetch_weight(j):
            stage = lax.rem(j, self.stages)
            freed = buffers.weight_freed.at[stage]
            pl.when(j >= self.stages)(lambda: plgpu.barrier_wait(freed))
            part = operands.weight.at[columns, pl.ds((first + j) * CHUNK, CHUNK)]
            filled = buffers.weight_filled.at[stage]
            plgpu.copy_gmem_to_smem(part, buffers.weight.at[stage], filled)

        def fetch_pieces(j):
            stage = lax.rem(j, _COPIED_STAGES)
            freed = buffers.copied_freed.at[stage]
            pl.when(j >= _COPIED_STAGES)(lambda: plgpu.barrier_wait(freed))
            filled = buffers.copied_filled.at[stage]
            for piece, copied in zip(self.activations.pieces, buffers.copied, strict=True):
                features = pl.ds(piece.first + (first + j) * CHUNK, CHUNK)
                part = operands.activations[piece.operand].at[rows, features]
                plgpu.copy_gmem_to_smem(part, copied.at[stage], filled)

        @plgpu.warp_map
        def _(warp):
            @pl.when(warp == 0)
            def _():
                if self.by_block:
                    part = operands.scale.at[pl.ds(column * (BLOCK_N // SCALED_COLUMNS), 1)]
                    plgpu.copy_gmem_to_smem(part, buffers.scales, buffers.scaled)
                pl.loop(0, count)(fetch_weight)

            @pl.when(warp == 1)
            def _():
                pl.loop(0, count)(fetch_pieces)

    def _split(self, turn, count, operands, buffers):
        """Compute the activations of every other chunk, and make e4m3 numbers of them."""
        layout = layouts.piece_layout(ROWS, CHUNK, self.activations.itemsize)
        of_features = self.activations.constants(operands.activations, layout)

        def advance(stage, stages):
            return jnp.where(stage + _SPLITTERS >= stages, turn, stage + _SPLITTERS)

        def step(i, at):
            source, target = at
            j = turn + i * _SPLITTERS
            plgpu.barrier_wait(buffers.copied_filled.at[source])
            freed = buffers.tokens_freed.at[target]
            pl.when(j >= _TOKEN_STAGES)(lambda: plgpu.barrier_wait(freed))
            for first in range(0, self.tiling.rows, ROWS):
                rows = pl.ds(first, ROWS)
                loaded = [access.load(x.at[source, rows], layout) for x in buffers.copied]
                x = self.activations.of(layout, loaded, of_features)
                *numbers, factor = split(x) if self.terms == 2 else rounded(x)
                for i, number in enumerate(numbers):
                    of_term = pl.ds(i * self.tiling.rows + first, ROWS)
                    access.store(buffers.tokens.at[target, of_term], number)
                access.store(buffers.factors.at[target, rows], factor)
            plgpu.commit_smem()
            plgpu.barrier_arrive(buffers.tokens_filled.at[target])
            read = buffers.copied_freed.at[source]
            pl.when(j + _COPIED_STAGES < count)(lambda: plgpu.barrier_arrive(read))
            return advance(source, _COPIED_STAGES), advance(target, _TOKEN_STAGES)

        lax.fori_loop(0, lax.div(count - turn + _SPLITTERS - 1, _SPLITTERS), step, (turn, turn))

    def _multiply(self, span, operands, buffers):
        """Sum the products of the block's columns, and write them."""
        (first, count), rows = span, self.tiling.rows
        if self.by_block:
            plgpu.barrier_wait(buffers.scaled)

        def release(barrier, j, stages):
            """Free the stage of chunk `j` if a later chunk reuses it."""
            pl.when(j + stages < count)(lambda: plgpu.barrier_arrive(barrier))

        def step(j, carry):
            stage, at, total = carry
            plgpu.barrier_wait(buffers.weight_filled.at[stage])
            plgpu.barrier_wait(buffers.tokens_filled.at[at])
            tokens = buffers.tokens.at[at].transpose((1, 0))
            sums = tensor_cores.product(buffers.weight.at[stage], tokens)
            release(buffers.weight_freed.at[stage], j, self.stages)
            factor = access.load(buffers.factors.at[at], plgpu.Layout.WGMMA.reduce(0))
            release(buffers.tokens_freed.at[at], j, _TOKEN_STAGES)
            factor = factor * buffers.scales[0, first + j] if self.by_block else factor
            sums = sums[:, :rows] + sums[:, rows:] * LOW if self.terms == 2 else sums
            total = total + sums * lax.broadcast_in_dim(factor, sums.shape, (1,))
            stage = access.next_stage(stage, self.stages)
            return stage, access.next_stage(at, _TOKEN_STAGES), total

        zeros = plgpu.layout_cast(jnp.zeros((BLOCK_N, rows), jnp.float32), plgpu.Layout.WGMMA)
        _, _, total = lax.fori_loop(0, count, step, (jnp.int32(0), jnp.int32(0), zeros))
        columns = pl.ds(lax.axis_index("column") * BLOCK_N, BLOCK_N)
        if not self.by_block:
            scale = access.load(operands.scale.at[columns], plgpu.Layout.WGMMA.reduce(1))
            total = total * lax.broadcast_in_dim(scale, total.shape, (0,))
        # In this layout a thread holds adjacent columns, which are contiguous in a row of `y`.
        total = plgpu.layout_cast(total.astype(self.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        buffers.out.T[...] = total
        plgpu.commit_smem()
        target = operands.y.at[lax.axis_index("part"), pl.ds(0, rows), columns]
        plgpu.copy_smem_to_gmem(buffers.out, target)
        plgpu.wait_smem_to_gmem(0)
