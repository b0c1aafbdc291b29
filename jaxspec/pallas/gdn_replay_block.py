"""What a block of `gdn_replay_kernel` does, but for its products."""

import jax.numpy as jnp
from jax import lax

from jaxspec.pallas.gdn_replay_products import HEAD, Products
from jaxspec.pallas.replay import must_fold

_TOGETHER = 16  # tokens of the ring on their way into one thread's registers


class Block(Products):
    """One value head of one row, or the half of it that is one warpgroup's."""

    def run(self):
        """All there is to do: nothing but zeros where a row is padding."""
        refs, pl = self.refs, self.pl
        slot, self.count = refs.slots[self.row], refs.query_len[self.row]
        live = (slot > 0) & (slot < self.sizes.slots) & (self.count > 0)
        self.place = refs.layer[0] * self.sizes.slots + slot

        @pl.when(live)
        def _():
            self.step()

        @pl.when(jnp.logical_not(live))
        def _():
            nothing = self.plgpu.layout_cast(jnp.zeros(self.sizes.values, jnp.float32), self.line)
            for t in range(self.sizes.width):
                self.store(refs.out.at[self.row, t, self.head, self.values], nothing)

    def step(self):
        """A live row."""
        refs, sizes, width = self.refs, self.sizes, self.sizes.width
        self.fetch()
        self.length = jnp.clip(refs.ring_length[self.row], 0, sizes.rows - width)
        self.begin = lax.rem(jnp.maximum(refs.num_computed[self.row], 0), sizes.rows)
        decay = self.read_ring()
        new = [
            self.load(refs.v.at[self.row, t, self.head, self.values], self.line)
            for t in range(width)
        ]
        gates = [refs.g[self.row, t, self.head] for t in range(width)]
        betas = [refs.beta[self.row, t, self.head] for t in range(width)]
        self.round_keys()
        self.meet(refs.ring_ready)
        self.multiply_tokens(self.length)
        self.meet(refs.overlap_ready)
        self.plgpu.barrier_wait(refs.state_came.at[self.part])
        if sizes.on_tensor_cores:
            read = self.multiply_state_by_tensor_cores()
        else:
            read = self.multiply_state()
        read = [decay * x + y for x, y in zip(read, self.replay(self.length), strict=True)]
        updates = self.solve(read, new, gates, betas)
        self.append(updates, gates)

        @self.pl.when(must_fold(self.length, width, sizes.rows))
        def _():
            self.fold(decay)

    def meet(self, barrier):
        """All that the block's threads wrote to shared memory is there for all of them."""
        self.plgpu.barrier_arrive(barrier)
        self.plgpu.barrier_wait(barrier)

    def fetch(self):
        """Begin to copy the checkpoint, and this step's queries and keys."""
        refs, pl, width, copy = self.refs, self.pl, self.sizes.width, self.plgpu.copy_gmem_to_smem
        copy(self.checkpoint(), refs.state.at[self.part], refs.state_came.at[self.part])
        for i, x in enumerate((refs.q, refs.k)):

            @pl.when(self.part == i % self.sizes.parts)
            def _(i=i, x=x):
                to = refs.tokens.at[pl.ds(i * width, width)]
                copy(x.at[self.row, :, self.key_head], to, refs.tokens_came)

    def checkpoint(self):
        """In the pool."""
        return self.refs.states.at[self.place * self.sizes.heads + self.head, self.values]

    def key_row(self, at):
        """Where row `at` of this ring lies in all keys."""
        return (self.place * self.sizes.rows + at) * self.sizes.key_heads + self.key_head

    def update_row(self, at):
        """So too in all updates, and in all gates."""
        return (self.place * self.sizes.rows + at) * self.sizes.heads + self.head

    def next(self, t):
        """Where in the ring token `t` of this step goes."""
        at = self.begin + t
        return jnp.where(at >= self.sizes.rows, at - self.sizes.rows, at)

    def read_ring(self):
        """Keys, and decayed updates, to shared memory by age; returns the decay of them all."""
        after = jnp.float32(0)
        # From the newest on: sums of what came after each, no differences.
        for start in reversed(range(0, self.sizes.window, _TOGETHER)):
            some = range(start, min(start + _TOGETHER, self.sizes.window))
            after = self.read_some(some, after)
        return jnp.exp(after)

    def read_some(self, some, after):
        """Of these tokens, given the sum of the gates after them; returns it with theirs.

        Warpgroups take turns, one a token.
        """
        refs, sizes, parts = self.refs, self.sizes, self.sizes.parts

        def counted(j, read, nothing):
            """What `read` finds at the ring's row of token `j`, if that token counts."""
            at = self.begin - (self.length - j)
            at = jnp.where(at < 0, at + sizes.rows, at)
            return lax.cond(j < self.length, lambda: read(at), lambda: nothing)

        def key(at):
            return self.load(refs.ring_k.at[self.key_row(at)], self.every)

        def update(at):
            return self.load(refs.ring_u.at[self.update_row(at)], self.every)

        nothing = self.plgpu.layout_cast(jnp.zeros(HEAD, sizes.dtype), self.every)
        mine = [j + self.part for j in some[::parts]]
        gates = [
            counted(j, lambda at: refs.ring_g[self.update_row(at)], jnp.float32(0)) for j in some
        ]
        keys = [counted(j, key, nothing) for j in mine]
        updates = [counted(j, update, nothing) for j in mine]
        afters = []
        for gate in reversed(gates):
            afters.append(after)
            after = after + gate
        afters = afters[::-1]
        for i, j in enumerate(mine):
            since = afters[i * parts]
            if parts == 2:
                since = jnp.where(self.part == 0, since, afters[i * parts + 1])
            self.store(refs.tokens.at[2 * sizes.width + j], keys[i].astype(jnp.float32))
            self.store(refs.updates.at[j], updates[i].astype(jnp.float32) * jnp.exp(since))
        return after

    def round_keys(self):
        """This step's keys as the ring will hold them; into it, by one head of each group."""
        refs, sizes, pl = self.refs, self.sizes, self.pl
        first = lax.rem(self.head, sizes.heads // sizes.key_heads) == 0
        self.plgpu.barrier_wait(refs.tokens_came)
        for i in range(-(-sizes.width // sizes.parts)):
            t = i * sizes.parts + self.part

            @pl.when(t < sizes.width)
            def _(t=t):
                row = refs.tokens.at[sizes.width + t]
                key = self.load(row, self.every).astype(sizes.dtype)
                if sizes.on_tensor_cores:
                    self.store(row, key.astype(jnp.float32))

                @pl.when(first & (t < self.count))
                def _():
                    self.store(refs.ring_k.at[self.key_row(self.next(t))], key)

    def solve(self, read, new, gates, betas):
        """This step's updates and outputs, one token after the other."""
        refs, width = self.refs, self.sizes.width
        updates = []
        for t in range(width):
            # since[s] decays what token s added; the last is for the state before this step.
            since, total = [], jnp.float32(0)
            for s in range(t, -1, -1):
                since.append(jnp.exp(total))
                total = total + gates[s]
            since, whole = since[::-1], jnp.exp(total)
            known, out = whole * read[width + t], whole * read[t]
            for s in range(t):
                known += (since[s] * refs.overlap[s, width + t]) * updates[s]
            update = betas[t] * (new[t] - known)
            updates.append(update.astype(self.sizes.dtype).astype(jnp.float32))
            for s in range(t + 1):
                out += (since[s] * refs.overlap[s, t]) * updates[s]
            self.store(refs.out.at[self.row, t, self.head, self.values], out)
        return updates

    def append(self, updates, gates):
        """This step's updates and gates to the ring."""
        refs = self.refs
        for t, update in enumerate(updates):

            @self.pl.when(t < self.count)
            def _(t=t, update=update):
                row = self.update_row(self.next(t))
                update = update.astype(self.sizes.dtype)
                self.store(refs.ring_u.at[row, self.values], update)

                @self.pl.when(self.part == 0)
                def _():
                    refs.ring_g[row] = gates[t]

    def fold(self, decay):
        """The ring's tokens into the checkpoint."""
        refs, sizes, plgpu = self.refs, self.sizes, self.plgpu
        across = 128 // sizes.dtype.itemsize
        for start in range(0, HEAD, across):
            columns = self.pl.ds(start, across)
            tile = refs.state.at[self.part, :, columns]

            def add(j, state, columns=columns):
                update = self.load(refs.updates.at[j, self.values], self.line)
                key = self.load(refs.tokens.at[2 * sizes.width + j, columns], self.tile.reduce(0))
                update = self.spread(update, state.shape, 0, self.tile)
                return state + update * self.spread(key, state.shape, 1, self.tile)

            state = decay * self.load(tile, self.tile).astype(jnp.float32)
            state = lax.fori_loop(0, self.length, add, state)
            self.store(tile, state.astype(sizes.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.state.at[self.part], self.checkpoint())
        plgpu.wait_smem_to_gmem(0)
