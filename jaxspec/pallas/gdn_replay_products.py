"""The products of `gdn_replay_kernel`: of checkpoint and ring with a step's queries and keys."""

import functools

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import mosaic, wgmma
from jaxspec.pallas.replay import must_fold

# Tokens of the ring at once, one a warp; those too many repeat the newest, and weigh 0.
TOGETHER = 4
FACTORS = 2  # queries and keys in registers at once
# Of 16 keys: the 8 threads that are served at once have 8 rows of a stripe, in different banks.
_STRIPES = plgpu.Layout.TILED(
    plgpu.Tiling(((16, 64), (8, 32), (8,))), warp_dims=(-5, -4), lane_dims=(-2, -3), vector_dim=-1
)


class Products:
    """Of one block, a warpgroup."""

    def __init__(self, sizes, refs):
        """`refs`: everything in memory, by name."""
        self.sizes, self.refs = sizes, refs
        self.load = functools.partial(mosaic.load, plgpu)
        self.store = functools.partial(mosaic.store, plgpu)
        row, self.head, self.split = (lax.axis_index(x) for x in ("row", "head", "split"))
        self.row, self.slot, self.begin, self.length, self.count = (
            refs.rows[i, row] for i in range(5)
        )
        self.layer = refs.layer[0]
        self.place = self.layer * sizes.slots + self.slot
        self.key_head = lax.div(self.head, sizes.heads // sizes.key_heads)
        self.groups = lax.div(self.length + TOGETHER - 1, TOGETHER)
        self.folds = must_fold(self.length, sizes.width, sizes.rows)
        self.left = jnp.where(self.folds, 0, self.groups)  # beside the checkpoint
        # Keys, this step's and behind them the ring's, as the ring has them.
        if sizes.on_tensor_cores:
            self.keys = refs.keys
            self.factors, self.state_products, self.fold_keys = refs.products
        else:
            self.keys = refs.tokens.at[pl.ds(sizes.width, sizes.keys)]
            self.state_products = refs.products
        self.values = pl.ds(self.split * sizes.values, sizes.values)
        self.by_square = _square(sizes.dtype.itemsize)
        lanes = mosaic.THREADS // sizes.values
        self.by_product = rows_layout(sizes.values, lanes, min(4, sizes.columns // lanes))
        self.by_value = self.by_product.reduce(1)
        self.by_key = rows_layout(sizes.key_dim, mosaic.THREADS // sizes.key_dim, 1).reduce(1)
        # Vectors as matrices of one column, since with a stride Mosaic takes none.
        self.by_column = rows_layout(sizes.values, lanes, 1, columns=1)
        self.by_square_column = plgpu.Layout.TILED(
            plgpu.Tiling(((32, 1), (8, 1))),
            warp_dims=(-4,),
            lane_dims=(-2, plgpu.Replicated(4)),
            vector_dim=-1,
        )
        # Of tokens: 16 lanes each, which read 256 bytes in one piece.
        self.by_eight = plgpu.Layout.TILED(
            plgpu.Tiling(((8, 64), (2, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
        )
        # Of tokens, four queries or keys, each a warp's, and their elements: 8 lanes, 128 bytes.
        vector = 16 // sizes.dtype.itemsize
        self.by_factor = plgpu.Layout.TILED(
            plgpu.Tiling(((4, 4, 8 * vector), (vector,))),
            warp_dims=(-3,),
            lane_dims=(-4, -2),
            vector_dim=-1,
        )

    def meet(self):
        """All that the block's threads wrote to shared memory is there for all of them."""
        plgpu.barrier_arrive(self.refs.met)
        plgpu.barrier_wait(self.refs.met)

    def spread(self, x, shape, axes, layout):
        """`x` along these axes of an array, the same along others."""
        axes = (axes,) if isinstance(axes, int) else axes
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)

    def times(self, matrix, factors, layout):
        """Each row of `matrix` times each of these queries and keys: loads first, to overlap."""
        factors = [self.load(self.refs.tokens.at[x], layout.reduce(0)) for x in factors]
        factors = [self.spread(factor, matrix.shape, 1, layout) for factor in factors]
        return [jnp.sum(matrix * factor, axis=1) for factor in factors]

    def multiply_tokens(self):
        """This step's keys, and the ring's, times each of this step's queries and keys."""
        refs, width, layout = self.refs, self.sizes.width, self.by_factor
        shape = (8, 4, self.sizes.key_dim)
        fours = [pl.ds(start, 4) for start in range(0, 2 * width, 4)]
        factors = [self.load(refs.tokens.at[four], layout.reduce(0)) for four in fours]
        factors = [self.spread(x, shape, (1, 2), layout) for x in factors]

        def some(i, _):
            rows = pl.ds(i * 8, 8)
            keys = self.load(self.keys.at[rows], layout.reduce(1)).astype(jnp.float32)
            keys = self.spread(keys, shape, (0, 2), layout)
            for four, factor in zip(fours, factors, strict=True):
                self.store(refs.overlap.at[rows, four], jnp.sum(keys * factor, axis=2))

        # Also those too many that `replay` reads, where what nobody wrote may be NaN.
        lax.fori_loop(0, lax.div(width + self.left * TOGETHER + 7, 8), some, None)
        self.meet()

    def multiply_state(self):
        """The checkpoint times each query and key, values by factors."""
        refs, sizes = self.refs, self.sizes
        if sizes.on_tensor_cores:
            products = self.multiply_by_tensor_cores()
            self.meet()  # all have read the factors, where these go
            self.store(self.state_products, products)
        else:
            state = self.load(refs.state, self.by_square)

            def factors(first, _):
                columns = [first * FACTORS + x for x in range(FACTORS)]
                products = self.times(state, columns, self.by_square)
                for x, product in zip(columns, products, strict=True):
                    product = self.spread(product, (sizes.values, 1), 0, self.by_square_column)
                    self.store(self.state_products.at[:, pl.ds(x, 1)], product)

            lax.fori_loop(0, 2 * sizes.width // FACTORS, factors, None)
        self.meet()

    def multiply_by_tensor_cores(self):
        """So too; what 16 bits lose of a factor is another one."""
        refs, sizes = self.refs, self.sizes
        padded = sizes.padded
        for start in range(0, padded, 8):
            exact = self.load(refs.tokens.at[pl.ds(start, 8)], self.by_eight)
            most = exact.astype(sizes.dtype)
            rest = (exact - most.astype(jnp.float32)).astype(sizes.dtype)
            self.store(self.factors.at[pl.ds(start, 8)], most)
            self.store(self.factors.at[pl.ds(padded + start, 8)], rest)
        plgpu.commit_smem()

        def multiply(sums):
            for start in (0, padded):
                factors = self.factors.at[pl.ds(start, padded)]
                plgpu.wgmma(sums, refs.state, factors.transpose((1, 0)))
            return sums[...]

        return pl.run_scoped(
            multiply, plgpu.WGMMAAccumulatorRef((sizes.values, padded), jnp.float32)
        )

    def replay(self, decay):
        """The state before this step times each query and key, a line of values each."""
        refs, sizes = self.refs, self.sizes
        shape = (sizes.values, sizes.columns)
        turned = self.state_products.at[:, pl.ds(0, sizes.columns)]

        def group(i, sums):
            for j in range(TOGETHER):
                update = self.load(refs.updates.at[i * TOGETHER + j], self.by_value)
                overlap = refs.overlap.at[sizes.width + i * TOGETHER + j]
                overlap = self.load(overlap, self.by_product.reduce(0))
                update = update.astype(jnp.float32) * refs.since[i * TOGETHER + j]
                update = self.spread(update, shape, 0, self.by_product)
                sums += update * self.spread(overlap, shape, 1, self.by_product)
            return sums

        sums = decay * self.load(turned, self.by_product)
        self.store(turned, lax.fori_loop(0, self.left, group, sums))
        self.meet()
        columns = (turned.at[:, pl.ds(x, 1)] for x in range(2 * sizes.width))
        return [jnp.sum(self.load(column, self.by_column), axis=1) for column in columns]

    def fold_one(self, j, state):
        """Token `j` of the ring added to a state."""
        update = self.load(self.refs.updates.at[j], self.by_square.reduce(1)) * self.refs.since[j]
        key = self.load(self.keys.at[self.sizes.width + j], self.by_square.reduce(0))
        update = self.spread(update, state.shape, 0, self.by_square)
        return state + update * self.spread(key, state.shape, 1, self.by_square)

    def fold_by_tensor_cores(self, decay):
        """All of them, added to the one in shared memory; what 16 bits lose is another update."""
        refs, sizes = self.refs, self.sizes
        chunks = range(0, sizes.window, 16)
        updates = [self.decayed_updates(first) for first in chunks]
        for start in range(0, sizes.key_dim, 64):
            columns = pl.ds(start, 64)
            tile = refs.state.at[:, columns]
            state = decay * self.load(tile, plgpu.Layout.WGMMA).astype(jnp.float32)
            for first, parts in zip(chunks, updates, strict=True):
                key = self.keys.at[pl.ds(sizes.width + first, 16), columns]
                key = self.load(key, _STRIPES)
                place = plgpu.broadcasted_iota(jnp.int32, key.shape, 0, layout=_STRIPES)
                key = jnp.where(place < self.length - first, key, jnp.zeros((), key.dtype))
                self.store(self.fold_keys.at[:, columns], key)
                plgpu.commit_smem()
                for part in parts:
                    keys = self.fold_keys.at[:, columns]
                    (state,) = wgmma.accumulate(refs.spare, (state, part, keys))
                if first != chunks[-1]:
                    self.meet()  # all have read the keys, where the next go
            self.store(tile, state.astype(sizes.dtype))

    def decayed_updates(self, first):
        """Of 16 tokens from `first` on, values by tokens, and what 16 bits lose of them."""
        refs, tokens, layout = self.refs, pl.ds(first, 16), plgpu.Layout.WGMMA
        update = self.load(refs.updates.at[tokens].transpose((1, 0)), layout).astype(jnp.float32)
        since = self.load(refs.since.at[tokens], layout.reduce(0))
        place = plgpu.broadcasted_iota(jnp.int32, update.shape, 1, layout=layout)
        exact = update * self.spread(since, update.shape, 1, layout)
        exact = jnp.where(place < self.length - first, exact, 0.0)
        most = exact.astype(self.sizes.dtype)
        return most, (exact - most.astype(jnp.float32)).astype(self.sizes.dtype)


def rows_layout(values, lanes, vector, columns=None):
    """Register layout of a matrix with a row a value, over `lanes`: neighbours have others.

    `columns=1`: of a matrix of one column, which these lanes then share.
    """
    width = columns or lanes * vector
    between = plgpu.Replicated(lanes) if columns == 1 else -3
    return plgpu.Layout.TILED(
        plgpu.Tiling(((values, width), (values // 4, vector))),
        warp_dims=(-4,),
        lane_dims=(-2,) if lanes == 1 else (between, -2),
        vector_dim=-1,
    )


def _square(itemsize):
    """Register layout of a state: of every 32 values a thread has one, and a quarter of its keys.

    32 bytes of each 128, in two vectors: with the swizzle the 8 threads that are served at once
    find them in different banks.
    """
    vector = 16 // itemsize
    tiles = (32, 8 * vector), (8, 8 * vector), (2 * vector,), (vector,)
    return plgpu.Layout.TILED(
        plgpu.Tiling(tiles), warp_dims=(-6,), lane_dims=(-4, -3), vector_dim=-1
    )
