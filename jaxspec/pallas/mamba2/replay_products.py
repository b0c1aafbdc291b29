"""The products that are `mamba2_replay_kernel`'s own: of the checkpoint, and what a fold adds."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.recurrent.replay_block import ReplayBlock
from jaxspec.pallas.recurrent.replay_layouts import square_column_layout, square_layout


class Products(ReplayBlock):
    """Of one head, a warpgroup."""

    def __init__(self, sizes, refs):
        """`refs`: everything in memory, by name."""
        row, block, self.part = (lax.axis_index(y) for y in ("row", "heads", "warpgroup"))
        super().__init__(sizes, refs, row, block * sizes.together + self.part)
        self.keys = refs.keys
        self.by_square = square_layout(sizes.dtype.itemsize)
        self.by_square_column = square_column_layout()
        own = refs.state, refs.updates, refs.products, refs.gaps, refs.weights, refs.kept
        own = (y.at[self.part] for y in own)
        self.state, self.updates, self.products, self.gaps, self.weights, self.kept = own

    def multiply_state(self, decay):
        """The checkpoint, with the ring's tokens where they are folded, times each C."""
        sizes = self.sizes
        state = self.load(self.state, self.by_square).astype(jnp.float32) * decay
        folded = jnp.where(self.folds, self.length, 0)
        state = lax.fori_loop(0, folded, self.fold_one, state)

        @pl.when(self.folds)
        def _():
            self.store(self.state, state.astype(sizes.dtype))
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(self.state, self.checkpoint())

        # All before any is stored: no load passes a store.
        products = []
        for t in range(sizes.width):
            read = self.load(self.refs.reads.at[t], self.by_square.reduce(0)).astype(jnp.float32)
            products.append(
                jnp.sum(state * self.spread(read, state.shape, 1, self.by_square), axis=1)
            )
        for t, product in enumerate(products):
            product = self.spread(product, (sizes.values, 1), 0, self.by_square_column)
            self.store(self.products.at[:, pl.ds(t, 1)], product)

    def fold_one(self, j, state):
        """Token `j` of the ring added to a state."""
        update = self.load(self.updates.at[j], self.by_square.reduce(1)).astype(jnp.float32)
        key = self.load(self.keys.at[self.sizes.width + j], self.by_square.reduce(0))
        update = self.spread(update * self.weights[j], state.shape, 0, self.by_square)
        key = self.spread(key.astype(jnp.float32), state.shape, 1, self.by_square)
        return state + update * key

    def checkpoint(self):
        """In the pool."""
        return self.refs.states.at[self.place * self.sizes.heads + self.head]
