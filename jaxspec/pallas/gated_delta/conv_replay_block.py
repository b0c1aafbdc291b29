"""A block of `gdn_replay_kernel` that makes its tokens itself, of a projection.

A thread has a channel of queries, of keys and of values: it reads what precedes the row's tokens
from the convolution's ring, and the tokens, and writes those to the ring, where no block reads
them. So blocks whose heads share a key read alike, and one of them writes. The rest is
`gdn_inputs`, to the bit but for the order of sums.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta import gates as gdn_gates
from jaxspec.pallas.gated_delta.heads import EPS, GdnHeads, gates_column
from jaxspec.pallas.gated_delta.replay_block import Block
from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.recurrent.conv_update_kernel import convolved


class _Inputs(NamedTuple):
    """Of some channels, in registers."""

    channels: Any  # where they are among all
    taps: list[Any]
    past: list[Any]  # what precedes the tokens, the oldest first
    new: list[Any]  # the tokens


class ConvBlock(Block):
    """Some values of one head of one row."""

    def __init__(self, sizes, refs):
        """`refs`: everything in memory, by name."""
        super().__init__(sizes, refs)
        self.history, self.channels = refs.taps.shape[0] - 1, refs.taps.shape[1]
        self.all_keys = sizes.key_heads * sizes.key_dim  # channels of

    def fetch(self):
        """Begin to load what the tokens are made of, and then to copy the rest."""
        sizes, head = self.sizes, self.head
        places = [first + self.key_head * sizes.key_dim for first in (0, self.all_keys)]
        self.inputs = [self.load_inputs(pl.ds(at, sizes.key_dim), self.by_key) for at in places]
        at = 2 * self.all_keys + (head * sizes.splits + self.split) * sizes.values
        self.of_values = self.load_inputs(pl.ds(at, sizes.values), self.by_value)
        heads = GdnHeads(sizes.key_heads, sizes.key_dim, sizes.heads)
        b = gates_column(self.channels, heads) + head
        self.of_gates = [self.load_of_gates(at) for at in (b, b + sizes.heads)]
        super().fetch()

    def token_copies(self):
        """None: the block makes them."""
        return []

    def load_inputs(self, channels, layout):
        """Those of these channels."""
        refs, history = self.refs, self.history
        new = [refs.x.at[self.row, t, channels] for t in range(self.sizes.width)]
        taps = [refs.taps.at[i, channels] for i in range(history + 1)]
        past = [self.in_ring(i - history, channels) for i in range(history)]
        loaded = ([self.load(x, layout) for x in some] for some in (taps, past, new))
        return _Inputs(channels, *loaded)

    def load_of_gates(self, column):
        """A column of the tokens, a lane each, as `pieces_of` so many."""
        x = self.refs.x.at[self.row]
        return [
            self.load(x.at[pl.ds(start, count), pl.ds(column, 1)], _a_lane_each(count))
            if count > 1
            else x[start, column]
            for start, count in layouts.pieces_of(self.sizes.width)
        ]

    def in_ring(self, after, channels):
        """Where the input of the token so far after the first lies."""
        rows = self.sizes.conv_rows
        at = self.conv_begin + after % rows
        at = jnp.where(at >= rows, at - rows, at)
        return self.refs.conv.at[self.place * rows + at, channels]

    def keep(self, *some, condition: Any = True):
        """Write these inputs of the tokens to the ring, for the next steps."""

        def put(t):
            for inputs in some:
                self.store(self.in_ring(t, inputs.channels), inputs.new[t])

        self.for_tokens(put, condition)

    def convolve(self, inputs):
        """What the convolution makes of each token, rounded as `conv_update` gives it."""
        dtype = inputs.new[0].dtype
        taps, tokens = (
            [x.astype(jnp.float32) for x in some]
            for some in (inputs.taps, inputs.past + inputs.new)
        )
        outs = [convolved(tokens[t:][: len(taps)], taps) for t in range(self.sizes.width)]
        return [out.astype(dtype).astype(jnp.float32) for out in outs]

    def await_tokens(self):
        """Queries, keys, values and gates are there for all threads, and `since` too."""
        refs = self.refs
        for first, inputs in zip((0, self.sizes.width), self.inputs, strict=True):
            for t, out in enumerate(self.convolve(inputs)):
                self.store(self.tokens.at[first + t], out)
        for t, out in enumerate(self.convolve(self.of_values)):
            self.store(refs.read.at[t], out)
        self.put_gates()
        self.keep(self.of_values)
        self.keep(*self.inputs, condition=self.is_first)
        self.meet()
        self.normalise()
        self.meet()

    def normalise(self):
        """Queries and keys in place, and keys as the ring will hold them, there too."""
        width, key_dim = self.sizes.width, self.sizes.key_dim
        # A head in one warp, whose sum needs no other; of fewer than 4 tokens in several, alike.
        pieces = []
        for first, scale in ((0, key_dim**-0.5), (width, 1.0)):
            for start, count in layouts.pieces_of(width):
                layout = layouts.piece_layout(count, key_dim, itemsize=4)
                rows = self.tokens.at[pl.ds(first + start, count)]
                pieces.append((first, start, count, scale, self.load(rows, layout), layout))
        if width % 4:
            self.meet()  # all of those have read what one of them overwrites
        for first, start, count, scale, heads, layout in pieces:
            root = lax.rsqrt(jnp.sum(heads * heads, axis=1) + EPS) * scale
            heads = heads * self.spread(root, heads.shape, 0, layout)
            if first:
                kept = heads.astype(self.sizes.dtype)
                self.store(self.keys.at[pl.ds(start, count)], kept)
                heads = kept.astype(jnp.float32)
            self.store(self.tokens.at[pl.ds(first + start, count)], heads)

    def put_gates(self):
        """Log decay and strength of each token behind the gates of the ring."""
        of_decay = [self.refs.decay[self.head, column] for column in range(2)]
        for (start, count), b, a in zip(
            layouts.pieces_of(self.sizes.width), *self.of_gates, strict=True
        ):
            pair = gdn_gates.in_kernel(b.astype(jnp.float32), a.astype(jnp.float32), *of_decay)
            for i, gate in enumerate(pair):
                first = self.sizes.square + i * self.sizes.width + start
                if count > 1:
                    self.store(self.refs.gates.at[pl.ds(first, count)], jnp.sum(gate, axis=1))
                else:
                    self.refs.gates[first] = gate

    def load_values(self):
        """Those of each token."""
        tokens = range(self.sizes.width)
        return [self.load(self.refs.read.at[t], self.by_value) for t in tokens]

    def load_gates(self):
        """Log decay, and strength, of each token."""
        first, width = self.sizes.square, self.sizes.width
        gates = [self.refs.gates[first + i] for i in range(2 * width)]
        return gates[:width], gates[width:]


def _a_lane_each(count):
    """Register layout of a column of so many, more than one, the same in every warp."""
    return plgpu.Layout.TILED(
        plgpu.Tiling(((count, 1),)),
        warp_dims=(plgpu.Replicated(4),),
        lane_dims=(-2, plgpu.Replicated(32 // count)),
        vector_dim=-1,
    )
