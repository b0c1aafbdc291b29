"""Tokens of a `gdn_conv_replay` block, computed from a projection.

Each thread handles a channel of queries, of keys and of values. Blocks whose heads share a key
compute the same keys, and one of them stores the inputs. The numbers are those of `gdn_inputs` to
the bit, except for the order of sums.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxspec.pallas.gated_delta.heads import EPS, GdnHeads, gates_column, gates_in_kernel
from jaxspec.pallas.gated_delta.replay_block import GdnLaunch, HeadPart
from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.gpu.access import load, store
from jaxspec.pallas.recurrent.conv_block import ConvBlock
from jaxspec.pallas.recurrent.replay_block import RingBlock, broadcast


class Projection(NamedTuple):
    """Operands from which tokens are computed."""

    x: Any  # [rows, width, columns]
    taps: Any  # [kernel, channels]
    decay: Any  # [value_heads, 2]


class ConvTokens:
    """This step's tokens, if the block computes them from a `Projection`."""

    def __init__(self, launch: GdnLaunch, ring: RingBlock, state: Any, part: HeadPart, smem: Any):
        """Start loading the inputs; queries and keys will be written to `state`."""
        self.ring, self.gmem, self.state, self.smem = ring, ring.gmem, state, smem
        self.sizes, self.conv = launch.sizes, ConvBlock(ring, launch.conv_rows)
        self.writes_keys = ring.leads_group() & (part.split == 0)
        self._load_all(launch, part)

    def _load_all(self, launch, part):
        sizes, head, key_dim = self.sizes, self.ring.head, self.sizes.key_dim
        all_keys = sizes.key_heads * key_dim
        firsts = [first + self.ring.key_head * key_dim for first in (0, all_keys)]
        self.of_keys = [self.conv.load(pl.ds(first, key_dim), self.ring.by_key) for first in firsts]
        first = 2 * all_keys + (head * launch.splits + part.split) * sizes.values
        self.of_values = self.conv.load(pl.ds(first, sizes.values), self.ring.by_value)
        heads = GdnHeads(sizes.key_heads, key_dim, sizes.heads)
        b = gates_column(self.gmem.taps.shape[1], heads) + head
        self.b, self.a = (self.conv.load_column(column) for column in (b, b + sizes.heads))

    def copies(self) -> list[tuple[Any, Any]]:
        """Return no copies to shared memory: the block computes its tokens."""
        return []

    def finish(self) -> None:
        """Compute the tokens, and wait until all threads see them and `ring_decay`."""
        for first, inputs in zip((0, self.sizes.width), self.of_keys, strict=True):
            for t, out in enumerate(self.conv.convolve(inputs)):
                store(self.state.tokens.at[first + t], out.astype(jnp.float32))
        for t, out in enumerate(self.conv.convolve(self.of_values)):
            store(self.smem.v_then_o.at[t], out.astype(jnp.float32))
        self._store_gates()
        self.conv.append([self.of_values])
        self.conv.append(self.of_keys, self.writes_keys)
        self.ring.sync()
        self._normalise()
        self.ring.sync()

    def _store_gates(self):
        """Store log decay and write strength of each token after the log decays of the ring."""
        decay = [self.gmem.decay[self.ring.head, column] for column in range(2)]
        pairs = [
            gates_in_kernel(b.astype(jnp.float32), a.astype(jnp.float32), *decay)
            for b, a in zip(self.b, self.a, strict=True)
        ]
        for i in range(2):
            first = self.sizes.square + i * self.sizes.width
            self.conv.store_column(self.smem.g, first, [pair[i] for pair in pairs])

    def _normalise(self):
        """Normalise queries and keys in place, and store the keys rounded to the ring's dtype."""
        width, key_dim, dtype = self.sizes.width, self.sizes.key_dim, self.sizes.dtype
        tokens = self.state.tokens
        # Each head is within one warp, so no sum crosses warps. Pieces of fewer than 4 tokens are
        # replicated in several warps.
        pieces = []
        for first, scale in ((0, key_dim**-0.5), (width, 1.0)):
            for start, count in layouts.pieces_of(width):
                layout = layouts.piece_layout(count, key_dim, itemsize=4)
                rows = tokens.at[pl.ds(first + start, count)]
                pieces.append((first, start, count, scale, load(rows, layout), layout))
        if width % 4:
            self.ring.sync()  # until all warps have read what one of them overwrites
        for first, start, count, scale, heads, layout in pieces:
            root = lax.rsqrt(jnp.sum(heads * heads, axis=1) + EPS) * scale
            heads = heads * broadcast(root, heads.shape, 0, layout)
            if first:  # keys
                rounded = heads.astype(dtype)
                store(self.state.keys.at[pl.ds(start, count)], rounded)
                heads = rounded.astype(jnp.float32)
            store(tokens.at[pl.ds(first + start, count)], heads)

    def values(self) -> list[Any]:
        tokens = range(self.sizes.width)
        return [load(self.smem.v_then_o.at[t], self.ring.by_value) for t in tokens]

    def gates(self) -> tuple[list[Any], list[Any]]:
        first, width = self.sizes.square, self.sizes.width
        gates = [self.smem.g[first + i] for i in range(2 * width)]
        return gates[:width], gates[width:]
