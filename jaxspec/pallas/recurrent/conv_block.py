"""The convolution inside a block of a replay's kernel, from a projection on.

A thread has some channels. It reads the inputs before the row's tokens from the convolution's ring,
then the tokens, and stores these in the ring, in rows that no block reads. So several blocks may
compute the same channels, and one of them stores those. The numbers are those of `conv_update`.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.gpu.access import load, store
from jaxspec.pallas.recurrent.conv_update_kernel import convolved
from jaxspec.pallas.recurrent.replay_block import RingBlock


class ConvInputs(NamedTuple):
    """Inputs of the convolution in some channels, in registers."""

    channels: Any  # slice of all channels
    taps: list[Any]
    bias: Any  # None: there is none
    past: list[Any]  # the inputs before the step's tokens, the oldest first
    new: list[Any]  # those of the tokens


class ConvBlock:
    """The convolution of one row: where its inputs lie, and what becomes of them."""

    def __init__(self, ring: RingBlock, conv_rows: int, bias: Any = None):
        """`conv_rows`: rows of the convolution's ring. `bias`: a reference to all channels'.

        The references `x`, `taps` and `conv` are those of `ring.gmem`.
        """
        self.ring, self.gmem, self.conv_rows, self.bias = ring, ring.gmem, conv_rows, bias
        self.history, self.width = ring.gmem.taps.shape[0] - 1, ring.sizes.width

    def load(self, channels: Any, layout: Any) -> ConvInputs:
        """The inputs in these channels, and their taps."""
        gmem, history = self.gmem, self.history
        new = [gmem.x.at[self.ring.table.row, t, channels] for t in range(self.width)]
        taps = [gmem.taps.at[i, channels] for i in range(history + 1)]
        past = [self._in_ring(i - history, channels) for i in range(history)]
        taps, past, new = ([load(ref, layout) for ref in refs] for refs in (taps, past, new))
        bias = None if self.bias is None else load(self.bias.at[channels], layout)
        return ConvInputs(channels, taps, bias, past, new)

    def _in_ring(self, offset, channels):
        """The input `offset` tokens after this step's first, in the convolution's ring."""
        row = self.ring.table.conv_start + offset % self.conv_rows
        row = jnp.where(row >= self.conv_rows, row - self.conv_rows, row)
        return self.gmem.conv.at[self.ring.pool_index * self.conv_rows + row, channels]

    def convolve(self, inputs: ConvInputs) -> list[Any]:
        """The convolution's output for each token, rounded as `conv_update` gives it."""
        dtype = inputs.new[0].dtype
        taps, tokens = (
            [x.astype(jnp.float32) for x in xs] for xs in (inputs.taps, inputs.past + inputs.new)
        )
        bias = None if inputs.bias is None else inputs.bias.astype(jnp.float32)
        outs = [convolved(tokens[t:][: len(taps)], taps, bias) for t in range(self.width)]
        return [out.astype(dtype) for out in outs]

    def append(self, inputs: list[ConvInputs], condition: Any = True) -> None:
        """Store these inputs of the tokens in the convolution's ring, under a condition."""

        def append_token(t):
            for part in inputs:
                store(self._in_ring(t, part.channels), part.new[t])

        self.ring.for_real_tokens(append_token, condition)

    def load_column(self, column: Any) -> list[Any]:
        """One column of the projection, a lane for each token, in `pieces_of` the tokens."""
        x = self.gmem.x.at[self.ring.table.row]
        return [
            load(x.at[pl.ds(start, count), pl.ds(column, 1)], _a_lane_each(count))
            if count > 1
            else x[start, column]
            for start, count in layouts.pieces_of(self.width)
        ]

    def store_column(self, target: Any, first: int, pieces: list[Any]) -> None:
        """Store what was made of a `load_column` in shared memory, from element `first` on."""
        for (start, count), piece in zip(layouts.pieces_of(self.width), pieces, strict=True):
            if count > 1:
                store(target.at[pl.ds(first + start, count)], jnp.sum(piece, axis=1))
            else:
                target[first + start] = piece


def _a_lane_each(count):
    """Register layout of a column of `count` elements, more than one: the same in every warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((count, 1),)),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2, plgpu.Replicated(32 // count)),
        vector_dim=-1,
    )
