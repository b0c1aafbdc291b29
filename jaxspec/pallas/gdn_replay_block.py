"""What a block of `gdn_replay_kernel` does, but for its products."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import mosaic
from jaxspec.pallas.gdn_replay_products import TOGETHER, Products
from jaxspec.pallas.replay import must_fold


class Block(Products):
    """Some values of one head of one row."""

    def run(self):
        """All there is to do: nothing but zeros where a row is padding."""
        refs = self.refs
        slot = refs.slots[self.row]
        live = (slot > 0) & (slot < self.sizes.slots) & (self.count > 0)
        self.place = refs.layer[0] * self.sizes.slots + slot

        @pl.when(live)
        def _():
            self.step()

        @pl.when(jnp.logical_not(live))
        def _():
            nothing = plgpu.layout_cast(jnp.zeros(self.sizes.values, jnp.float32), self.by_value)
            for t in range(self.sizes.width):
                self.store(refs.out.at[self.row, t, self.head, self.values], nothing)

    def step(self):
        """A live row."""
        refs, sizes, width, wait = self.refs, self.sizes, self.sizes.width, plgpu.barrier_wait
        self.fetch()
        decay = self.decay()
        new = [
            self.load(refs.v.at[self.row, t, self.head, self.values], self.by_value)
            for t in range(width)
        ]
        gates = [refs.g[self.row, t, self.head] for t in range(width)]
        betas = [refs.beta[self.row, t, self.head] for t in range(width)]
        wait(refs.tokens_came)
        self.round_keys()
        lax.fori_loop(0, self.groups, lambda i, _: wait(refs.ring_came.at[i]), None)
        self.multiply_tokens()
        wait(refs.state_came)
        self.multiply_state()
        read = self.replay(decay)
        updates = self.solve(read, new, gates, betas)
        self.append(updates, gates)

        @pl.when(must_fold(self.length, width, sizes.rows))
        def _():
            self.fold(decay)

    def fetch(self):
        """Begin to copy all that comes to shared memory: of the ring what counts, by age."""
        refs, width, copy = self.refs, self.sizes.width, plgpu.copy_gmem_to_smem
        copy(self.checkpoint(), refs.state, refs.state_came)
        for i, x in enumerate((refs.q, refs.k)):
            to = refs.tokens.at[pl.ds(i * width, width)]
            copy(x.at[self.row, :, self.key_head], to, refs.tokens_came)

        @plgpu.warp_map
        def _(warp):
            # A token of each group; four warps do it in a quarter of the time.
            tokens = [TOGETHER * i + warp for i in range(self.sizes.window // TOGETHER)]
            gates = [refs.ring_g[self.update_row(self.ring_row(j))] for j in tokens]

            def one(i, _):
                j, came = TOGETHER * i + warp, refs.ring_came.at[i]
                at = self.ring_row(j)
                copy(refs.ring_k.at[self.key_row(at)], self.keys.at[width + j], came)
                copy(refs.ring_u.at[self.update_row(at), self.values], refs.updates.at[j], came)

            lax.fori_loop(0, self.groups, one, None)
            for j, gate in zip(tokens, gates, strict=True):
                refs.gates[j] = gate

    def ring_row(self, j):
        """The ring's row of token `j` by age; of what is younger than all, that of the newest."""
        at = self.begin - jnp.maximum(self.length - j, 1)
        return jnp.where(at < 0, at + self.sizes.rows, at)

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

    def decay(self):
        """Of all the ring's tokens; that since each goes to shared memory."""
        refs = self.refs
        self.meet()
        # A thread has a token. Sums of what came after it, no differences.
        each = mosaic.vectors(plgpu, 1)
        token = plgpu.broadcasted_iota(jnp.int32, (mosaic.THREADS,), 0, layout=each)

        def add(i, sums):
            after, total = sums
            gate = refs.gates[i]
            return after + jnp.where(token < i, gate, 0.0), total + gate

        nothing = plgpu.layout_cast(jnp.zeros(mosaic.THREADS, jnp.float32), each)
        after, total = lax.fori_loop(0, self.length, add, (nothing, jnp.float32(0)))
        since = jnp.where(token < self.length, jnp.exp(after), 0.0)
        self.store(refs.since, since)
        return jnp.exp(total)

    def round_keys(self):
        """This step's keys as the ring will hold them; into it, by one block of each group."""
        refs, sizes = self.refs, self.sizes
        first = lax.rem(self.head, sizes.heads // sizes.key_heads) == 0

        def one(t, _):
            row = refs.tokens.at[sizes.width + t]
            key = self.load(row, self.by_key).astype(sizes.dtype)
            if sizes.on_tensor_cores:
                self.store(row, key.astype(jnp.float32))
                self.store(self.keys.at[t], key)

            @pl.when(first & (self.split == 0) & (t < self.count))
            def _():
                self.store(refs.ring_k.at[self.key_row(self.next(t))], key)

        lax.fori_loop(0, sizes.width, one, None)
        self.meet()

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

            @pl.when(t < self.count)
            def _(t=t, update=update):
                row = self.update_row(self.next(t))
                update = update.astype(self.sizes.dtype)
                self.store(refs.ring_u.at[row, self.values], update)

                @pl.when(self.split == 0)
                def _():
                    refs.ring_g[row] = gates[t]

    def fold(self, decay):
        """The ring's tokens into the checkpoint."""
        if self.sizes.on_tensor_cores:
            self.fold_by_tensor_cores(decay)
        else:
            state = decay * self.load(self.refs.state, self.by_square)
            self.store(self.refs.state, lax.fori_loop(0, self.length, self.fold_one, state))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(self.refs.state, self.checkpoint())
        plgpu.wait_smem_to_gmem(0)
