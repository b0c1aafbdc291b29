"""State of a `gdn_replay` block in 16 bits, multiplied on tensor cores.

Float32 factors are rounded to 16 bits, and their rounding errors are a second set of factors, so
that the matmuls are as exact as the state. A fold does the same with the updates.
"""

from typing import Any

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import tensor_cores
from jaxspec.pallas.gpu.access import load, store
from jaxspec.pallas.recurrent.replay_block import ReplaySizes, RingBlock, RingTiles, broadcast

# Register layout of 16 keys in stripes of 64: the 8 threads whose accesses are served together have
# 8 rows of a stripe, in different banks.
STRIPES = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (8, 32), (8,))), warp_dims=(-5, -4), lane_dims=(-2, -3), vector_dim=-1
)
# Register layout of 8 queries or keys in float32: 16 lanes for each, which read 256 contiguous
# bytes.
_BY_EIGHT = plgpu.Layout.TILED(
    plgpu.Tiling(((8, 64), (2, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
)
_WGMMA = plgpu.Layout.WGMMA


class StateOnTensorCores:
    """Replay base in shared memory, as `[values, key_dim]` in wgmma tiles."""

    MIN_COLUMNS = 8  # columns of the products: wgmma's N is at least 8
    STATE_COPIES = 1
    TOKEN_COPIES = 2  # queries; keys to `tokens`

    @staticmethod
    def scratch(sizes: ReplaySizes, interpreted: bool) -> dict[str, Any]:
        # `columns` rows, not `factors`: tensor cores take a row of `tokens` for each column.
        tokens = plgpu.SMEM((sizes.columns, sizes.key_dim), jnp.float32)
        products = plgpu.SMEM((sizes.values, sizes.columns), jnp.float32)
        factors = tensor_cores.tile(2 * sizes.columns, sizes.key_dim, dtype=sizes.dtype)
        # One wgmma of a fold adds the keys of 16 tokens, in stripes of 16 channels.
        stripes = plgpu.TilingTransform((8, 16)), plgpu.SwizzleTransform(32)
        fold_keys = plgpu.SMEM((16, sizes.key_dim), sizes.dtype, transforms=stripes)
        scratch = {
            "state": tensor_cores.tile(sizes.values, sizes.key_dim, dtype=sizes.dtype),
            # `tokens` are read before `products` are written; a fold ends before there are factors.
            "tokens": plgpu.RefUnion(tokens, products),
            "factors": plgpu.RefUnion(factors, fold_keys),
            "keys": plgpu.SMEM((sizes.keys, sizes.key_dim), sizes.dtype),
        }
        if interpreted:
            scratch["spare"] = plgpu.SMEM((64, 16), sizes.dtype)
        return scratch

    @staticmethod
    def ring_tiles(smem: Any) -> RingTiles:
        return RingTiles(smem.keys, smem.updates, smem.ring_decay, smem.key_products, smem.barrier)

    def __init__(self, ring: RingBlock, smem: Any, checkpoint: Any):
        """`checkpoint`: reference to the block's values of the replay base in the pool."""
        self.ring, self.smem, self.checkpoint = ring, smem, checkpoint
        self.keys = smem.keys
        self.tokens, self.products = smem.tokens
        self.factors, self.fold_keys = smem.factors
        # (target, first row) of each copy of this step's keys.
        self.key_targets = [(self.tokens, ring.sizes.width)]

    def begin_load(self, warp: Any) -> None:
        @pl.when(warp == 3)
        def _():
            plgpu.copy_gmem_to_smem(self.checkpoint, self.smem.state, self.smem.state_produced)

    def round_keys(self) -> None:
        """Round this step's keys to the ring's dtype, in `tokens` and into `keys`."""
        width, layout = self.ring.sizes.width, self.ring.by_key
        rows = [self.tokens.at[width + t] for t in range(width)]
        keys = [load(row, layout).astype(self.ring.sizes.dtype) for row in rows]
        for t, (row, key) in enumerate(zip(rows, keys, strict=True)):
            store(row, key.astype(jnp.float32))
            store(self.keys.at[t], key)

    def fold(self, decay: Any) -> None:
        """Add the ring's tokens to the decayed replay base, and start storing it.

        Takes 64 values at a time: more would need so many registers that fewer blocks fit.
        """
        sizes, state = self.ring.sizes, self.smem.state
        chunks = range(0, sizes.copied_tokens, 16)
        for values in (pl.ds(start, 64) for start in range(0, sizes.values, 64)):
            updates = [self._decayed_updates(values, first) for first in chunks]
            for columns in (pl.ds(start, 64) for start in range(0, sizes.key_dim, 64)):
                tile = state.at[values, columns]
                acc: Any = None
                for first, parts in zip(chunks, updates, strict=True):
                    # The keys of a single chunk stay in place for all values.
                    if len(chunks) > 1 or values.start == 0:
                        self._store_fold_keys(first, columns, again=first + values.start > 0)
                    if acc is None:
                        acc = decay * load(tile, _WGMMA).astype(jnp.float32)
                    for part in parts:
                        keys = self.fold_keys.at[:, columns]
                        (acc,) = tensor_cores.accumulate(self.smem.spare, (acc, part, keys))
                store(tile, acc.astype(sizes.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state, self.checkpoint)

    def _store_fold_keys(self, first, columns, again):
        """Store the keys of 16 tokens from `first` on where tensor cores read them.

        `again`: the memory holds earlier keys, which all threads must have read.
        """
        key = self.keys.at[pl.ds(self.ring.sizes.width + first, 16), columns]
        key = load(key, STRIPES)
        index = plgpu.broadcasted_iota(jnp.int32, key.shape, 0, layout=STRIPES)
        counts = index < self.ring.table.ring_length - first
        key = jnp.where(counts, key, jnp.zeros((), key.dtype))
        if again:
            self.ring.sync()
        store(self.fold_keys.at[:, columns], key)
        plgpu.commit_smem()

    def _decayed_updates(self, values, first):
        """Return updates `[values, 16]` of tokens from `first` on, and their rounding errors."""
        tiles, tokens = self.ring.tiles, pl.ds(first, 16)
        update = tiles.updates.at[tokens, values].transpose((1, 0))
        update = load(update, _WGMMA).astype(jnp.float32)
        decay = load(tiles.ring_decay.at[tokens], _WGMMA.reduce(0))
        index = plgpu.broadcasted_iota(jnp.int32, update.shape, 1, layout=_WGMMA)
        exact = update * broadcast(decay, update.shape, 1, _WGMMA)
        exact = jnp.where(index < self.ring.table.ring_length - first, exact, 0.0)
        return rounded_and_rest(exact, self.ring.sizes.dtype)

    def multiply_keys(self) -> None:
        """Multiply all keys with the step's queries and keys; `tokens` is not read afterwards."""
        self.store_factors()
        self.ring.multiply_keys(self.tokens)
        plgpu.commit_smem()  # tensor cores read the factors

    def store_factors(self) -> None:
        """Store queries and keys in 16 bits, and after all of them their rounding errors."""
        columns = self.ring.sizes.columns
        for start in range(0, columns, 8):
            exact = load(self.tokens.at[pl.ds(start, 8)], _BY_EIGHT)
            rounded, rest = rounded_and_rest(exact, self.ring.sizes.dtype)
            store(self.factors.at[pl.ds(start, 8)], rounded)
            store(self.factors.at[pl.ds(columns + start, 8)], rest)

    def multiply(self, decay: Any) -> list[Any]:
        """Return the state before this step times each query and key, as vectors of values.

        `decay` multiplies the replay base, to which the ring's tokens are added.
        """
        columns = self.ring.sizes.columns
        # One matmul reads the state once for both halves of the factors.
        sums = tensor_cores.product(self.smem.state, self.factors.transpose((1, 0)))
        sums = sums[:, :columns] + sums[:, columns:]
        return self.ring.replay(decay, sums, self.products, _WGMMA, self.ring.sync)


def rounded_and_rest(exact: Any, dtype: Any) -> tuple[Any, Any]:
    """Return float32 numbers rounded to 16 bits, and their rounding errors in 16 bits."""
    rounded = exact.astype(dtype)
    return rounded, (exact - rounded.astype(jnp.float32)).astype(dtype)
