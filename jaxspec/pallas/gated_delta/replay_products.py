"""The products that are `gdn_replay_kernel`'s own: of the checkpoint, and what a fold adds."""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import tensor_cores
from jaxspec.pallas.recurrent.replay_block import TOGETHER, ReplayBlock
from jaxspec.pallas.recurrent.replay_layouts import quarters_layout

FACTORS = 2  # queries and keys in registers at once
FOLDED = 2  # tokens: the loads of one while another is added
# Of 16 keys: the 8 threads that are served at once have 8 rows of a stripe, in different banks.
_STRIPES = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (8, 32), (8,))), warp_dims=(-5, -4), lane_dims=(-2, -3), vector_dim=-1
)


class Products(ReplayBlock):
    """Of one block, a warpgroup."""

    def __init__(self, sizes, refs):
        """`refs`: everything in memory, by name."""
        row, head, self.split = (lax.axis_index(x) for x in ("row", "head", "split"))
        super().__init__(sizes, refs, row, head)
        self.values = pl.ds(self.split * sizes.values, sizes.values)
        self.updates, self.weights = refs.updates, refs.since
        if sizes.on_tensor_cores:
            self.keys = refs.keys
            self.tokens, self.products = refs.tokens
            self.factors, self.fold_keys = refs.factors
            self.by_product = plgpu.Layout.WGMMA  # as tensor cores put them out
        else:
            self.tokens = refs.tokens
            self.keys, self.products = refs.keys
            self.by_quarter = quarters_layout()
        # Of tokens: 16 lanes each, which read 256 bytes in one piece.
        self.by_eight = plgpu.Layout.TILED(
            plgpu.Tiling(((8, 64), (2, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
        )

    def read_state(self, decay):
        """The state before this step times each query and key, a line of values each."""
        if not self.sizes.on_tensor_cores:
            return self.replay_lines(self.multiply_state(decay))
        return self.replay(decay, self.multiply_by_tensor_cores(), self.meet)

    def multiply_state(self, decay):
        """The decayed checkpoint times each query and key, a line of values each.

        A warp has a quarter of the keys for all values, so that its threads ask for the same
        factors, and sums are a thread's own, but for four in the end.
        """
        sizes, layout, lines = self.sizes, self.by_quarter, []
        state = self.load(self.refs.state, layout)
        for first in range(0, sizes.factors, sizes.at_once):
            count = min(sizes.at_once, sizes.factors - first)
            if first:
                self.meet()  # all have read what was there

            def some(i, _, first=first):
                places = [i * FACTORS + x for x in range(FACTORS)]
                factors = [self.quarters(self.tokens.at[first + x]) for x in places]
                products = [jnp.sum(state * factor, axis=2) for factor in factors]
                for x, product in zip(places, products, strict=True):
                    self.store(self.products.at[x], product)

            lax.fori_loop(0, count // FACTORS, some, None)
            self.meet()
            for x in range(count):
                parts = [self.load(self.products.at[x, i], self.by_value) for i in range(4)]
                lines.append(decay * ((parts[0] + parts[1]) + (parts[2] + parts[3])))
        return lines

    def quarters(self, key):
        """A key or query as those of the state's elements it is multiplied with."""
        shape, spare = self.refs.state.shape, self.refs.spare
        if spare is None:
            parts = key.reshape(shape[0], shape[2])
        else:  # the interpreter takes no reference in another shape
            parts = spare
            parts[...] = key[...].reshape(parts.shape)
        parts = self.load(parts, self.by_quarter.reduce(1))
        return self.spread(parts, shape, (0, 2), self.by_quarter)

    def replay_lines(self, lines):
        """What the ring's tokens add to the lines."""
        width, overlap = self.sizes.width, self.refs.overlap

        def group(i, lines):
            for j in range(TOGETHER):
                j = i * TOGETHER + j
                update = self.load(self.updates.at[j], self.by_value) * self.weights[j]
                lines = [x + update * overlap[width + j, f] for f, x in enumerate(lines)]
            return lines

        return lax.fori_loop(0, self.left, group, lines)

    def put_factors(self):
        """Queries and keys in 16 bits, for tensor cores, and behind all what that loses of each."""
        sizes = self.sizes
        for start in range(0, sizes.columns, 8):
            exact = self.load(self.tokens.at[pl.ds(start, 8)], self.by_eight)
            most = exact.astype(sizes.dtype)
            rest = (exact - most.astype(jnp.float32)).astype(sizes.dtype)
            self.store(self.factors.at[pl.ds(start, 8)], most)
            self.store(self.factors.at[pl.ds(sizes.columns + start, 8)], rest)

    def multiply_by_tensor_cores(self):
        """The checkpoint's, values by factors, read once for what 16 bits keep of them and lose."""
        columns = self.sizes.columns
        sums = tensor_cores.product(self.refs.state, self.factors.transpose((1, 0)))
        return sums[:, :columns] + sums[:, columns:]

    def fold_some(self, i, state):
        """`FOLDED` tokens of the ring added to a state; one too many weighs 0."""
        tokens = [i * FOLDED + j for j in range(FOLDED)]
        layout, by_value = self.by_quarter, self.by_quarter.reduce((0, 2))
        updates = [self.load(self.updates.at[j], by_value) * self.weights[j] for j in tokens]
        keys = [self.quarters(self.keys.at[self.sizes.width + j]) for j in tokens]
        for update, key in zip(updates, keys, strict=True):
            state += self.spread(update, state.shape, 1, layout) * key
        return state

    def fold_by_tensor_cores(self, decay):
        """All of them, added to the one in shared memory; what 16 bits lose is another update.

        64 values at a time: of more the registers would be so many that fewer blocks fit.
        """
        refs, sizes = self.refs, self.sizes
        chunks = range(0, sizes.window, 16)
        for values in (pl.ds(start, 64) for start in range(0, sizes.values, 64)):
            updates = [self.decayed_updates(values, first) for first in chunks]
            for columns in (pl.ds(start, 64) for start in range(0, sizes.key_dim, 64)):
                tile = refs.state.at[values, columns]
                state: Any = None
                for first, parts in zip(chunks, updates, strict=True):
                    # One chunk's keys are those of all values.
                    if len(chunks) > 1 or values.start == 0:
                        self.put_fold_keys(first, columns, again=first + values.start > 0)
                    if state is None:
                        state = decay * self.load(tile, plgpu.Layout.WGMMA).astype(jnp.float32)
                    for part in parts:
                        keys = self.fold_keys.at[:, columns]
                        (state,) = tensor_cores.accumulate(refs.spare, (state, part, keys))
                self.store(tile, state.astype(sizes.dtype))

    def put_fold_keys(self, first, columns, again):
        """Keys of 16 tokens from `first` on, where tensor cores read them; `again`: over others."""
        key = self.keys.at[pl.ds(self.sizes.width + first, 16), columns]
        key = self.load(key, _STRIPES)
        place = plgpu.broadcasted_iota(jnp.int32, key.shape, 0, layout=_STRIPES)
        key = jnp.where(place < self.length - first, key, jnp.zeros((), key.dtype))
        if again:
            self.meet()  # all have read those
        self.store(self.fold_keys.at[:, columns], key)
        plgpu.commit_smem()

    def decayed_updates(self, values, first):
        """Of 16 tokens from `first` on, values by tokens, and what 16 bits lose of them."""
        refs, tokens, layout = self.refs, pl.ds(first, 16), plgpu.Layout.WGMMA
        update = refs.updates.at[tokens, values].transpose((1, 0))
        update = self.load(update, layout).astype(jnp.float32)
        since = self.load(refs.since.at[tokens], layout.reduce(0))
        place = plgpu.broadcasted_iota(jnp.int32, update.shape, 1, layout=layout)
        exact = update * self.spread(since, update.shape, 1, layout)
        exact = jnp.where(place < self.length - first, exact, 0.0)
        most = exact.astype(self.sizes.dtype)
        return most, (exact - most.astype(jnp.float32)).astype(self.sizes.dtype)
