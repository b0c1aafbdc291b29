"""Kernel that makes e4m3 numbers of the rows of a matmul, once for all its blocks (Mosaic GPU).

A block has 8 rows and some chunks of 128 features. It computes the activations from what it copies,
as `float8_kernel` does for few rows, so the activation of a feed-forward layer or the gated norm
before the matmul takes no kernel of its own.
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
from jaxspec.pallas.matmul.float8_activations_block import Activations, activated, normed, plain
from jaxspec.pallas.matmul.float8_terms import CHUNK, ROWS, Terms, padded_rows, rounded, split

_F8 = jnp.float8_e4m3fn
_MAX_CHUNKS = 8  # chunks of a block, which are all in flight together
_MIN_BLOCKS = 8 * device.MULTIPROCESSORS  # blocks up to which each has a chunk of its own


@functools.partial(jax.jit, static_argnames=("terms", "interpret"))
def split_kernel(x, terms, *, interpret=None):
    """Return the `Terms` of the rows of `x`: two, or one, as in all these."""
    return _launch("float8_split", plain(x), terms, interpret)


@functools.partial(jax.jit, static_argnames=("activation", "terms", "interpret"))
def activated_split_kernel(x, activation, terms, *, interpret=None):
    """Return the `Terms` of `activation(x)`."""
    name = "float8_gated_split" if activation is Activation.SWIGLU else "float8_squared_relu_split"
    return _launch(name, activated(x, activation), terms, interpret)


@functools.partial(jax.jit, static_argnames=("terms", "interpret"))
def gated_norm_split_kernel(heads, norm, terms, *, interpret=None):
    """Return the `Terms` of `norm(heads)`, for heads of 128 channels."""
    return _launch("float8_gated_norm_split", normed(heads, norm), terms, interpret)


def _launch(name, activations, terms, interpret):
    block = _Block.of(activations, terms)
    count, inner = len(activations.operands), activations.inner
    rows = padded_rows(activations.tokens)
    numbers = [jax.ShapeDtypeStruct((rows, inner), jnp.float8_e4m3fn)] * terms
    factors = jax.ShapeDtypeStruct((inner // CHUNK, rows), jnp.float32)

    def body(*refs, **scratch):
        outputs = refs[count:]
        block.run(_Operands(refs[:count], outputs[:-1], outputs[-1]), _Buffers(**scratch))

    kernel = plgpu.kernel(
        body,
        kernel_name=name,
        out_type=(*numbers, factors),
        scratch_types=block.scratch(),
        grid=(rows // ROWS, inner // CHUNK // block.chunks),
        grid_names=("row", "span"),
        num_threads=1,
        thread_name="warpgroup",
        compiler_params=access.EXPLICIT_BARRIERS,
        **({} if interpret is None else {"interpret": interpret}),
    )
    *numbers, factors = kernel(*[_whole_tiles(x) for x in activations.operands])
    return Terms(tuple(numbers), factors)


def _whole_tiles(x):
    """Pad the rows of an operand: Mosaic copies from less than a tile of 8 rows, or from whole."""
    tokens = x.shape[0]
    if x.ndim == 1 or tokens <= ROWS or tokens % ROWS == 0:
        return x
    return jnp.pad(x, ((0, padded_rows(tokens) - tokens), (0, 0)))


class _Operands(NamedTuple):
    activations: Any
    numbers: Any
    factors: Any


class _Buffers(NamedTuple):
    """Shared memory of a block, with a place for each of its chunks."""

    copied: Any  # what the activations are computed from, a list
    filled: Any
    numbers: Any


@dataclasses.dataclass(frozen=True)
class _Block:
    activations: Activations
    terms: int
    chunks: int

    @staticmethod
    def of(activations, terms):
        of_rows = activations.inner // CHUNK
        all_chunks = padded_rows(activations.tokens) // ROWS * of_rows
        fitting = [n for n in range(1, _MAX_CHUNKS + 1) if of_rows % n == 0]
        enough = [n for n in fitting if all_chunks >= n * _MIN_BLOCKS]
        return _Block(activations, terms, max(enough, default=1))

    def scratch(self):
        pieces = self.activations.pieces
        return {
            "copied": [plgpu.SMEM((self.chunks, ROWS, CHUNK), piece.dtype) for piece in pieces],
            "filled": plgpu.Barrier(num_arrivals=len(pieces), num_barriers=self.chunks),
            "numbers": tensor_cores.tile(self.terms, self.chunks, ROWS, CHUNK, dtype=_F8),
        }

    def run(self, operands, buffers):
        first_chunk = lax.axis_index("span") * self.chunks
        rows = pl.ds(lax.axis_index("row") * ROWS, ROWS)

        def features(piece_start, j):
            return pl.ds(piece_start + (first_chunk + j) * CHUNK, CHUNK)

        def fetch(j):
            filled = buffers.filled.at[j]
            for piece, copied in zip(self.activations.pieces, buffers.copied, strict=True):
                part = operands.activations[piece.operand].at[rows, features(piece.first, j)]
                plgpu.copy_gmem_to_smem(part, copied.at[j], filled)

        @plgpu.warp_map  # a single warp: more would repeat the copies and their barrier arrivals
        def _(warp):
            pl.when(warp == 0)(lambda: pl.loop(0, self.chunks)(fetch))

        layout = layouts.piece_layout(ROWS, CHUNK, self.activations.itemsize)
        of_features = self.activations.constants(operands.activations, layout)

        @pl.loop(0, self.chunks)
        def _(j):
            plgpu.barrier_wait(buffers.filled.at[j])
            loaded = [access.load(x.at[j], layout) for x in buffers.copied]
            x = self.activations.of(layout, loaded, of_features)
            *numbers, factor = split(x) if self.terms == 2 else rounded(x)
            access.store(operands.factors.at[first_chunk + j, rows], factor)
            for i, number in enumerate(numbers):
                access.store(buffers.numbers.at[i, j], number)
            plgpu.commit_smem()
            for i, target in enumerate(operands.numbers):
                part = target.at[rows, features(0, j)]
                plgpu.copy_smem_to_gmem(buffers.numbers.at[i, j], part)

        plgpu.wait_smem_to_gmem(0)
