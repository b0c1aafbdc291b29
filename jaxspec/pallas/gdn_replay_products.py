"""The products of `gdn_replay_kernel`: of checkpoint and ring with a step's queries and keys."""

import functools

import jax.numpy as jnp
from jax import lax

from jaxspec.pallas import mosaic

HEAD = 128  # values, and keys, of a head


class Products:
    """Of one warpgroup."""

    def __init__(self, plgpu, sizes, refs):
        """`refs`: everything in memory, by name."""
        from jax.experimental import pallas as pl

        self.pl, self.plgpu, self.sizes, self.refs = pl, plgpu, sizes, refs
        self.load = functools.partial(mosaic.load, plgpu)
        self.store = functools.partial(mosaic.store, plgpu)
        self.row, self.head, self.part = (lax.axis_index(x) for x in ("row", "head", "part"))
        self.key_head = lax.div(self.head, sizes.heads // sizes.key_heads)
        self.values = pl.ds(self.part * sizes.values, sizes.values)
        self.tile = _rows(plgpu, sizes, 16 // sizes.dtype.itemsize)
        self.products = _rows(plgpu, sizes, min(4, sizes.columns // sizes.parts))
        self.line, self.every = self.tile.reduce(1), mosaic.vectors(plgpu, 1)
        # Of tokens: 8 lanes each, which read 128 bytes in one piece.
        self.sixteen = plgpu.Layout.TILED(
            plgpu.Tiling(((16, 32), (4, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
        )
        self.eight = plgpu.Layout.TILED(
            plgpu.Tiling(((8, 64), (2, 4))), warp_dims=(-4,), lane_dims=(-2, -3), vector_dim=-1
        )
        # Vectors as matrices of one column, since with a stride Mosaic takes none.
        self.column = _rows(plgpu, sizes, 1, columns=1)
        self.column_of_sixteen = plgpu.Layout.TILED(
            plgpu.Tiling(((16, 1), (4, 1))),
            warp_dims=(-4,),
            lane_dims=(-2, plgpu.Replicated(8)),
            vector_dim=-1,
        )

    def spread(self, x, shape, axis, layout):
        """`x` along `axis` of a matrix, the same everywhere else."""
        return self.plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)

    def line_of(self, ref, x):
        """Column `x`."""
        return jnp.sum(self.load(ref.at[:, self.pl.ds(x, 1)], self.column), axis=1)

    def multiply_tokens(self, length):
        """This step's keys, and then the ring's, times each of this step's queries and keys."""
        refs, pl, sizes, width = self.refs, self.pl, self.sizes, self.sizes.width
        # Up to a full group of 4 ring tokens, as `replay` reads them.
        needed = lax.div(width + lax.div(length + 3, 4) * 4 + 15, 16)
        trips = lax.div(needed - self.part + sizes.parts - 1, sizes.parts)
        for first in range(0, 2 * width, 4):
            columns = range(first, min(first + 4, 2 * width))
            factors = [self.load(refs.tokens.at[x], self.sixteen.reduce(0)) for x in columns]

            def some(i, _, columns=columns, factors=factors):
                start = (i * sizes.parts + self.part) * 16
                keys = self.load(refs.tokens.at[pl.ds(width + start, 16)], self.sixteen)
                for x, factor in zip(columns, factors, strict=True):
                    product = keys * self.spread(factor, keys.shape, 1, self.sixteen)
                    product = jnp.sum(product, axis=1)
                    product = self.spread(product, (16, 1), 0, self.column_of_sixteen)
                    self.store(refs.overlap.at[pl.ds(start, 16), pl.ds(x, 1)], product)

            lax.fori_loop(0, trips, some, None)

    def multiply_state(self):
        """The checkpoint times each query and key, a line of values each."""
        refs, lines = self.refs, [0.0] * (2 * self.sizes.width)
        for start in range(0, HEAD, HEAD // 2):
            columns = self.pl.ds(start, HEAD // 2)
            state = self.load(refs.state.at[self.part, :, columns], self.tile)
            for x in range(len(lines)):
                factor = self.load(refs.tokens.at[x, columns], self.tile.reduce(0))
                product = state * self.spread(factor, state.shape, 1, self.tile)
                lines[x] += jnp.sum(product, axis=1)
        return lines

    def multiply_state_by_tensor_cores(self):
        """So too; what 16 bits lose of a factor is another one."""
        refs, sizes, plgpu, pl = self.refs, self.sizes, self.plgpu, self.pl
        factors, padded = refs.factors.at[self.part], sizes.padded
        for start in range(0, padded, 8):
            exact = self.load(refs.tokens.at[pl.ds(start, 8)], self.eight)
            most = exact.astype(sizes.dtype)
            rest = (exact - most.astype(jnp.float32)).astype(sizes.dtype)
            self.store(factors.at[pl.ds(start, 8)], most)
            self.store(factors.at[pl.ds(padded + start, 8)], rest)
        plgpu.commit_smem()

        def multiply(sums):
            plgpu.wgmma(sums, refs.state.at[self.part], factors.transpose((1, 0)))
            return sums[...]

        sums = pl.run_scoped(multiply, plgpu.ACC((sizes.values, 2 * padded), jnp.float32))
        turned = refs.turned.at[self.part]
        self.store(turned.at[:, pl.ds(0, 2 * padded)], sums)
        plgpu.commit_smem()
        lines = [
            self.line_of(turned, x) + self.line_of(turned, padded + x)
            for x in range(2 * sizes.width)
        ]
        plgpu.commit_smem()
        return lines

    def replay(self, length):
        """What the ring adds to each of these lines."""
        refs, sizes = self.refs, self.sizes
        shape = (sizes.values, sizes.columns)

        def four(i, sums):
            for j in range(4):
                update = self.load(refs.updates.at[i * 4 + j, self.values], self.line)
                overlap = refs.overlap.at[sizes.width + i * 4 + j]
                overlap = self.load(overlap, self.products.reduce(0))
                update = self.spread(update, shape, 0, self.products)
                sums += update * self.spread(overlap, shape, 1, self.products)
            return sums

        nothing = self.plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.products)
        sums = lax.fori_loop(0, lax.div(length + 3, 4), four, nothing)
        turned = refs.turned.at[self.part]
        self.store(turned.at[:, self.pl.ds(0, sizes.columns)], sums)
        self.plgpu.commit_smem()
        return [self.line_of(turned, x) for x in range(2 * sizes.width)]


def _rows(plgpu, sizes, vector, columns=None):
    """Register layout of a matrix with a row a value, over `parts` lanes: neighbours have others.

    `columns=1`: of a matrix of one column, which these lanes then share.
    """
    values, parts = sizes.values, sizes.parts
    width = columns or parts * vector
    lanes = {1: (-2,), 2: (plgpu.Replicated(2) if columns == 1 else -3, -2)}[parts]
    return plgpu.Layout.TILED(
        plgpu.Tiling(((values, width), (values // 4, vector))),
        warp_dims=(-4,),
        lane_dims=lanes,
        vector_dim=-1,
    )
