"""What a block of `gdn_replay_kernel` does, but for its products."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import gated_norm, mosaic
from jaxspec.pallas.gdn_replay_products import FOLDED, Products
from jaxspec.pallas.replay_block import TOGETHER


class Block(Products):
    """Some values of one head of one row."""

    def step(self):
        """A live row."""
        refs, width, wait = self.refs, self.sizes.width, plgpu.barrier_wait
        self.fetch()
        self.find_decay()
        wait(refs.tokens_came)
        self.round_keys()
        lax.fori_loop(0, self.groups, lambda i, _: wait(refs.ring_came.at[i]), None)
        decay = jnp.where(self.length > 0, refs.since[0] * jnp.exp(refs.gates[0]), 1.0)

        @pl.when(self.folds)
        def _():
            wait(refs.state_came)
            self.fold(decay)

        # Not before, since a fold takes many registers.
        new = [
            self.load(refs.v.at[self.row, t, self.head, self.values], self.by_value)
            for t in range(width)
        ]
        gates = [refs.g[self.row, t, self.head] for t in range(width)]
        betas = [refs.beta[self.row, t, self.head] for t in range(width)]
        gated = self.sizes.norm and self.fetch_gates()
        self.multiply_tokens(refs.tokens)
        self.meet()

        @pl.when(jnp.logical_not(self.folds))
        def _():
            wait(refs.state_came)

        read = self.read_state(jnp.where(self.folds, 1.0, decay))
        updates = self.solve(read, new, gates, betas)
        self.append(updates, gates)
        if gated:
            self.put_out_normed(*gated)

        @pl.when(self.folds)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def fetch(self):
        """Begin to copy all that comes to shared memory: of the ring what counts, by age.

        The checkpoint last: what is needed before it would wait for its bytes.
        """
        refs, width, copy = self.refs, self.sizes.width, plgpu.copy_gmem_to_smem
        targets = [(refs.q, refs.tokens, 0), (refs.k, refs.tokens, width)]
        if not self.sizes.on_tensor_cores:
            targets.append((refs.k, self.keys, 0))
        for x, to, first in targets:
            source, to = x.at[self.row, :, self.key_head], to.at[pl.ds(first, width)]
            copy(source, to, refs.tokens_came)

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

            @pl.when(warp == 0)
            def _():
                for place, part in self.checkpoint():
                    copy(place, part, refs.state_came)

            for j, gate in zip(tokens, gates, strict=True):
                refs.gates[j] = gate

    def checkpoint(self):
        """Where its parts are in the pool, and in shared memory."""
        state, place = self.refs.state, self.place * self.sizes.heads + self.head
        if self.sizes.on_tensor_cores:
            return [(self.refs.states.at[place, self.values], state)]
        quarters = [pl.ds(i * state.shape[2], state.shape[2]) for i in range(4)]
        places = [self.refs.states.at[place, self.values, quarter] for quarter in quarters]
        return [(place, state.at[i]) for i, place in enumerate(places)]

    def out(self, t):
        """Where what token `t` reads goes."""
        return self.refs.out.at[self.row, t, self.head, self.values]

    def find_decay(self):
        """That since each of the ring's tokens, 0 for none, to shared memory."""
        self.meet()
        after, counts = self.sum_after(self.refs.gates)
        self.store(self.refs.since, jnp.where(counts, jnp.exp(after), 0.0))

    def round_keys(self):
        """This step's keys as the ring will hold them; into it, by one block of each group."""
        refs, sizes = self.refs, self.sizes
        first = lax.rem(self.head, sizes.group) == 0
        rows = [refs.tokens.at[sizes.width + t] for t in range(sizes.width)]
        keys = [self.load(row, self.by_key).astype(sizes.dtype) for row in rows]
        if sizes.on_tensor_cores:
            for t, (row, key) in enumerate(zip(rows, keys, strict=True)):
                self.store(row, key.astype(jnp.float32))
                self.store(self.keys.at[t], key)
        for t, key in enumerate(keys):

            @pl.when(first & (self.split == 0) & (t < self.count))
            def _(t=t, key=key):
                self.store(refs.ring_k.at[self.key_row(self.next(t))], key)

        self.meet()

    def solve(self, read, new, gates, betas):
        """This step's updates and outputs, one token after the other."""
        refs, width = self.refs, self.sizes.width
        updates, outs = [], []
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
            outs.append(out)
        for t, out in enumerate(outs):  # last: no load passes a store
            self.store(refs.read.at[t] if self.sizes.norm else self.out(t), out)
        return updates

    def fetch_gates(self):
        """What gates the head's outputs, and its norm's weight, `_pieces` of its tokens each."""
        refs, (first, _) = self.refs, self.sizes.norm
        columns = pl.ds(first + self.head * self.sizes.values, self.sizes.values)
        pieces = []
        for start, count in _pieces(self.sizes.width):
            layout = mosaic.piece_layout(plgpu, count, self.sizes.values, itemsize=4)
            tokens = pl.ds(self.row * self.sizes.width + start, count)
            gate = self.load(refs.norm_gates.at[tokens, columns], layout)
            pieces.append((gate, self.load(refs.norm_weight, layout.reduce(0)), layout))
        return pieces

    def put_out_normed(self, *pieces):
        """What the tokens read, a head's norm in one warp, and gated."""
        refs, sizes = self.refs, self.sizes
        self.meet()
        for (start, count), (gate, weight, layout) in zip(
            _pieces(sizes.width), pieces, strict=True
        ):
            tokens = pl.ds(start, count)
            read, out = refs.read.at[tokens], refs.out.at[self.row, tokens, self.head]
            operands = self.load(read, layout), gate, weight, sizes.norm[1]
            normed = gated_norm.in_kernel(plgpu, layout, *operands)
            self.store(out, normed.astype(out.dtype))

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
        """The ring's tokens into the checkpoint, which begins on its way back."""
        if self.sizes.on_tensor_cores:
            self.fold_by_tensor_cores(decay)
        else:
            state = decay * self.load(self.refs.state, self.by_quarter)
            times = lax.div(self.length + FOLDED - 1, FOLDED)
            self.store(self.refs.state, lax.fori_loop(0, times, self.fold_some, state))
        plgpu.commit_smem()
        for place, part in self.checkpoint():
            plgpu.copy_smem_to_gmem(part, place)


def _pieces(width):
    """Where in so many tokens powers of two of them begin, and how many these are."""
    start = 0
    while start < width:
        count = 1 << ((width - start).bit_length() - 1)
        yield start, count
        start += count
