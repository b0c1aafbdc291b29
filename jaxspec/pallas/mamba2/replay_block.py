"""Block of `mamba2_replay`: one head of one row, the work of one warpgroup.

This step's tokens are loaded (`LoadedTokens`) or computed from a projection (`ConvTokens`).
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu.access import load, store
from jaxspec.pallas.recurrent.replay_block import (
    RING_GROUP,
    ReplaySizes,
    RingBlock,
    RingTiles,
    broadcast,
)


@dataclasses.dataclass(frozen=True)
class Mamba2Launch:
    sizes: ReplaySizes
    block_heads: int  # heads per block, one warpgroup each
    conv_rows: int  # rows of the convolution's ring; 1 if there is none: all remainders are 0
    tokens: Any  # LoadedTokens or ConvTokens


class LoadedTokens:
    """Tokens of this step, given as operands of the kernel (`Mamba2Tokens`)."""

    def __init__(self, launch: Mamba2Launch, ring: RingBlock, smem: Any, warpgroup: Any):
        """Load the head's scalars only."""
        self.width, self.gmem, self.smem = launch.sizes.width, ring.gmem, smem
        self.ring, self.warpgroup = ring, warpgroup
        self.rate, self.skip = ring.gmem.a[ring.head], ring.gmem.d[ring.head]

    def begin_copies(self) -> None:
        """Start copying C to shared memory."""

        @pl.when(self.warpgroup == 0)
        def _():
            c = self.gmem.c.at[self.ring.table.row, :, self.ring.key_head]
            target = self.smem.c.at[pl.ds(0, self.width)]
            plgpu.copy_gmem_to_smem(c, target, self.smem.c_produced)

    def finish(self, find_ring_decay: Callable) -> None:
        """Wait until all threads see C, B as rounded for the ring, and the ring's decay."""

        @pl.when(self.warpgroup == 0)
        def _():
            for t in range(self.width):
                b = self.gmem.b.at[self.ring.table.row, t, self.ring.key_head]
                keep_b(self.ring, t, load(b, self.ring.by_key))

        find_ring_decay()
        self.ring.sync()
        plgpu.barrier_wait(self.smem.c_produced)

    def values(self) -> tuple[list[Any], list[Any]]:
        """Return `x`, in registers, and `dt` of each token."""
        row, head, tokens = self.ring.table.row, self.ring.head, range(self.width)
        x = [load(self.gmem.x.at[row, t, head], self.ring.by_value) for t in tokens]
        return x, [self.gmem.dt[row, t, head] for t in tokens]


def keep_b(ring: RingBlock, t: int, b: Any) -> None:
    """Store B of token `t`, rounded to the ring's dtype, in shared memory.

    The first head of the group also writes it to the ring.
    """
    b = b.astype(ring.sizes.dtype)
    store(ring.tiles.keys.at[t], b)

    @pl.when(ring.leads_group() & (t < ring.table.num_tokens))
    def _():
        store(ring.gmem.ring_b.at[ring.key_index(ring.row_of_new(t))], b)


class Mamba2ReplayBlock:
    """One head of one row. `keys` are B, `updates` are x, and the step's factors are C."""

    def __init__(self, launch: Mamba2Launch, gmem: Any, smem: Any):
        """Set up references by name: operands, pools and output in `gmem`, scratch in `smem`."""
        self.launch, self.sizes, self.block_heads = launch, launch.sizes, launch.block_heads
        self.gmem, self.smem = gmem, smem
        row, block, self.warpgroup = (lax.axis_index(x) for x in ("row", "heads", "warpgroup"))
        head = block * launch.block_heads + self.warpgroup
        # Scratch of this head; the rest of `smem` belongs to the block.
        self.state = smem.state.at[self.warpgroup]
        self.state_products = smem.state_products.at[self.warpgroup]
        self.dt = smem.dt.at[self.warpgroup]
        self.decay_before = smem.decay_before.at[self.warpgroup]
        tiles = RingTiles(
            keys=smem.keys,
            updates=smem.updates.at[self.warpgroup],
            ring_decay=smem.ring_decay.at[self.warpgroup],
            key_products=smem.key_products,
            barrier=smem.barrier,
        )
        self.ring = RingBlock(self.sizes, gmem, tiles, head, row)
        self.by_square = _square_layout(self.sizes.dtype.itemsize)

    def run(self) -> None:
        """Run the block; a padding row writes zeros."""
        self.ring.run(self._step, self._output)

    def _step(self):
        ring, smem, wait = self.ring, self.smem, plgpu.barrier_wait
        tokens = self.launch.tokens(self.launch, ring, smem, self.warpgroup)
        log_decay = tokens.rate * math.log2(math.e)  # exp2 costs half as much as exp
        self._begin_copies(tokens)
        tokens.finish(functools.partial(self._find_ring_decay, log_decay))
        lax.fori_loop(0, ring.num_groups, lambda i, _: wait(smem.ring_produced.at[i]), None)
        ring.multiply_keys(smem.c, self.warpgroup, self.block_heads)
        wait(smem.state_produced.at[self.warpgroup])
        decay = jnp.where(ring.table.ring_length > 0, self.decay_before[0], 1.0)
        self._multiply_state(jnp.where(ring.folds, decay, 1.0))
        x, dt = tokens.values()
        ring.sync()
        sums = load(self.state_products, ring.by_product)
        decay = jnp.where(ring.folds, 1.0, decay)
        # This head's threads exchange data only within their warpgroup: no barrier is needed.
        products, layout, sync = self.state_products, ring.by_product, plgpu.commit_smem
        reads = ring.replay(decay, sums, products, layout, sync)
        self._store_outputs(tokens, log_decay, reads, x, dt)
        self._append(x, dt)

        @pl.when(ring.folds)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _begin_copies(self, tokens):
        """Start all copies to shared memory: C, the ring's valid tokens, the replay base.

        The replay base is copied last: otherwise data needed earlier would wait for its bytes.
        """
        ring, gmem, smem, copy = self.ring, self.gmem, self.smem, plgpu.copy_gmem_to_smem
        tiles, width = ring.tiles, self.sizes.width
        tokens.begin_copies()

        @plgpu.warp_map
        def _(warp):
            # Each warp copies one token per group. The heads of a block alternate in copying the B
            # that they share.
            groups = range(self.sizes.copied_tokens // RING_GROUP)
            ring_tokens = [RING_GROUP * i + warp for i in groups]
            steps = [gmem.ring_dt[ring.update_index(ring.row_by_age(j))] for j in ring_tokens]

            def copy_token(i, _):
                j, produced = RING_GROUP * i + warp, smem.ring_produced.at[i]
                row = ring.row_by_age(j)
                copy(gmem.ring_x.at[ring.update_index(row)], tiles.updates.at[j], produced)

                @pl.when(lax.rem(i, self.block_heads) == self.warpgroup)
                def _():
                    b = gmem.ring_b.at[ring.key_index(row)]
                    copy(b, tiles.keys.at[width + j], produced)

            lax.fori_loop(0, ring.num_groups, copy_token, None)

            @pl.when(warp == 0)
            def _():
                copy(self._checkpoint(), self.state, smem.state_produced.at[self.warpgroup])

            for j, dt in zip(ring_tokens, steps, strict=True):
                self.dt[j] = dt

    def _checkpoint(self):
        """Return the head's replay base in the pool."""
        return self.gmem.states.at[self.ring.pool_index * self.sizes.heads + self.ring.head]

    def _find_ring_decay(self, log_decay):
        """Store the factor of each of the ring's tokens: `dt`, times the decay since.

        `decay_before` also includes the token's own decay, so its first entry is the decay of the
        replay base.
        """
        plgpu.commit_smem()
        steps = self.dt.at[pl.ds(0, self.sizes.square)]  # this step's may follow
        after, counts = self.ring.sums_after(steps)
        dt = load(steps, self.ring.by_token.reduce(1))
        weight = jnp.where(counts, jnp.exp2(log_decay * after) * dt, 0.0)
        store(self.ring.tiles.ring_decay, weight)
        store(self.decay_before, jnp.exp2(log_decay * (after + dt)))

    def _multiply_state(self, decay):
        """Multiply the decayed replay base with each C, into one column of `state_products` per C.

        A row that folds adds the ring to the replay base first.
        """
        ring, sizes, layout = self.ring, self.sizes, self.by_square
        state = load(self.state, layout).astype(jnp.float32) * decay
        num_folded = jnp.where(ring.folds, ring.table.ring_length, 0)
        state = lax.fori_loop(0, num_folded, self._add_token, state)

        @pl.when(ring.folds)
        def _():
            store(self.state, state.astype(sizes.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.state, self._checkpoint())

        # All sums are computed before any is stored: the compiler moves no load above a store.
        products = []
        for t in range(sizes.width):
            c = load(self.smem.c.at[t], layout.reduce(0)).astype(jnp.float32)
            products.append(jnp.sum(state * broadcast(c, state.shape, 1, layout), axis=1))
        for t, product in enumerate(products):
            product = broadcast(product, (sizes.values, 1), 0, _SQUARE_COLUMN)
            store(self.state_products.at[:, pl.ds(t, 1)], product)

    def _add_token(self, j, state):
        tiles, layout = self.ring.tiles, self.by_square
        x = load(tiles.updates.at[j], layout.reduce(1)).astype(jnp.float32)
        b = load(tiles.keys.at[self.sizes.width + j], layout.reduce(0))
        x = broadcast(x * tiles.ring_decay[j], state.shape, 0, layout)
        b = broadcast(b.astype(jnp.float32), state.shape, 1, layout)
        return state + x * b

    def _output(self, t):
        return self.gmem.out.at[self.ring.table.row, t, self.ring.head]

    def _store_outputs(self, tokens, log_decay, reads, x, dt):
        """Store the output of each token.

        It is the sum of what C reads from the state before this step, the contributions of this
        step's tokens, and `D x`.
        """
        key_products = self.ring.tiles.key_products
        rounded = [x_t.astype(self.sizes.dtype).astype(jnp.float32) for x_t in x]
        for t, x_t in enumerate(x):
            out, elapsed = tokens.skip * x_t.astype(jnp.float32), jnp.float32(0)
            for s in range(t, -1, -1):
                weight = jnp.exp2(log_decay * elapsed) * dt[s] * key_products[s, t]
                out += weight * rounded[s]
                elapsed = elapsed + dt[s]
            out += jnp.exp2(log_decay * elapsed) * reads[t]
            store(self._output(t), out)

    def _append(self, x, dt):
        for t, (x_t, dt_t) in enumerate(zip(x, dt, strict=True)):

            @pl.when(t < self.ring.table.num_tokens)
            def _(t=t, x_t=x_t, dt_t=dt_t):
                index = self.ring.update_index(self.ring.row_of_new(t))
                store(self.gmem.ring_x.at[index], x_t.astype(self.sizes.dtype))
                self.gmem.ring_dt[index] = dt_t


def _square_layout(itemsize):
    """Return the register layout of a state: a thread has every 32nd value, a quarter of its keys.

    The quarter is 32 bytes of each 128, in two vectors: with the swizzle, the 8 threads that are
    served at once access different banks.
    """
    vector = 16 // itemsize
    tiles = (32, 8 * vector), (8, 8 * vector), (2 * vector,), (vector,)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1
    )


# Register layout of sums over the keys of such a state, as a matrix of one column.
_SQUARE_COLUMN = plgpu.Layout.TILED(
    plgpu.Tiling(((32, 1), (8, 1))),
    warp_dims=(-4,),
    lane_dims=(-2, plgpu.Replicated(4)),
    vector_dim=-1,
)
