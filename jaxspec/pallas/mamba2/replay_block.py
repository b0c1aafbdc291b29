"""What a block of `mamba2_replay_kernel` does, but for its products."""

import math

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.mamba2.replay_products import Products
from jaxspec.pallas.recurrent.replay_block import TOGETHER


class Head(Products):
    """One head of one row, a warpgroup's work."""

    def step(self):
        """A live row."""
        refs, width, wait = self.refs, self.sizes.width, plgpu.barrier_wait
        decay = refs.a[self.head] * math.log2(math.e)  # a power of 2 costs half of one of e
        self.fetch()
        self.keep_b()
        self.weigh(decay)
        self.meet()
        wait(refs.reads_came)
        lax.fori_loop(0, self.groups, lambda i, _: wait(refs.ring_came.at[i]), None)
        self.multiply_tokens(refs.reads, self.part, self.sizes.together)
        wait(refs.state_came.at[self.part])
        kept = jnp.where(self.length > 0, self.kept[0], 1.0)
        self.multiply_state(jnp.where(self.folds, kept, 1.0))
        new = [self.load(refs.x.at[self.row, t, self.head], self.by_value) for t in range(width)]
        gaps = [refs.dt[self.row, t, self.head] for t in range(width)]
        self.meet()
        sums = self.load(self.products, self.by_product)
        read = self.replay(jnp.where(self.folds, 1.0, kept), sums, plgpu.commit_smem)
        self.put_out(decay, read, new, gaps)
        self.append(new, gaps)

        @pl.when(self.folds)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def fetch(self):
        """Begin to copy all that comes to shared memory: of the ring what counts, by age.

        The checkpoint last: what is needed before it would wait for its bytes.
        """
        refs, sizes, copy = self.refs, self.sizes, plgpu.copy_gmem_to_smem

        @pl.when(self.part == 0)
        def _():
            to = refs.reads.at[pl.ds(0, sizes.width)]
            copy(refs.c.at[self.row, :, self.key_head], to, refs.reads_came)

        @plgpu.warp_map
        def _(warp):
            # A token of each group; the heads take turns with the B that they share.
            tokens = [TOGETHER * i + warp for i in range(sizes.window // TOGETHER)]
            gaps = [refs.ring_dt[self.update_row(self.ring_row(j))] for j in tokens]

            def one(i, _):
                j, came = TOGETHER * i + warp, refs.ring_came.at[i]
                at = self.ring_row(j)
                copy(refs.ring_x.at[self.update_row(at)], self.updates.at[j], came)

                @pl.when(lax.rem(i, sizes.together) == self.part)
                def _():
                    copy(refs.ring_b.at[self.key_row(at)], self.keys.at[sizes.width + j], came)

            lax.fori_loop(0, self.groups, one, None)

            @pl.when(warp == 0)
            def _():
                copy(self.checkpoint(), self.state, refs.state_came.at[self.part])

            for j, gap in zip(tokens, gaps, strict=True):
                self.gaps[j] = gap

    def out(self, t):
        """Where what token `t` reads goes."""
        return self.refs.out.at[self.row, t, self.head]

    def keep_b(self):
        """This step's B as the ring will hold it; into it, by the group's first head."""
        refs, sizes = self.refs, self.sizes

        @pl.when(self.part == 0)
        def _():
            for t in range(sizes.width):
                key = self.load(refs.b.at[self.row, t, self.key_head], self.by_key)
                key = key.astype(sizes.dtype)
                self.store(self.keys.at[t], key)

                @pl.when((lax.rem(self.head, sizes.group) == 0) & (t < self.count))
                def _(t=t, key=key):
                    self.store(refs.ring_b.at[self.key_row(self.next(t))], key)

    def weigh(self, decay):
        """What each of the ring's tokens is worth by now, and what was there before it."""
        plgpu.commit_smem()
        after, counts = self.sum_after(self.gaps)
        gap = self.load(self.gaps, self.by_token.reduce(1))
        self.store(self.weights, jnp.where(counts, jnp.exp2(decay * after) * gap, 0.0))
        self.store(self.kept, jnp.exp2(decay * (after + gap)))

    def put_out(self, decay, read, new, gaps):
        """What each token reads of the state before this step, of this step's tokens, of itself."""
        refs, skip = self.refs, self.refs.d[self.head]
        kept = [x.astype(self.sizes.dtype).astype(jnp.float32) for x in new]
        for t, x in enumerate(new):
            out, elapsed = skip * x.astype(jnp.float32), jnp.float32(0)
            for s in range(t, -1, -1):
                out += (jnp.exp2(decay * elapsed) * gaps[s] * refs.overlap[s, t]) * kept[s]
                elapsed = elapsed + gaps[s]
            out += jnp.exp2(decay * elapsed) * read[t]
            self.store(self.out(t), out)

    def append(self, new, gaps):
        """This step's `x` and `dt` to the ring."""
        refs = self.refs
        for t, (x, gap) in enumerate(zip(new, gaps, strict=True)):

            @pl.when(t < self.count)
            def _(t=t, x=x, gap=gap):
                row = self.update_row(self.next(t))
                self.store(refs.ring_x.at[row], x.astype(self.sizes.dtype))
                refs.ring_dt[row] = gap
