"""What a block of `gdn_replay_kernel` does, but for its products."""

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.replay_products import FOLDED, Products
from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.norm import gated_norm_block
from jaxspec.pallas.recurrent.replay_block import TOGETHER


class Block(Products):
    """Some values of one head of one row."""

    def step(self):
        """A live row."""
        refs, wait = self.refs, plgpu.barrier_wait
        self.fetch()
        self.find_decay()
        self.await_tokens()
        self.keep_keys()
        lax.fori_loop(0, self.groups, lambda i, _: wait(refs.ring_came.at[i]), None)
        decay = jnp.where(self.length > 0, refs.since[0] * jnp.exp(refs.gates[0]), 1.0)

        @pl.when(self.folds)
        def _():
            wait(refs.state_came)
            self.fold(decay)

        # Not before, since a fold takes many registers.
        new = self.load_values()
        gates, betas = self.load_gates()
        gated = self.sizes.norm and self.fetch_gates()
        if self.sizes.on_tensor_cores:
            self.put_factors()
        self.multiply_tokens(self.tokens)
        # Factors and overlap are there, and nobody reads the tokens any more, where products go.
        (plgpu.commit_smem if self.sizes.on_tensor_cores else self.meet)()

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

    def token_copies(self):
        """From where to where queries and keys are copied; float32 keys twice."""
        refs, width = self.refs, self.sizes.width
        targets = [(refs.q, self.tokens, 0), (refs.k, self.tokens, width)]
        if not self.sizes.on_tensor_cores:
            targets.append((refs.k, self.keys, 0))
        return [
            (x.at[self.row, :, self.key_head], to.at[pl.ds(first, width)])
            for x, to, first in targets
        ]

    def await_tokens(self):
        """Queries and keys, as the ring will hold these, are there for all, and `since` too."""
        refs, sizes = self.refs, self.sizes
        plgpu.barrier_wait(refs.tokens_came)
        if sizes.on_tensor_cores:
            rows = [self.tokens.at[sizes.width + t] for t in range(sizes.width)]
            keys = [self.load(row, self.by_key).astype(sizes.dtype) for row in rows]
            for t, (row, key) in enumerate(zip(rows, keys, strict=True)):
                self.store(row, key.astype(jnp.float32))
                self.store(self.keys.at[t], key)
        self.meet()

    @property
    def is_first(self):
        """Of the blocks that share a key: the one that writes what is theirs together."""
        return (lax.rem(self.head, self.sizes.group) == 0) & (self.split == 0)

    def for_tokens(self, put, condition: Any = True):
        """`put(t)` of the tokens that are no padding; mostly that is all, in one piece."""
        width = self.sizes.width

        @pl.when(condition & (self.count == width))
        def _():
            for t in range(width):
                put(t)

        @pl.when(condition & (self.count < width))
        def _():
            for t in range(width - 1):
                pl.when(t < self.count)(functools.partial(put, t))

    def keep_keys(self):
        """This step's keys to the ring."""

        def put(t):
            key = self.load(self.keys.at[t], self.by_key)
            self.store(self.refs.ring_k.at[self.key_row(self.next(t))], key)

        self.for_tokens(put, self.is_first)

    def load_values(self):
        """Those of each token."""
        tokens = [
            self.refs.v.at[self.row, t, self.head, self.values] for t in range(self.sizes.width)
        ]
        return [self.load(token, self.by_value) for token in tokens]

    def load_gates(self):
        """Log decay, and strength, of each token."""
        return [
            [x[self.row, t, self.head] for t in range(self.sizes.width)]
            for x in (self.refs.g, self.refs.beta)
        ]

    def fetch(self):
        """Begin to copy all that comes to shared memory: of the ring what counts, by age.

        The checkpoint last: what is needed before it would wait for its bytes. Each warp issues
        some, as a copy's address takes some 40 instructions.
        """
        refs, width, copy = self.refs, self.sizes.width, plgpu.copy_gmem_to_smem
        of_tokens = self.token_copies()

        @plgpu.warp_map
        def _(warp):
            for i, (source, to) in enumerate(of_tokens):

                @pl.when(warp == i)
                def _(source=source, to=to):
                    copy(source, to, refs.tokens_came)

            # A token of each group; four warps do it in a quarter of the time.
            tokens = [TOGETHER * i + warp for i in range(self.sizes.window // TOGETHER)]
            gates = [refs.ring_g[self.update_row(self.ring_row(j))] for j in tokens]

            def one(i, _):
                j, came = TOGETHER * i + warp, refs.ring_came.at[i]
                at = self.ring_row(j)
                copy(refs.ring_k.at[self.key_row(at)], self.keys.at[width + j], came)
                copy(refs.ring_u.at[self.update_row(at), self.values], refs.updates.at[j], came)

            lax.fori_loop(0, self.groups, one, None)

            if not self.sizes.on_tensor_cores:
                copy(*self.quarter(warp), refs.state_came)
            else:

                @pl.when(warp == 3)
                def _():
                    copy(self.checkpoint(), refs.state, refs.state_came)

            for j, gate in zip(tokens, gates, strict=True):
                refs.gates[j] = gate

    def checkpoint(self):
        """Where it is in the pool."""
        return self.refs.states.at[self.place * self.sizes.heads + self.head, self.values]

    def quarter(self, i):
        """Where a float32 checkpoint's quarter of the keys is in the pool, and in shared memory."""
        size = self.refs.state.shape[2]
        return self.checkpoint().at[:, pl.ds(i * size, size)], self.refs.state.at[i]

    def out(self, t):
        """Where what token `t` reads goes."""
        return self.refs.out.at[self.row, t, self.head, self.values]

    def find_decay(self):
        """That since each of the ring's tokens, 0 for none, to shared memory."""
        self.meet()
        after, counts = self.sum_after(self.refs.gates.at[pl.ds(0, self.sizes.square)])
        self.store(self.refs.since, jnp.where(counts, jnp.exp(after), 0.0))

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
        """What gates the head's outputs, and its norm's weight, `pieces_of` its tokens each."""
        refs, (first, _) = self.refs, self.sizes.norm
        columns = pl.ds(first + self.head * self.sizes.values, self.sizes.values)
        pieces = []
        for start, count in layouts.pieces_of(self.sizes.width):
            layout = layouts.piece_layout(count, self.sizes.values, itemsize=4)
            tokens = pl.ds(self.row * self.sizes.width + start, count)
            gate = self.load(refs.norm_gates.at[tokens, columns], layout)
            pieces.append((gate, self.load(refs.norm_weight, layout.reduce(0)), layout))
        return pieces

    def put_out_normed(self, *pieces):
        """What the tokens read, a head's norm in one warp, and gated."""
        refs, sizes = self.refs, self.sizes
        self.meet()
        for (start, count), (gate, weight, layout) in zip(
            layouts.pieces_of(sizes.width), pieces, strict=True
        ):
            tokens = pl.ds(start, count)
            read, out = refs.read.at[tokens], refs.out.at[self.row, tokens, self.head]
            operands = self.load(read, layout), gate, weight, sizes.norm[1]
            normed = gated_norm_block.in_kernel(layout, *operands)
            self.store(out, normed.astype(out.dtype))

    def append(self, updates, gates):
        """This step's updates and gates to the ring."""
        refs = self.refs

        def put(t):
            row = self.update_row(self.next(t))
            self.store(refs.ring_u.at[row, self.values], updates[t].astype(self.sizes.dtype))

            @pl.when(self.split == 0)
            def _():
                refs.ring_g[row] = gates[t]

        self.for_tokens(put)

    def fold(self, decay):
        """The ring's tokens into the checkpoint, which begins on its way back."""
        if self.sizes.on_tensor_cores:
            self.fold_by_tensor_cores(decay)
        else:
            state = decay * self.load(self.refs.state, self.by_quarter)
            times = lax.div(self.length + FOLDED - 1, FOLDED)
            self.store(self.refs.state, lax.fori_loop(0, times, self.fold_some, state))
        plgpu.commit_smem()
        if self.sizes.on_tensor_cores:
            plgpu.copy_smem_to_gmem(self.refs.state, self.checkpoint())
            return
        for i in range(4):
            place, part = self.quarter(i)
            plgpu.copy_smem_to_gmem(part, place)
