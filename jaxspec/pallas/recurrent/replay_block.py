"""What blocks of `gdn_replay_kernel` and `mamba2_replay_kernel` do alike.

Both have a state `[values, key_dim]` a head, to which each token adds an update times a key that
some heads share: `u` and `k` of the one, `x` and `B` of the other. A step asks for the state's
products with its factors: queries and keys of the one, C of the other.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device
from jaxspec.pallas.recurrent.replay import must_fold
from jaxspec.pallas.recurrent.replay_layouts import factor_layout, rows_layout

# Tokens of the ring at once, one a warp; those too many repeat the newest, and weigh 0.
TOGETHER = 4

COMPILER_PARAMS = plgpu.CompilerParams(
    # Barriers stand where one thread reads what another wrote.
    unsafe_no_auto_barriers=True,
    approx_math=True,
    reduction_scratch_bytes=0,  # no sum crosses warps
    # Every layout is named; to have them inferred takes three to ten times as long, or fails.
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def in_place(kernel, operands, *pools):
    """What `kernel` puts out, and the pools after it wrote into them; it sees them flat.

    They come behind the operands, of the axes of each the first four as one: all checkpoints, all
    rows of each of the ring's.
    """
    pools, tree = jax.tree.flatten(pools)
    refs = [jax.new_ref(x.reshape(-1, *x.shape[4:]), memory_space=plgpu.GMEM) for x in pools]
    out = kernel(*operands, *refs)
    after = [jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, pools, strict=True)]
    return out, *jax.tree.unflatten(tree, after)


@dataclasses.dataclass(frozen=True)
class ReplaySizes:
    """Of one call, and the shared memory that takes."""

    values: int  # of a head, those that one warpgroup has
    key_dim: int
    width: int
    rows: int  # of the ring
    heads: int
    key_heads: int
    slots: int
    dtype: Any  # of checkpoint and ring

    @property
    def window(self) -> int:
        """Ring tokens that a step reads at most, in full groups of 16."""
        return -(-(self.rows - self.width) // 16) * 16

    @property
    def square(self) -> int:
        """At least the window, and a power of two."""
        return 1 << (self.window - 1).bit_length()

    @property
    def keys(self) -> int:
        """This step's and the ring's, in full groups of 8."""
        return -(-(self.width + self.window) // 8) * 8

    @property
    def factors(self) -> int:
        """What a step multiplies states and keys with."""
        raise NotImplementedError

    @property
    def columns(self) -> int:
        """At least the factors, each a column of products."""
        return max(4, 1 << (self.factors - 1).bit_length())

    @property
    def group(self) -> int:
        """Heads that share a key."""
        return self.heads // self.key_heads


class ReplayBlock:
    """A warpgroup's work: some values of one head of one row.

    Those that derive from it add `step`, `out`, and what lies in shared memory.
    """

    keys: Any  # this step's, behind them the ring's
    products: Any  # the checkpoint's, values by factors
    updates: Any  # the ring's
    weights: Any  # of these, float32: how much of each is left by now

    def __init__(self, sizes, refs, row, head):
        """`refs`: everything in memory, by name. `row`: by the order of the blocks."""
        self.sizes, self.refs, self.head = sizes, refs, head
        self.load = access.load
        self.store = access.store
        asked = [refs.rows[i, row] for i in range(6)]
        self.row, self.slot, self.begin, self.length, self.count, self.conv_begin = asked
        self.layer = refs.layer[0]
        self.place = self.layer * sizes.slots + self.slot
        self.key_head = lax.div(head, sizes.group)
        self.groups = lax.div(self.length + TOGETHER - 1, TOGETHER)
        self.folds = must_fold(self.length, sizes.width, sizes.rows)
        self.left = jnp.where(self.folds, 0, self.groups)  # beside the checkpoint
        lanes = device.THREADS // sizes.values
        rows = rows_layout(sizes.values, lanes, min(4, sizes.columns // lanes))
        self.by_product: Any = rows
        self.by_value = rows.reduce(1)
        # Vectors as matrices of one column, since with a stride Mosaic takes none.
        self.by_column = rows_layout(sizes.values, lanes, 1, columns=1)
        self.by_key = rows_layout(sizes.key_dim, device.THREADS // sizes.key_dim, 1).reduce(1)
        lanes = device.THREADS // sizes.square
        self.by_token = rows_layout(sizes.square, lanes, min(4, sizes.square // lanes))
        self.by_factor = factor_layout(sizes.dtype.itemsize)

    def run(self):
        """All there is to do: nothing but zeros where a row is padding."""
        live = self.slot > 0
        # Always so. It has the compiler load all of these before it asks what the slot is, not
        # some of them behind that.
        for x in (self.row, self.layer, self.begin, self.length, self.count, self.conv_begin):
            live &= x >= 0

        @pl.when(live)
        def _():
            self.step()

        @pl.when(jnp.logical_not(live))
        def _():
            nothing = plgpu.layout_cast(jnp.zeros(self.sizes.values, jnp.float32), self.by_value)
            for t in range(self.sizes.width):
                self.store(self.out(t), nothing.astype(self.refs.out.dtype))

    def step(self):
        """A live row."""
        raise NotImplementedError

    def out(self, t):
        """Where what token `t` reads goes."""
        raise NotImplementedError

    def meet(self):
        """All that the block's threads wrote to shared memory is there for all of them."""
        plgpu.barrier_arrive(self.refs.met)
        plgpu.barrier_wait(self.refs.met)

    def spread(self, x, shape, axes, layout):
        """`x` along these axes of an array, the same along others."""
        axes = (axes,) if isinstance(axes, int) else axes
        return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)

    def ring_row(self, j):
        """The ring's row of token `j` by age; of what is younger than all, that of the newest."""
        at = self.begin - jnp.maximum(self.length - j, 1)
        return jnp.where(at < 0, at + self.sizes.rows, at)

    def next(self, t):
        """Where in the ring token `t` of this step goes."""
        at = self.begin + t
        return jnp.where(at >= self.sizes.rows, at - self.sizes.rows, at)

    def key_row(self, at):
        """Where row `at` of this ring lies in all keys."""
        return (self.place * self.sizes.rows + at) * self.sizes.key_heads + self.key_head

    def update_row(self, at):
        """So too in all updates, and in all of what decays them."""
        return (self.place * self.sizes.rows + at) * self.sizes.heads + self.head

    def sum_after(self, steps):
        """Of each of the ring's tokens, what those behind it sum to, and whether it counts."""
        shape, layout = (self.sizes.square,) * 2, self.by_token
        # A token's line has the steps of those behind it: sums, no differences.
        token, other = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in range(2)
        )
        steps = self.spread(self.load(steps, layout.reduce(0)), shape, 1, layout)
        steps = jnp.where(other < self.length, steps, 0.0)
        after = jnp.sum(jnp.where(token < other, steps, 0.0), axis=1)
        place = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
        return after, place < self.length

    def multiply_tokens(self, factors, turn: Any = 0, turns=1):
        """This step's keys, and the ring's, times each factor.

        `turn`: which 8 of every `turns` times 8 keys, where several warpgroups share them.
        """
        width, layout = self.sizes.width, self.by_factor
        shape = (8, 4, self.sizes.key_dim)
        fours = [pl.ds(start, 4) for start in range(0, self.sizes.factors, 4)]
        factors = [self.load(factors.at[four], layout.reduce(0)) for four in fours]
        factors = [self.spread(x.astype(jnp.float32), shape, (1, 2), layout) for x in factors]

        def some(i, _):
            rows = pl.ds((i * turns + turn) * 8, 8)
            keys = self.load(self.keys.at[rows], layout.reduce(1)).astype(jnp.float32)
            keys = self.spread(keys, shape, (0, 2), layout)
            for four, factor in zip(fours, factors, strict=True):
                self.store(self.refs.overlap.at[rows, four], jnp.sum(keys * factor, axis=2))

        # Also those too many that `replay` reads, where what nobody wrote may be NaN.
        eights = lax.div(width + self.left * TOGETHER + 7, 8)
        lax.fori_loop(0, lax.div(eights + turns - 1 - turn, turns), some, None)

    def replay(self, decay, sums, meet):
        """The state before this step times each factor, a line of values each.

        `sums`: the checkpoint's products, in registers. `meet`: waits until the warpgroup's threads
        have written.
        """
        width, layout = self.sizes.width, self.by_product

        def group(i, sums):
            for j in range(TOGETHER):
                j = i * TOGETHER + j
                update = self.load(self.updates.at[j], layout.reduce(1)).astype(jnp.float32)
                overlap = self.load(self.refs.overlap.at[width + j], layout.reduce(0))
                update = self.spread(update * self.weights[j], sums.shape, 0, layout)
                sums += update * self.spread(overlap, sums.shape, 1, layout)
            return sums

        self.store(self.products, lax.fori_loop(0, self.left, group, decay * sums))
        meet()
        columns = (self.products.at[:, pl.ds(x, 1)] for x in range(self.sizes.factors))
        return [jnp.sum(self.load(column, self.by_column), axis=1) for column in columns]
