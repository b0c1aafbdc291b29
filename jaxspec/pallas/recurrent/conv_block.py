"""Convolution inside a block of a replay kernel, starting from the projection.

Each thread handles some channels. It reads the inputs before the row's tokens from the
convolution's ring, then the tokens, and stores the tokens in ring rows that no block reads. Several
blocks may hence compute the same channels without a race, and one of them stores the inputs. The
numbers are those of `conv_update`.
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
    """Inputs of the convolution for some channels, in registers."""

    channels: Any  # slice of all channels
    taps: list[Any]
    bias: Any  # None means no bias
    past: list[Any]  # inputs before the step's tokens, the oldest first
    new: list[Any]  # inputs of the step's tokens


class ConvBlock:
    """Convolution of one row: loads its inputs, computes its outputs, and updates its ring."""

    def __init__(self, ring: RingBlock, conv_rows: int, bias: Any = None):
        """Take the references `x`, `taps` and `conv` from `ring.gmem`.

        `conv_rows`: rows of the convolution's ring. `bias`: a reference to the bias of all
        channels, or None.
        """
        self.ring, self.gmem, self.conv_rows, self.bias = ring, ring.gmem, conv_rows, bias
        self.history, self.width = ring.gmem.taps.shape[0] - 1, ring.sizes.width

    def load(self, channels: Any, layout: Any) -> ConvInputs:
        gmem, history = self.gmem, self.history
        new = [gmem.x.at[self.ring.table.row, t, channels] for t in range(self.width)]
        taps = [gmem.taps.at[i, channels] for i in range(history + 1)]
        past = [self._in_ring(i - history, channels) for i in range(history)]
        taps, past, new = ([load(ref, layout) for ref in refs] for refs in (taps, past, new))
        bias = None if self.bias is None else load(self.bias.at[channels], layout)
        return ConvInputs(channels, taps, bias, past, new)

    def _in_ring(self, offset, channels):
        """Return the reference in the ring to the input `offset` tokens after this step's first."""
        row = self.ring.table.conv_start + offset % self.conv_rows
        row = jnp.where(row >= self.conv_rows, row - self.conv_rows, row)
        return self.gmem.conv.at[self.ring.pool_index * self.conv_rows + row, channels]

    def convolve(self, inputs: ConvInputs) -> list[Any]:
        """Return the convolution's output for each token, rounded as in `conv_update`."""
        dtype = inputs.new[0].dtype
        taps, tokens = (
            [x.astype(jnp.float32) for x in xs] for xs in (inputs.taps, inputs.past + inputs.new)
        )
        bias = None if inputs.bias is None else inputs.bias.astype(jnp.float32)
        outs = [convolved(tokens[t:][: len(taps)], taps, bias) for t in range(self.width)]
        return [out.astype(dtype) for out in outs]

    def append(self, inputs: list[ConvInputs], condition: Any = True) -> None:
        """Store the tokens' inputs in the convolution's ring if `condition` holds."""

        def append_token(t):
            for part in inputs:
                store(self._in_ring(t, part.channels), part.new[t])

        self.ring.for_real_tokens(append_token, condition)

    def load_column(self, column: Any) -> list[Any]:
        """Load a column of the projection, one lane per token, in the `pieces_of` the tokens."""
        x = self.gmem.x.at[self.ring.table.row]
        return [
            load(x.at[pl.ds(start, count), pl.ds(column, 1)], _a_lane_each(count))
            if count > 1
            else x[start, column]
            for start, count in layouts.pieces_of(self.width)
        ]

    def store_column(self, target: Any, first: int, pieces: list[Any]) -> None:
        """Store pieces, as of `load_column`, in shared memory from element `first` on."""
        for (start, count), piece in zip(layouts.pieces_of(self.width), pieces, strict=True):
            if count > 1:
                store(target.at[pl.ds(first + start, count)], jnp.sum(piece, axis=1))
            else:
                target[first + start] = piece


def _a_lane_each(count):
    """Return the register layout of a column of `count > 1` elements, copied in every warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((count, 1),)),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2, plgpu.Replicated(32 // count)),
        vector_dim=-1,
    )
