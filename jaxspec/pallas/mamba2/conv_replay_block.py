"""Tokens of a `mamba2_conv_replay` block, which computes them from a projection.

A thread has a channel of x, of B and of C. Blocks whose heads share B and C compute the same
values, and one of them stores their inputs. The values are those of `mamba2_inputs`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from jaxspec.pallas.gpu.access import load, store
from jaxspec.pallas.mamba2.heads import Mamba2Heads
from jaxspec.pallas.mamba2.replay_block import Mamba2Launch, keep_b
from jaxspec.pallas.recurrent import kernel_math
from jaxspec.pallas.recurrent.conv_block import ConvBlock
from jaxspec.pallas.recurrent.replay_block import RingBlock


class Projection(NamedTuple):
    """Operands from which the tokens are computed."""

    x: Any  # [rows, width, columns]
    taps: Any  # [kernel, channels]
    rates: Any  # [heads, 3]
    bias: Any  # [channels], or None


class ConvTokens:
    """Tokens of this step, computed by the block from a `Projection`."""

    def __init__(self, launch: Mamba2Launch, ring: RingBlock, smem: Any, warpgroup: Any):
        """Start loading the inputs. The warpgroups of two heads share the work on B and C."""
        self.ring, self.smem, self.warpgroup = ring, smem, warpgroup
        self.sizes, self.gmem, head = launch.sizes, ring.gmem, ring.head
        self.leads = lax.rem(head - warpgroup, self.sizes.group) == 0
        self.dt, self.x = smem.dt.at[warpgroup], smem.x.at[warpgroup]
        self.conv = ConvBlock(ring, launch.conv_rows, getattr(ring.gmem, "bias", None))
        self._load_all(launch)
        self.rate, self.skip = -kernel_math.exp(self.gmem.rates[head, 0]), self.gmem.rates[head, 2]

    def _load_all(self, launch):
        sizes, head = self.sizes, self.ring.head
        heads = Mamba2Heads(sizes.heads, sizes.values, sizes.key_heads, sizes.key_dim)
        x = pl.ds(head * sizes.values, sizes.values)
        self.of_x = self.conv.load(x, self.ring.by_value)
        self.steps = self.conv.load_column(heads.steps_column + head)
        first = heads.features + self.ring.key_head * sizes.key_dim
        self.shared = [  # B and C
            pl.ds(start, sizes.key_dim) for start in (first, first + heads.groups * sizes.key_dim)
        ]
        is_alone = launch.block_heads == 1
        self.of_shared = [self._load_shared(part) for part in range(2)] if is_alone else None

    def _load_shared(self, part):
        return self.conv.load(self.shared[part], self.ring.by_key)

    def begin_copies(self) -> None:
        """Copy nothing: the block computes its tokens."""

    def finish(self, find_ring_decay: Callable) -> None:
        """Compute the tokens; return once all threads see them and the ring's decay."""
        find_ring_decay()
        for part in range(2):
            if self.of_shared is not None:
                self._make_shared(part, self.of_shared[part])
            else:
                pl.when(self.warpgroup == part)(functools.partial(self._make_shared, part))
        for t, x in enumerate(self.conv.convolve(self.of_x)):
            store(self.x.at[t], x)
        dt_bias = self.gmem.rates[self.ring.head, 1]
        steps = [kernel_math.softplus(x.astype(jnp.float32) + dt_bias) for x in self.steps]
        self.conv.store_column(self.dt, self.sizes.square, steps)
        self.conv.append([self.of_x])
        self.ring.sync()

    def _make_shared(self, part, inputs=None):
        """Compute B (`part` 0) or C of each token; one block of the group stores their inputs."""
        inputs = inputs or self._load_shared(part)
        for t, y in enumerate(self.conv.convolve(inputs)):
            if part == 0:
                keep_b(self.ring, t, y)
            else:
                store(self.smem.c.at[t], y)
        self.conv.append([inputs], self.leads)

    def values(self) -> tuple[list[Any], list[Any]]:
        tokens, first = range(self.sizes.width), self.sizes.square
        x = [load(self.x.at[t], self.ring.by_value) for t in tokens]
        return x, [self.dt[first + t] for t in tokens]
