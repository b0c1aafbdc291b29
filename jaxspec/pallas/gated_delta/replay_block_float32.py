"""State of a `gdn_replay` block in float32, multiplied by sums in registers.

Each warp has a quarter of the key channels for all values. The threads of a warp then load the same
factors, and each thread sums alone, except for the four quarters at the end.
"""

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

_FACTORS_UNROLL = 2  # queries and keys in registers at once
_FOLD_UNROLL = 2  # ring tokens: one is loaded while another is added
# Register layout of a state `[4, values, key_dim / 4]`: each warp has a quarter, and each lane one
# of every 32 values.
_BY_QUARTER = plgpu.Layout.TILED(
    plgpu.Tiling(((4, 32, 4),)), warp_dims=(-3,), lane_dims=(-2,), vector_dim=-1
)


class StateInFloat32:
    """Replay base in shared memory, as `[4, values, key_dim / 4]`."""

    MIN_COLUMNS = 4
    STATE_COPIES = 4  # one per quarter
    TOKEN_COPIES = 3  # queries; keys to `tokens`; keys to `keys`

    @staticmethod
    def scratch(sizes: ReplaySizes, interpreted: bool) -> dict[str, Any]:
        quarter = sizes.key_dim // 4
        transforms = plgpu.TilingTransform((8, quarter)), plgpu.SwizzleTransform(4 * quarter)
        token_rows = -(-sizes.factors // 4) * 4
        keys = plgpu.SMEM((sizes.keys, sizes.key_dim), jnp.float32)
        products = plgpu.SMEM((_factors_at_once(sizes), 4, sizes.values), jnp.float32)
        scratch = {
            "state": plgpu.SMEM((4, sizes.values, quarter), jnp.float32, transforms=transforms),
            "tokens": plgpu.SMEM((token_rows, sizes.key_dim), jnp.float32),
            # The state's products are written after the keys have been read.
            "keys": plgpu.RefUnion(keys, products),
        }
        if interpreted:
            scratch["spare"] = plgpu.SMEM((4, quarter), jnp.float32)
        return scratch

    @staticmethod
    def ring_tiles(smem: Any) -> RingTiles:
        keys, _ = smem.keys
        return RingTiles(keys, smem.updates, smem.ring_decay, smem.key_products, smem.barrier)

    def __init__(self, ring: RingBlock, smem: Any, checkpoint: Any):
        """`checkpoint`: reference to the block's values of the replay base in the pool."""
        self.ring, self.smem, self.checkpoint = ring, smem, checkpoint
        self.tokens = smem.tokens
        self.keys, self.products = smem.keys
        # (target, first row) of each copy of this step's keys.
        self.key_targets = [(self.tokens, ring.sizes.width), (self.keys, 0)]

    def begin_load(self, warp: Any) -> None:
        """Start copying the replay base to shared memory; each warp copies a quarter."""
        source, target = self._quarter(warp)
        plgpu.copy_gmem_to_smem(source, target, self.smem.state_produced)

    def _quarter(self, i):
        """Return a quarter of the replay base's key channels, in the pool and in shared memory."""
        size = self.smem.state.shape[2]
        return self.checkpoint.at[:, pl.ds(i * size, size)], self.smem.state.at[i]

    def round_keys(self) -> None:
        """Do nothing: the ring holds float32 keys, which a separate copy writes to `keys`."""

    def fold(self, decay: Any) -> None:
        """Add the ring's tokens to the decayed replay base, and start storing it."""
        state = decay * load(self.smem.state, _BY_QUARTER)
        times = lax.div(self.ring.table.ring_length + _FOLD_UNROLL - 1, _FOLD_UNROLL)
        store(self.smem.state, lax.fori_loop(0, times, self._add_tokens, state))
        plgpu.commit_smem()
        for i in range(4):
            target, source = self._quarter(i)
            plgpu.copy_smem_to_gmem(source, target)

    def _add_tokens(self, i, state):
        """Add `_FOLD_UNROLL` ring tokens to a state; a token past the end has decay 0."""
        tiles, width = self.ring.tiles, self.ring.sizes.width
        tokens = [i * _FOLD_UNROLL + j for j in range(_FOLD_UNROLL)]
        by_value = _BY_QUARTER.reduce((0, 2))
        updates = [load(tiles.updates.at[j], by_value) * tiles.ring_decay[j] for j in tokens]
        keys = [self.load_quarters(self.keys.at[width + j]) for j in tokens]
        for update, key in zip(updates, keys, strict=True):
            state += broadcast(update, state.shape, 1, _BY_QUARTER) * key
        return state

    def multiply_keys(self) -> None:
        """Multiply all keys with the step's queries and keys; `keys` is not read afterwards."""
        self.ring.multiply_keys(self.tokens)
        self.ring.sync()

    def multiply(self, decay: Any) -> list[Any]:
        """Return the state before this step times each query and key, as vectors of values.

        `decay` multiplies the replay base, to which the ring's tokens are added.
        """
        width, tiles, by_value = self.ring.sizes.width, self.ring.tiles, self.ring.by_value

        def add_group(i, reads):
            for j in range(RING_GROUP):
                j = i * RING_GROUP + j
                update = load(tiles.updates.at[j], by_value) * tiles.ring_decay[j]
                reads = [x + update * tiles.key_products[width + j, f] for f, x in enumerate(reads)]
            return reads

        reads = self._multiply_checkpoint(decay)
        return lax.fori_loop(0, self.ring.num_replayed_groups, add_group, reads)

    def _multiply_checkpoint(self, decay):
        """Return the decayed replay base times each query and key, as vectors of values."""
        sizes, by_value, reads = self.ring.sizes, self.ring.by_value, []
        state = load(self.smem.state, _BY_QUARTER)
        at_once = _factors_at_once(sizes)
        for first in range(0, sizes.factors, at_once):
            count = min(at_once, sizes.factors - first)
            if first:
                self.ring.sync()  # until all threads have read the previous products

            def multiply_some(i, _, first=first):
                indices = [i * _FACTORS_UNROLL + x for x in range(_FACTORS_UNROLL)]
                factors = [self.load_quarters(self.tokens.at[first + x]) for x in indices]
                products = [jnp.sum(state * factor, axis=2) for factor in factors]
                for x, product in zip(indices, products, strict=True):
                    store(self.products.at[x], product)

            lax.fori_loop(0, count // _FACTORS_UNROLL, multiply_some, None)
            self.ring.sync()
            for x in range(count):
                parts = [load(self.products.at[x, i], by_value) for i in range(4)]
                reads.append(decay * ((parts[0] + parts[1]) + (parts[2] + parts[3])))
        return reads

    def load_quarters(self, vector: Any) -> Any:
        """Load a key or query into registers, in the layout of the state that it multiplies."""
        shape, spare = self.smem.state.shape, self.smem.spare
        if spare is None:
            parts = vector.reshape(shape[0], shape[2])
        else:  # the interpreter cannot reshape references
            parts = spare
            parts[...] = vector[...].reshape(parts.shape)
        parts = load(parts, _BY_QUARTER.reduce(1))
        return broadcast(parts, shape, (0, 2), _BY_QUARTER)


def _factors_at_once(sizes):
    """Return an even number of factors whose products take no more memory than all keys."""
    return min(sizes.factors, sizes.keys * sizes.key_dim // (8 * sizes.values) * 2)
