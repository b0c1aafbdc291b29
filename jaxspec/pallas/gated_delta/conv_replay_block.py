"""The tokens of a `gdn_conv_replay` block, which it makes of a projection.

A thread has a channel of queries, of keys and of values. It reads the inputs before the row's
tokens from the convolution's ring, then the tokens, and stores these in the ring, in rows that no
block reads. So blocks whose heads share a key read the same, and one of them stores it. The numbers
are those of `gdn_inputs` to the bit, but for the order of sums.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta import gates as gdn_gates
from jaxspec.pallas.gated_delta.heads import EPS, GdnHeads, gates_column
from jaxspec.pallas.gated_delta.replay_block import GdnLaunch, HeadPart
from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.gpu.access import load, store
from jaxspec.pallas.recurrent.conv_update_kernel import convolved
from jaxspec.pallas.recurrent.replay_block import RingBlock, broadcast


class Projection(NamedTuple):
    """The operands that tokens are made of."""

    x: Any  # [rows, width, columns]
    taps: Any  # [kernel, channels]
    decay: Any  # [value_heads, 2]


class _Inputs(NamedTuple):
    """Inputs of the convolution in some channels, in registers."""

    channels: Any  # slice of all channels
    taps: list[Any]
    past: list[Any]  # the inputs before the step's tokens, the oldest first
    new: list[Any]  # those of the tokens


class ConvTokens:
    """This step's tokens where the block makes them of a `Projection`."""

    def __init__(self, launch: GdnLaunch, ring: RingBlock, state: Any, part: HeadPart, smem: Any):
        """Begin to load the inputs. `state`: where queries and keys go."""
        self.ring, self.gmem, self.state, self.smem = ring, ring.gmem, state, smem
        self.sizes, self.conv_rows = launch.sizes, launch.conv_rows
        self.writes_keys = ring.leads_group() & (part.split == 0)
        self.history = self.gmem.taps.shape[0] - 1
        self._load_all(launch, part)

    def _load_all(self, launch, part):
        sizes, head, key_dim = self.sizes, self.ring.head, self.sizes.key_dim
        all_keys = sizes.key_heads * key_dim
        firsts = [first + self.ring.key_head * key_dim for first in (0, all_keys)]
        self.of_keys = [
            self._load_inputs(pl.ds(first, key_dim), self.ring.by_key) for first in firsts
        ]
        first = 2 * all_keys + (head * launch.splits + part.split) * sizes.values
        self.of_values = self._load_inputs(pl.ds(first, sizes.values), self.ring.by_value)
        heads = GdnHeads(sizes.key_heads, key_dim, sizes.heads)
        b = gates_column(self.gmem.taps.shape[1], heads) + head
        self.b, self.a = (self._load_column(column) for column in (b, b + sizes.heads))

    def _load_inputs(self, channels, layout):
        """The inputs in these channels, and their taps."""
        gmem, history = self.gmem, self.history
        new = [gmem.x.at[self.ring.table.row, t, channels] for t in range(self.sizes.width)]
        taps = [gmem.taps.at[i, channels] for i in range(history + 1)]
        past = [self._in_ring(i - history, channels) for i in range(history)]
        loaded = ([load(ref, layout) for ref in refs] for refs in (taps, past, new))
        return _Inputs(channels, *loaded)

    def _load_column(self, column):
        """One column of the projection, a lane for each token, in `pieces_of` the tokens."""
        x = self.gmem.x.at[self.ring.table.row]
        return [
            load(x.at[pl.ds(start, count), pl.ds(column, 1)], _a_lane_each(count))
            if count > 1
            else x[start, column]
            for start, count in layouts.pieces_of(self.sizes.width)
        ]

    def _in_ring(self, offset, channels):
        """The input `offset` tokens after this step's first, in the convolution's ring."""
        row = self.ring.table.conv_start + offset % self.conv_rows
        row = jnp.where(row >= self.conv_rows, row - self.conv_rows, row)
        return self.gmem.conv.at[self.ring.pool_index * self.conv_rows + row, channels]

    def copies(self) -> list[tuple[Any, Any]]:
        """No copies to shared memory: the block makes its tokens."""
        return []

    def finish(self) -> None:
        """Make the tokens, until all threads see them and `ring_decay`."""
        for first, inputs in zip((0, self.sizes.width), self.of_keys, strict=True):
            for t, out in enumerate(self._convolve(inputs)):
                store(self.state.tokens.at[first + t], out)
        for t, out in enumerate(self._convolve(self.of_values)):
            store(self.smem.v_then_o.at[t], out)
        self._store_gates()
        self._append([self.of_values])
        self._append(self.of_keys, self.writes_keys)
        self.ring.sync()
        self._normalise()
        self.ring.sync()

    def _convolve(self, inputs):
        """The convolution's float32 output for each token, rounded as `conv_update` gives it."""
        dtype = inputs.new[0].dtype
        taps, tokens = (
            [x.astype(jnp.float32) for x in xs] for xs in (inputs.taps, inputs.past + inputs.new)
        )
        outs = [convolved(tokens[t:][: len(taps)], taps) for t in range(self.sizes.width)]
        return [out.astype(dtype).astype(jnp.float32) for out in outs]

    def _store_gates(self):
        """Store log decay and strength of each token behind the log decays of the ring."""
        decay = [self.gmem.decay[self.ring.head, column] for column in range(2)]
        pieces = layouts.pieces_of(self.sizes.width)
        for (start, count), b, a in zip(pieces, self.b, self.a, strict=True):
            pair = gdn_gates.in_kernel(b.astype(jnp.float32), a.astype(jnp.float32), *decay)
            for i, gate in enumerate(pair):
                first = self.sizes.square + i * self.sizes.width + start
                if count > 1:
                    store(self.smem.g.at[pl.ds(first, count)], jnp.sum(gate, axis=1))
                else:
                    self.smem.g[first] = gate

    def _append(self, inputs, condition=True):
        """Store these inputs of the tokens in the convolution's ring, under a condition."""

        def append_token(t):
            for part in inputs:
                store(self._in_ring(t, part.channels), part.new[t])

        self.ring.for_real_tokens(append_token, condition)

    def _normalise(self):
        """Normalise queries and keys in place, and store keys as the ring will hold them."""
        width, key_dim, dtype = self.sizes.width, self.sizes.key_dim, self.sizes.dtype
        tokens = self.state.tokens
        # Each head lies in one warp, whose sum needs no other. Fewer than 4 tokens lie in several
        # warps alike.
        pieces = []
        for first, scale in ((0, key_dim**-0.5), (width, 1.0)):
            for start, count in layouts.pieces_of(width):
                layout = layouts.piece_layout(count, key_dim, itemsize=4)
                rows = tokens.at[pl.ds(first + start, count)]
                pieces.append((first, start, count, scale, load(rows, layout), layout))
        if width % 4:
            self.ring.sync()  # all warps have read what one of them overwrites
        for first, start, count, scale, heads, layout in pieces:
            root = lax.rsqrt(jnp.sum(heads * heads, axis=1) + EPS) * scale
            heads = heads * broadcast(root, heads.shape, 0, layout)
            if first:  # keys
                rounded = heads.astype(dtype)
                store(self.state.keys.at[pl.ds(start, count)], rounded)
                heads = rounded.astype(jnp.float32)
            store(tokens.at[pl.ds(first + start, count)], heads)

    def values(self) -> list[Any]:
        """The value of each token, in registers."""
        tokens = range(self.sizes.width)
        return [load(self.smem.v_then_o.at[t], self.ring.by_value) for t in tokens]

    def gates(self) -> tuple[list[Any], list[Any]]:
        """Log decay, and write strength, of each token: scalars."""
        first, width = self.sizes.square, self.sizes.width
        gates = [self.smem.g[first + i] for i in range(2 * width)]
        return gates[:width], gates[width:]


def _a_lane_each(count):
    """Register layout of a column of `count` elements, more than one: the same in every warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((count, 1),)),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2, plgpu.Replicated(32 // count)),
        vector_dim=-1,
    )
