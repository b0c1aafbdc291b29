"""Block of `gdn_replay`: some values of one head of one row.

Launches differ in two objects that the block holds: the state, in float32 (`StateInFloat32`) or in
16 bits (`StateOnTensorCores`), and the tokens, which are loaded (`LoadedTokens`) or computed from a
projection (`ConvTokens`).
"""

import dataclasses
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import layouts
from jaxspec.pallas.gpu.access import load, store
from jaxspec.pallas.norm import gated_norm_block
from jaxspec.pallas.norm.gated_norm import Gate
from jaxspec.pallas.recurrent.replay_block import RING_GROUP, ReplaySizes, RingBlock


class OutputNorm(NamedTuple):
    """Static part of a `GatedNorm` in a kernel."""

    first: int  # first column of the gates
    eps: float
    gate: Gate


@dataclasses.dataclass(frozen=True)
class GdnLaunch:
    sizes: ReplaySizes
    splits: int  # blocks that share a head's values
    conv_rows: int  # rows of the convolution's ring; 1 (all remainders are 0) if there is none
    norm: OutputNorm | None
    state: Any  # StateInFloat32 or StateOnTensorCores
    tokens: Any  # LoadedTokens or ConvTokens
    block: Any  # GdnReplayBlock or ChannelReplayBlock


class HeadPart(NamedTuple):
    """Values of a head that one block handles."""

    split: Any  # index among the head's blocks
    values: Any  # slice of the head's values


class LoadedTokens:
    """This step's tokens, if they are operands of the kernel (`GdnTokens`)."""

    def __init__(self, launch: GdnLaunch, ring: RingBlock, state: Any, part: HeadPart, smem: Any):
        """Load nothing yet; queries and keys will be copied to `state`."""
        self.width, self.gmem, self.smem = launch.sizes.width, ring.gmem, smem
        self.ring, self.state, self.part = ring, state, part

    def copies(self) -> list[tuple[Any, Any]]:
        """Return (source, target) of each copy to shared memory; float32 keys have two targets."""
        row, key_head, width = self.ring.table.row, self.ring.key_head, self.width
        targets = [(self.gmem.q, self.state.tokens, 0)]
        targets += [(self.gmem.k, target, first) for target, first in self.state.key_targets]
        return [
            (source.at[row, :, key_head], target.at[pl.ds(first, width)])
            for source, target, first in targets
        ]

    def finish(self) -> None:
        """Wait until all threads see queries, keys in the ring's precision, and `ring_decay`."""
        plgpu.barrier_wait(self.smem.tokens_produced)
        self.state.round_keys()
        self.ring.sync()

    def values(self) -> list[Any]:
        """Return the value of each token, in registers."""
        row, head = self.ring.table.row, self.ring.head
        values = [self.gmem.v.at[row, t, head, self.part.values] for t in range(self.width)]
        return [load(value, self.ring.by_value) for value in values]

    def gates(self) -> list[list[Any]]:
        """Return log decay and write strength of each token, as scalars."""
        row, head = self.ring.table.row, self.ring.head
        return [[x[row, t, head] for t in range(self.width)] for x in (self.gmem.g, self.gmem.beta)]


class GdnReplayBlock:
    """Computation of some values of one head of one row."""

    GATE_COPIES = 0  # of this step's gates

    def __init__(self, launch: GdnLaunch, gmem: Any, smem: Any):
        """`gmem` has references to operands, pools and output by name, `smem` to scratch."""
        self.launch, self.sizes, self.gmem, self.smem = launch, launch.sizes, gmem, smem
        row, head, split = (lax.axis_index(axis) for axis in ("row", "head", "split"))
        self.ring = RingBlock(self.sizes, gmem, launch.state.ring_tiles(smem), head, row)
        self.part = HeadPart(split, pl.ds(split * self.sizes.values, self.sizes.values))
        state_index = self.ring.pool_index * self.sizes.heads + head
        checkpoint = gmem.states.at[state_index, self.part.values]
        self.state = launch.state(self.ring, smem, checkpoint)

    def run(self) -> None:
        """Run the block; a padding row stores zeros."""
        self.ring.run(self._step, self.output)

    def _step(self):
        ring, state, smem, wait = self.ring, self.state, self.smem, plgpu.barrier_wait
        tokens = self.launch.tokens(self.launch, ring, state, self.part, smem)
        self.begin_copies(tokens.copies(), self._ring_gate)
        self._find_ring_decay()
        tokens.finish()
        self.append_keys()
        lax.fori_loop(0, ring.num_groups, lambda i, _: wait(smem.ring_produced.at[i]), None)
        has_ring = ring.table.ring_length > 0
        decay = jnp.where(has_ring, smem.ring_decay[0] * jnp.exp(smem.g[0]), 1.0)

        @pl.when(ring.folds)
        def _():
            wait(smem.state_produced)
            state.fold(decay)

        # Loaded only now, because a fold takes many registers.
        v = tokens.values()
        g, beta = tokens.gates()
        norm = self.launch.norm
        gates = self.load_output_gates(norm) if norm else []
        state.multiply_keys()

        @pl.when(jnp.logical_not(ring.folds))
        def _():
            wait(smem.state_produced)

        reads = state.multiply(jnp.where(ring.folds, 1.0, decay))
        updates = self._solve(reads, v, g, beta)
        self._append(updates, g)
        if norm:
            self.store_normed(norm, gates)

        @pl.when(ring.folds)
        def _():
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _ring_gate(self, j):
        """Return the log decay of a ring token, by age."""
        return self.gmem.ring_g[self.ring.update_index(self.ring.row_by_age(j))]

    def begin_copies(self, token_copies: list[tuple[Any, Any]], gate_of: Any = None) -> None:
        """Start all copies to shared memory: tokens, ring tokens that count, replay base.

        If the log decays of ring tokens are scalars, `gate_of(j)` returns them.

        The replay base is last, because copies that are needed earlier would wait for its bytes.
        Each warp issues some of the copies, because the address of one takes about 40 instructions.
        """
        ring, gmem, smem, copy = self.ring, self.gmem, self.smem, plgpu.copy_gmem_to_smem
        tiles, width = ring.tiles, self.sizes.width
        assert len(token_copies) <= 4, "each warp issues at most one of them"

        @plgpu.warp_map
        def _(warp):
            for i, (source, target) in enumerate(token_copies):

                @pl.when(warp == i)
                def _(source=source, target=target):
                    copy(source, target, smem.tokens_produced)

            # One token of each group per warp, so that four warps take a quarter of the time.
            groups = range(self.sizes.copied_tokens // RING_GROUP)
            ring_tokens = [RING_GROUP * i + warp for i in groups]
            gates = [gate_of(j) for j in ring_tokens] if gate_of else []

            def copy_token(i, _):
                j, produced = RING_GROUP * i + warp, smem.ring_produced.at[i]
                row = ring.row_by_age(j)
                index = ring.update_index(row)
                copy(gmem.ring_k.at[ring.key_index(row)], self.state.keys.at[width + j], produced)
                copy(gmem.ring_u.at[index, self.part.values], tiles.updates.at[j], produced)

            lax.fori_loop(0, ring.num_groups, copy_token, None)
            self.state.begin_load(warp)
            for j, gate in zip(ring_tokens, gates, strict=False):
                smem.g[j] = gate

    def _find_ring_decay(self):
        """Store the decay since each ring token, 0 for tokens that do not count."""
        self.ring.sync()
        after, counts = self.ring.sums_after(self.smem.g.at[pl.ds(0, self.sizes.square)])
        store(self.smem.ring_decay, jnp.where(counts, jnp.exp(after), 0.0))

    def append_keys(self) -> None:
        """Store this step's keys in the ring, in only one of the blocks that share them."""

        def append_key(t):
            key = load(self.state.keys.at[t], self.ring.by_key)
            row = self.ring.row_of_new(t)
            store(self.gmem.ring_k.at[self.ring.key_index(row)], key)

        self.ring.for_real_tokens(append_key, self.ring.leads_group() & (self.part.split == 0))

    def _solve(self, reads, v, g, beta):
        """Store this step's outputs and return its updates, one token after the other.

        `reads`: the state before the step times each query, then each key.
        """
        width, key_products = self.sizes.width, self.ring.tiles.key_products
        updates, outs = [], []
        for t in range(width):
            # decays[s]: the decay since token s; `whole`: since the state before this step.
            decays, total = [], jnp.float32(0)
            for s in range(t, -1, -1):
                decays.append(jnp.exp(total))
                total = total + g[s]
            decays, whole = decays[::-1], jnp.exp(total)
            recalled, out = whole * reads[width + t], whole * reads[t]
            for s in range(t):
                recalled += (decays[s] * key_products[s, width + t]) * updates[s]
            update = beta[t] * (v[t] - recalled)
            updates.append(update.astype(self.sizes.dtype).astype(jnp.float32))
            for s in range(t + 1):
                out += (decays[s] * key_products[s, t]) * updates[s]
            outs.append(out)
        self.store_outputs(outs)
        return updates

    def store_outputs(self, outs: list[Any]) -> None:
        for t, out in enumerate(outs):  # at the end: the compiler moves no load above a store
            store(self.smem.v_then_o.at[t] if self.launch.norm else self.output(t), out)

    def _append(self, updates, g):
        def append_token(t):
            index = self.ring.update_index(self.ring.row_of_new(t))
            update = self.gmem.ring_u.at[index, self.part.values]
            store(update, updates[t].astype(self.sizes.dtype))

            @pl.when(self.part.split == 0)
            def _():
                self.gmem.ring_g[index] = g[t]

        self.ring.for_real_tokens(append_token)

    def output(self, t: Any) -> Any:
        """Return the reference to the outputs of token `t`."""
        return self.gmem.out.at[self.ring.table.row, t, self.ring.head, self.part.values]

    def load_output_gates(self, norm: OutputNorm) -> list[Any]:
        """Load (gates, weight, layout) of the norm for each of the `pieces_of` the tokens."""
        gmem, sizes = self.gmem, self.sizes
        columns = pl.ds(norm.first + self.ring.head * sizes.values, sizes.values)
        pieces = []
        for start, count in layouts.pieces_of(sizes.width):
            layout = layouts.piece_layout(count, sizes.values, itemsize=4)
            tokens = pl.ds(self.ring.table.row * sizes.width + start, count)
            z = load(gmem.norm_gates.at[tokens, columns], layout)
            pieces.append((z, load(gmem.norm_weight, layout.reduce(0)), layout))
        return pieces

    def store_normed(self, norm: OutputNorm, pieces: list[Any]) -> None:
        """Normalise, gate and store the outputs; each head is within one warp."""
        width, row, head = self.sizes.width, self.ring.table.row, self.ring.head
        self.ring.sync()
        for (start, count), (z, weight, layout) in zip(
            layouts.pieces_of(width), pieces, strict=True
        ):
            tokens = pl.ds(start, count)
            o, out = self.smem.v_then_o.at[tokens], self.gmem.out.at[row, tokens, head]
            normed = gated_norm_block.in_kernel(layout, load(o, layout), z, weight, norm)
            store(out, normed.astype(out.dtype))
