"""Replay ring inside a kernel: the code that blocks of `gdn_replay` and `mamba2_replay` share.

In both families a head has a state `[values, key_dim]`, to which each token adds an update times a
key: `u k^T` in Gated DeltaNet, `dt x B^T` in Mamba2. Several heads may share their keys. A step
multiplies the state with its factors: queries and keys in Gated DeltaNet, C in Mamba2. The ring's
tokens contribute through the products of their keys with the factors.
"""

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu.access import load, load_untiled, store
from jaxspec.pallas.gpu.device import THREADS
from jaxspec.pallas.recurrent.replay import RowTable, must_fold

# Ring tokens that are copied and added together, one per warp. If the last group is not full, it
# repeats the newest token with a weight of 0.
RING_GROUP = 4

COMPILER_PARAMS = plgpu.CompilerParams(
    # Barriers are explicit wherever one thread reads what another wrote.
    unsafe_no_auto_barriers=True,
    approx_math=True,
    reduction_scratch_bytes=0,  # no reduction crosses warps
    # All layouts are explicit; inferring them takes three to ten times as long, or fails.
    lowering_semantics=plgpu.LoweringSemantics.Lane,
)


def in_place(kernel, operands, pools):
    """Run `kernel`, which writes the pytree `pools` in place; return its output and the pools.

    The pools are the last arguments, each with its first four axes flattened into one: layers,
    slots, candidates and heads of replay bases; layers, slots, rows and heads of a ring.
    """
    arrays, tree = jax.tree.flatten(pools)
    flat = [x.reshape(math.prod(x.shape[:4]), *x.shape[4:]) for x in arrays]
    refs = [jax.new_ref(x, memory_space=plgpu.GMEM) for x in flat]
    out = kernel(*operands, *refs)
    after = [jax.freeze(ref).reshape(x.shape) for ref, x in zip(refs, arrays, strict=True)]
    return out, jax.tree.unflatten(tree, after)


@dataclasses.dataclass(frozen=True)
class ReplaySizes:
    """Sizes of a launch that determine shared memory and layouts in both families."""

    values: int  # rows of a head's state per warpgroup
    key_dim: int
    width: int
    factors: int  # vectors that the state and the keys are multiplied with
    window: int  # tokens that the ring keeps between steps
    ring_rows: int
    heads: int
    key_heads: int
    slots: int
    dtype: Any  # dtype of replay bases and ring
    min_columns: int = 4

    @property
    def copied_tokens(self) -> int:
        """Ring tokens that fit in shared memory: the window, rounded up to a multiple of 16."""
        return -(-self.window // 16) * 16

    @property
    def square(self) -> int:
        """Side of the square matrix in `RingBlock.sums_after`: a power of two."""
        return 1 << (self.copied_tokens - 1).bit_length()

    @property
    def keys(self) -> int:
        """Keys of the step and of the ring, rounded up to a multiple of 8."""
        return -(-(self.width + self.copied_tokens) // 8) * 8

    @property
    def columns(self) -> int:
        """Columns of the products with the factors: a power of two."""
        return max(self.min_columns, 1 << (self.factors - 1).bit_length())

    @property
    def group(self) -> int:
        """Heads that share a key."""
        return self.heads // self.key_heads


class RingTiles(NamedTuple):
    """Shared memory from which one head's ring is replayed; tokens by age, the oldest first.

    `keys` and `key_products` have the step's tokens first, then the ring's.
    """

    keys: Any
    updates: Any  # updates of the ring
    ring_decay: Any  # float32, current factor of each update of the ring
    key_products: Any  # float32, one row per key, one column per factor
    barrier: Any  # all threads that read or write these arrive at it


class RingBlock:
    """Ring of one head of one row: indices of its tokens, and their part of the products."""

    def __init__(self, sizes: ReplaySizes, gmem: Any, tiles: RingTiles, head: Any, block: Any):
        """Read the row table at column `block`; `gmem` has references to operands and pools."""
        self.sizes, self.gmem, self.tiles, self.head = sizes, gmem, tiles, head
        self.table = RowTable.read(gmem.row_table, block)
        self.layer = gmem.layer[0]
        self.pool_index = self.layer * sizes.slots + self.table.slot
        self.key_head = lax.div(head, sizes.group)
        self.num_groups = lax.div(self.table.ring_length + RING_GROUP - 1, RING_GROUP)
        self.folds = must_fold(self.table.ring_length, sizes.width, sizes.window)
        self.num_replayed_groups = jnp.where(self.folds, 0, self.num_groups)
        self.by_product = product_layout(sizes)
        self.by_value = self.by_product.reduce(1)
        # Vectors as matrices of one column, because Mosaic loads no strided vectors.
        self.by_column = _rows_layout(sizes.values, THREADS // sizes.values, 1, columns=1)
        self.by_key = _rows_layout(sizes.key_dim, THREADS // sizes.key_dim, 1).reduce(1)
        lanes = THREADS // sizes.square
        self.by_token = _rows_layout(sizes.square, lanes, min(4, sizes.square // lanes))

    def run(self, step, output) -> None:
        """Call `step()` for a live row; for padding, write zeros to `output(t)` of each token."""
        table = self.table
        live = table.slot > 0
        # Always true. Without it, the compiler delays some of these loads until it has the slot.
        for scalar in (table.row, self.layer, *table[2:]):
            live &= scalar >= 0

        pl.when(live)(step)

        @pl.when(jnp.logical_not(live))
        def _():
            zeros = plgpu.layout_cast(jnp.zeros(self.sizes.values, jnp.float32), self.by_value)
            for t in range(self.sizes.width):
                store(output(t), zeros.astype(self.gmem.out.dtype))

    def sync(self) -> None:
        """Wait at the barrier for all threads, so that each sees the writes of the others."""
        plgpu.barrier_arrive(self.tiles.barrier)
        plgpu.barrier_wait(self.tiles.barrier)

    def leads_group(self) -> Any:
        """Return whether this head is the first of those that share a key: it writes that key."""
        return lax.rem(self.head, self.sizes.group) == 0

    def for_real_tokens(self, act: Any, condition: Any = True) -> None:
        """Call `act(t)` for each real token of the step if `condition` holds.

        A row without padding, the common case, runs all tokens without a branch for each.
        """
        width, num_tokens = self.sizes.width, self.table.num_tokens

        @pl.when(condition & (num_tokens == width))
        def _():
            for t in range(width):
                act(t)

        @pl.when(condition & (num_tokens < width))
        def _():
            for t in range(width - 1):
                pl.when(t < num_tokens)(functools.partial(act, t))

    def row_by_age(self, j: Any) -> Any:
        """Return the ring row of token `j`, 0 being the oldest; the newest's for any larger `j`."""
        row = self.table.ring_start - jnp.maximum(self.table.ring_length - j, 1)
        return jnp.where(row < 0, row + self.sizes.ring_rows, row)

    def row_of_new(self, t: Any) -> Any:
        """Return the ring row of token `t` of this step."""
        row = self.table.ring_start + t
        return jnp.where(row >= self.sizes.ring_rows, row - self.sizes.ring_rows, row)

    def key_index(self, row: Any) -> Any:
        """Return the index of a row's key in the flattened pool of keys."""
        row = self.pool_index * self.sizes.ring_rows + row
        return row * self.sizes.key_heads + self.key_head

    def update_index(self, row: Any) -> Any:
        """Return the index of a row's update, and of its decay, in their flattened pools."""
        row = self.pool_index * self.sizes.ring_rows + row
        return row * self.sizes.heads + self.head

    def sums_after(self, steps: Any) -> tuple[Any, Any]:
        """Return for each ring token the sum of `steps` after it, and whether the token counts.

        `steps` are `sizes.square` float32 numbers in shared memory. The sums are those of
        `replay.sums_after`.
        """
        shape, layout = (self.sizes.square,) * 2, self.by_token
        # Each row holds the steps after its token: sums, because differences of sums lose digits.
        token, later = (
            plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in range(2)
        )
        steps = broadcast(load(steps, layout.reduce(0)), shape, 1, layout)
        steps = jnp.where(later < self.table.ring_length, steps, 0.0)
        after = jnp.sum(jnp.where(token < later, steps, 0.0), axis=1)
        index = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=layout.reduce(1))
        return after, index < self.table.ring_length

    def multiply_keys(self, factors: Any, warpgroup: Any = 0, warpgroups: int = 1) -> None:
        """Multiply the keys of the step and of the ring with each factor, into `key_products`.

        `factors`: in shared memory, one per row. Of several warpgroups, each takes every
        `warpgroups`-th group of 8 keys.
        """
        tiles, layout = self.tiles, _factor_layout(self.tiles.keys.dtype.itemsize)
        shape = (8, 4, self.sizes.key_dim)
        fours = [pl.ds(start, 4) for start in range(0, self.sizes.factors, 4)]
        factors = [load_untiled(factors.at[four], layout.reduce(0)) for four in fours]
        factors = [broadcast(x.astype(jnp.float32), shape, (1, 2), layout) for x in factors]

        def multiply_eight(i, _):
            rows = pl.ds((i * warpgroups + warpgroup) * 8, 8)
            keys = load(tiles.keys.at[rows], layout.reduce(1)).astype(jnp.float32)
            keys = broadcast(keys, shape, (0, 2), layout)
            for four, factor in zip(fours, factors, strict=True):
                store(tiles.key_products.at[rows, four], jnp.sum(keys * factor, axis=2))

        # Rounded up to a full group of the ring: `replay` reads all rows of a group, and rows that
        # no thread wrote may be NaN.
        eights = lax.div(self.sizes.width + self.num_replayed_groups * RING_GROUP + 7, 8)
        steps = lax.div(eights + warpgroups - 1 - warpgroup, warpgroups)
        lax.fori_loop(0, steps, multiply_eight, None)

    def replay(self, decay: Any, sums: Any, products: Any, layout: Any, sync) -> list[Any]:
        """Return the state before this step times each factor: one vector of values per factor.

        `sums`: products of the replay base `[values, columns]`, in registers of `layout`; they are
        multiplied by `decay`. `products`: shared memory for the results. `sync()` waits until the
        threads of the warpgroup have written.
        """
        width, tiles = self.sizes.width, self.tiles

        def add_group(i, sums):
            for j in range(RING_GROUP):
                j = i * RING_GROUP + j
                update = load(tiles.updates.at[j], layout.reduce(1)).astype(jnp.float32)
                key_products = load(tiles.key_products.at[width + j], layout.reduce(0))
                update = broadcast(update * tiles.ring_decay[j], sums.shape, 0, layout)
                sums += update * broadcast(key_products, sums.shape, 1, layout)
            return sums

        store(products, lax.fori_loop(0, self.num_replayed_groups, add_group, decay * sums))
        sync()
        columns = (products.at[:, pl.ds(x, 1)] for x in range(self.sizes.factors))
        return [jnp.sum(load(column, self.by_column), axis=1) for column in columns]


def broadcast(x: Any, shape: tuple[int, ...], axes: int | tuple[int, ...], layout: Any) -> Any:
    """Broadcast `x`, which has these axes of `shape`, to `shape`, in registers of `layout`."""
    axes = (axes,) if isinstance(axes, int) else axes
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, axes), layout)


def product_layout(sizes: ReplaySizes) -> Any:
    """Return the register layout of a state's products `[values, columns]`."""
    lanes = THREADS // sizes.values
    return _rows_layout(sizes.values, lanes, min(4, sizes.columns // lanes))


def _rows_layout(rows, lanes, vector, columns=None):
    """Register layout of a matrix: each row is spread over `lanes`, `vector` neighbours per lane.

    Neighbouring lanes hold neighbouring rows. With `columns=1` the matrix is one column, replicated
    in all `lanes` of a row.
    """
    width = columns or lanes * vector
    lane_dim = plgpu.Replicated(lanes) if columns == 1 else -3
    return plgpu.Layout.TILED(
        plgpu.Tiling(((rows, width), (rows // 4, vector))),
        warp_dims=(-4,),
        lane_dims=(-2,) if lanes == 1 else (lane_dim, -2),
        vector_dim=-1,
    )


def _factor_layout(itemsize):
    """Register layout of `[8 keys, 4 factors, key_dim]`: one factor per warp.

    8 lanes share a key, 128 bytes of it at a time.
    """
    vector = 16 // itemsize
    return plgpu.Layout.TILED(
        plgpu.Tiling(((4, 4, 8 * vector), (vector,))),
        warp_dims=(-3,),
        lane_dims=(-4, -2),
        vector_dim=-1,
    )
