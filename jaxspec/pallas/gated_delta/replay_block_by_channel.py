"""Block of `gdn_replay` for a decay by channel: some values of one head of one row.

The decay of a ring token multiplies its key, and the decay of the replay base its factors: with
`G` the sum of the ring's log decays from a token on, and `D` that of this step's tokens,

    S x = S_0 (e^{G_0} x') + sum_j (e^{G_j} k_j . x') u_j,    x' = e^{D} x

Each product of two tokens of this step has a decay of its own. A thread that sums or decays has one
channel; no exponent is a difference of sums.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.replay_block import GdnLaunch, GdnReplayBlock, LoadedTokens
from jaxspec.pallas.gated_delta.replay_block_16bit import STRIPES, rounded_and_rest
from jaxspec.pallas.gpu import layouts, tensor_cores
from jaxspec.pallas.gpu.access import load, load_untiled, store
from jaxspec.pallas.recurrent.replay_block import RING_GROUP, ReplaySizes, broadcast

_WGMMA = plgpu.Layout.WGMMA


class ChannelReplayBlock:
    """Computation of some values of one head of one row."""

    GATE_COPIES = 1

    @staticmethod
    def scratch(sizes: ReplaySizes) -> dict[str, Any]:
        """Return the shared memory of these blocks that those of other launches lack.

        With float32 states and steps of up to 4 tokens, two blocks share a multiprocessor.
        """
        # Log decays of this step, and the decay of the replay base in the last row. The rows
        # before and after the log decays are read but do not count.
        step_g = plgpu.SMEM((2 * sizes.width + 2, sizes.key_dim), jnp.float32)
        outputs = plgpu.SMEM((sizes.width, sizes.values), jnp.float32)
        # Two rows for each distance follow the products of keys: those of this step's keys with
        # its queries and with its keys, by token. Arrays of their own would take 1 KiB each.
        products = plgpu.SMEM((sizes.keys + 2 * sizes.width, sizes.columns), jnp.float32)
        scratch = {
            "step_g_then_o": plgpu.RefUnion(step_g, outputs),
            "key_products": products,
        }
        if sizes.dtype.itemsize == 2:
            scratch["decayed_keys"] = plgpu.SMEM((sizes.keys, sizes.key_dim), jnp.float32)
        return scratch

    def __init__(self, launch: GdnLaunch, gmem: Any, smem: Any):
        """`gmem` has references to operands, pools and output by name, `smem` to scratch."""
        self.step_g, smem.v_then_o = smem.step_g_then_o
        self.base_decay = self.step_g.at[2 * launch.sizes.width + 1]
        self.block = block = GdnReplayBlock(launch, gmem, smem)
        self.launch, self.sizes, self.gmem, self.smem = launch, launch.sizes, gmem, smem
        self.ring, self.state, self.part = block.ring, block.state, block.part
        self.is_16_bit = launch.sizes.dtype.itemsize == 2
        if self.is_16_bit:
            self.ring.tiles = self.ring.tiles._replace(keys=smem.decayed_keys)

    def run(self) -> None:
        """Run the block; a padding row stores zeros."""
        self.ring.run(self._step, self.block.output)

    def _step(self):
        block, ring, state, smem, wait = (
            self.block,
            self.ring,
            self.state,
            self.smem,
            plgpu.barrier_wait,
        )
        tokens = LoadedTokens(self.launch, ring, state, self.part, smem)
        block.begin_copies([*tokens.copies(), self._copy_of_gates()])
        ring_g = self._load_ring_gates()
        self._mark_ring_tokens()
        tokens.finish()
        width = self.sizes.width
        g = [load(self.step_g.at[width + t], ring.by_key) for t in range(width)]
        block.append_keys()
        self._multiply_step()
        lax.fori_loop(0, ring.num_groups, lambda i, _: wait(smem.ring_produced.at[i]), None)
        base = self._decay_ring_keys(ring_g)
        ring.sync()

        @pl.when(ring.folds)
        def _():
            wait(smem.state_produced)
            self._fold()

        v = tokens.values()
        beta = [self.gmem.beta[ring.table.row, t, ring.head] for t in range(width)]
        norm = self.launch.norm
        gates = block.load_output_gates(norm) if norm else []
        self._multiply_ring(g, jnp.where(ring.folds, 1.0, base))

        @pl.when(jnp.logical_not(ring.folds))
        def _():
            wait(smem.state_produced)

        updates = self._solve(state.multiply(1.0), v, beta)
        self._append(updates, g)
        if norm:
            block.store_normed(norm, gates)

        @pl.when(ring.folds)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _copy_of_gates(self):
        """Return (source, target) of this step's log decays."""
        width = self.sizes.width
        source = self.gmem.g.at[self.ring.table.row, :, self.ring.head]
        return source, self.step_g.at[pl.ds(width, width)]

    def _load_ring_gates(self):
        """Return the log decays of the ring's tokens by age, for all groups of the window.

        Those after the newest do not count, and may be NaN. They stay in registers: in shared
        memory, a multiprocessor would run fewer blocks (`scratch`).
        """
        ring = self.ring
        count = -(-self.sizes.window // RING_GROUP) * RING_GROUP
        indices = [ring.update_index(ring.row_by_age(j)) for j in range(count)]
        return [load(self.gmem.ring_g.at[index], ring.by_key) for index in indices]

    def _mark_ring_tokens(self):
        """Store 1 for each ring token that counts, else 0: the keys will have the decays."""
        layout = self.ring.by_token.reduce(1)
        index = plgpu.broadcasted_iota(jnp.int32, (self.sizes.square,), 0, layout=layout)
        store(self.smem.ring_decay, jnp.where(index < self.ring.table.ring_length, 1.0, 0.0))

    def _multiply_step(self):
        """Multiply this step's keys with its queries and keys, decayed by the tokens between.

        Row `d` of the products is for keys `d` tokens before. Mosaic stores no vector of a single
        element, so a piece of one token has the row after it as well.
        """
        width, tokens, products = self.sizes.width, self.state.tokens, self.smem.key_products
        for start, count in layouts.pieces_of(width):
            count = max(count, 2)
            layout = layouts.piece_layout(count, self.sizes.key_dim, itemsize=4)

            def rows(ref, first, count=count, layout=layout):
                return load(ref.at[pl.ds(first, count)], layout)

            factors = [rows(tokens, first + start) for first in (0, width)]
            total = jnp.zeros_like(factors[0])
            for distance in range(min(start + count, width)):
                if distance:
                    total += rows(self.step_g, width + start - distance + 1)
                key = rows(tokens, width + start - distance) * jnp.exp(total)
                for kind, factor in enumerate(factors):
                    row = self._row_of_products(distance, kind)
                    target = products.at[row, pl.ds(start, count)]
                    store(target, jnp.sum(key * factor, axis=1))

    def _row_of_products(self, distance, kind):
        """Return the row of products of this step's keys; `kind` 0: with queries, 1: with keys."""
        return self.sizes.keys + 2 * distance + kind

    def _decay_ring_keys(self, ring_g):
        """Multiply the ring's keys with their decays; return and store the replay base's."""
        width, by_key, length = self.sizes.width, self.ring.by_key, self.ring.table.ring_length
        total = plgpu.layout_cast(jnp.zeros(self.sizes.key_dim, jnp.float32), by_key)
        for first in reversed(range(0, len(ring_g), RING_GROUP)):
            # Loaded together, because the compiler moves no load above a store.
            group = range(first, first + RING_GROUP)
            keys = [load(self.state.keys.at[width + j], by_key).astype(jnp.float32) for j in group]
            for j, key in reversed(list(zip(group, keys, strict=True))):
                store(self.ring.tiles.keys.at[width + j], key * jnp.exp(total))
                total += jnp.where(j < length, ring_g[j], 0.0)
        base = jnp.exp(total)
        store(self.base_decay, base)
        return base

    def _multiply_ring(self, g, base):
        """Multiply the ring's keys with this step's tokens, decayed; multiply these with `base`."""
        width, tokens, by_key, ring = (
            self.sizes.width,
            self.state.tokens,
            self.ring.by_key,
            self.ring,
        )
        decayed, total = [load(tokens.at[row], by_key) for row in range(2 * width)], 0.0
        for t in range(width):
            total += g[t]
            decay = jnp.exp(total)
            for row in (t, width + t):
                decayed[row] *= decay
        for row, token in enumerate(decayed):
            store(tokens.at[row], token)
        ring.sync()
        ring.multiply_keys(tokens)
        ring.sync()
        for row, token in enumerate(decayed):
            store(tokens.at[row], token * base)
        ring.sync()
        if self.is_16_bit:
            self.state.store_factors()
            plgpu.commit_smem()  # tensor cores read the factors

    def _solve(self, reads, v, beta):
        """Store this step's outputs and return its updates, one token after the other.

        `reads`: the decayed state before the step times each query, then each key.
        """
        width, products, row = self.sizes.width, self.smem.key_products, self._row_of_products
        updates, outs = [], []
        for t in range(width):
            recalled, out = reads[width + t], reads[t]
            for s in range(t):
                recalled += products[row(t - s, 1), t] * updates[s]
            update = beta[t] * (v[t] - recalled)
            updates.append(update.astype(self.sizes.dtype).astype(jnp.float32))
            for s in range(t + 1):
                out += products[row(t - s, 0), t] * updates[s]
            outs.append(out)
        self.block.store_outputs(outs)
        return updates

    def _append(self, updates, g):
        def append_token(t):
            index = self.ring.update_index(self.ring.row_of_new(t))
            update = self.gmem.ring_u.at[index, self.part.values]
            store(update, updates[t].astype(self.sizes.dtype))

            @pl.when(self.part.split == 0)
            def _():
                store(self.gmem.ring_g.at[index], g[t])

        self.ring.for_real_tokens(append_token)

    def _fold(self):
        if self.is_16_bit:
            self._fold_16_bit()
        else:
            self.state.fold(self.state.load_quarters(self.base_decay))

    def _fold_16_bit(self):
        """Add the ring's tokens to the decayed replay base, and start storing it.

        Updates have 16 bits; the rounding errors of decayed keys are a second set of keys.
        """
        sizes, state = self.sizes, self.smem.state
        for values in (pl.ds(start, 64) for start in range(0, sizes.values, 64)):
            for columns in (pl.ds(start, 64) for start in range(0, sizes.key_dim, 64)):
                tile = state.at[values, columns]
                acc = load(tile, _WGMMA).astype(jnp.float32)
                decay = load(self.base_decay.at[columns], _WGMMA.reduce(0))
                acc = acc * broadcast(decay, acc.shape, 1, _WGMMA)
                for first in range(0, sizes.copied_tokens, 16):
                    update = self._counted_updates(values, first)
                    for keys in self._fold_keys(first, columns):
                        self.ring.sync()  # until all threads have read earlier keys
                        store(self.state.fold_keys.at[:, columns], keys)
                        plgpu.commit_smem()
                        keys = self.state.fold_keys.at[:, columns]
                        (acc,) = tensor_cores.accumulate(self.smem.spare, (acc, update, keys))
                store(tile, acc.astype(sizes.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(state, self.state.checkpoint)

    def _counted_updates(self, values, first):
        """Return updates `[values, 16]` of tokens from `first` on; 0 where none counts."""
        update = self.ring.tiles.updates.at[pl.ds(first, 16), values].transpose((1, 0))
        update = load(update, _WGMMA)
        index = plgpu.broadcasted_iota(jnp.int32, update.shape, 1, layout=_WGMMA)
        counts = index < self.ring.table.ring_length - first
        return jnp.where(counts, update, jnp.zeros((), update.dtype))

    def _fold_keys(self, first, columns):
        """Return the decayed keys of 16 tokens from `first` on, rounded, and their errors."""
        keys = self.smem.decayed_keys.at[pl.ds(self.sizes.width + first, 16), columns]
        keys = load_untiled(keys, STRIPES)
        index = plgpu.broadcasted_iota(jnp.int32, keys.shape, 0, layout=STRIPES)
        keys = jnp.where(index < self.ring.table.ring_length - first, keys, 0.0)
        return rounded_and_rest(keys, self.sizes.dtype)
