"""`gdn_replay` on a Hopper GPU.

A block has one value head of one row, and each of its two warpgroups half of that head's values.
With `S_0` the checkpoint, `k_j, u_j` the ring's tokens and `x` one of this step's queries and keys,
the state before this step gives

    S x = exp(G_P) S_0 x + sum_j (k_j . x) exp(G_P - G_j) u_j

so a checkpoint is read once, for all `x` together, and written only by rows that fold. It comes
into shared memory while the ring's tokens are read and their products with every `x` computed.
What then is left to do for one value needs nothing of the others.
"""

import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from jaxspec.pallas import mosaic
from jaxspec.pallas.replay import must_fold

HEAD = 128  # values, and keys, of a head
_PARTS = 2  # warpgroups of a block
_VALUES = HEAD // _PARTS


@functools.partial(jax.jit, static_argnames="interpret")
def gdn_replay_kernel(
    q, k, v, g, beta, states, ring, layer, slots, num_computed, ring_length, query_len, *,
    interpret=None,
):  # fmt: skip
    """`gdn_replay` with `layer` on the device. `interpret`: parameters of Mosaic's interpreter."""
    from jax.experimental.pallas import mosaic_gpu as plgpu

    width, group = q.shape[1], states.shape[3] // q.shape[2]
    _, num_slots, rows_in_ring, _, _ = ring.k.shape
    sizes = _Sizes(width, rows_in_ring, group, num_slots, states.dtype)
    scratch = {
        "state": plgpu.SMEM((_PARTS, _VALUES, HEAD), states.dtype, transforms=_tiles(plgpu, sizes)),
        "tokens": plgpu.SMEM((sizes.tokens, HEAD), jnp.float32),
        "updates": plgpu.SMEM((sizes.window, HEAD), jnp.float32),
        "overlap": plgpu.SMEM((sizes.tokens, sizes.columns), jnp.float32),
        "turned": plgpu.SMEM((_PARTS, _VALUES, sizes.turned), jnp.float32),
        "state_came": plgpu.Barrier(num_barriers=_PARTS),
        "tokens_came": plgpu.Barrier(num_arrivals=2),
        "tokens_ready": plgpu.Barrier(num_arrivals=_PARTS),
        "overlap_ready": plgpu.Barrier(num_arrivals=_PARTS),
    }
    if sizes.on_tensor_cores:
        shape = (_PARTS, 2 * sizes.padded, HEAD)
        scratch["factors"] = plgpu.SMEM(shape, states.dtype, transforms=_tiles(plgpu, sizes))

    names = (
        *("q", "k", "v", "g", "beta", "layer", "slots", "num_computed", "ring_length"),
        *("query_len", "states", "ring_k", "ring_u", "ring_g", "out"),
    )

    def body(*refs, **scratch):
        refs = types.SimpleNamespace(**dict(zip(names, refs, strict=True)), **scratch)
        _Block(plgpu, sizes, refs).run()

    kernel = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct(v.shape, jnp.float32),
        scratch_types=scratch,
        grid=(q.shape[0], states.shape[3]),
        grid_names=("row", "head"),
        num_threads=_PARTS,
        thread_name="part",
        # Barriers are where one thread reads what another wrote.
        compiler_params=plgpu.CompilerParams(unsafe_no_auto_barriers=True, approx_math=True, lowering_semantics=plgpu.LoweringSemantics.Lane),
        **({} if interpret is None else {"interpret": interpret}),
    )
    pools = (states, ring.k, ring.u, ring.g)
    in_place = [jax.new_ref(_flat(x), memory_space=plgpu.GMEM) for x in pools]
    index = layer[None], slots, num_computed, ring_length, query_len
    out = kernel(q, k, v, g, beta, *index, *in_place)
    states, *rings = (
        jax.freeze(ref).reshape(x.shape) for ref, x in zip(in_place, pools, strict=True)
    )
    return out, states, type(ring)(*rings)


def _flat(pool):
    """Layers and slots as one axis, and a state's candidate, of which there is one, as none."""
    if pool.ndim == 6:
        layers, slots, _, heads, values, keys = pool.shape
        return pool.reshape(layers * slots, heads * values, keys)
    return pool.reshape(-1, *pool.shape[2:])


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Of one call, and the shared memory that takes."""

    width: int
    rows: int  # of the ring
    group: int  # value heads that share a key head
    slots: int
    dtype: Any  # of checkpoint and ring

    @property
    def on_tensor_cores(self) -> bool:
        return self.dtype.itemsize == 2

    @property
    def window(self) -> int:
        """Ring tokens that a step reads at most, in full groups of 8."""
        return -(-(self.rows - self.width) // 8) * 8

    @property
    def columns(self) -> int:
        """At least the queries and keys, each a column of products."""
        return max(4, 1 << (2 * self.width - 1).bit_length())

    @property
    def padded(self) -> int:
        """Columns in full groups of 8."""
        return max(8, self.columns)

    @property
    def tokens(self) -> int:
        """Rows of queries, of keys and of the ring's keys, in groups of 8 from the first key."""
        return max(self.width + -(-(self.width + self.window) // 8) * 8, self.padded)

    @property
    def turned(self) -> int:
        """Columns, and some more that spread a column over the banks."""
        return (2 * self.padded if self.on_tensor_cores else self.columns) + 8


def _tiles(plgpu, sizes):
    """How tensor cores want a matrix in shared memory; free of conflicts for others too."""
    return (
        plgpu.TilingTransform((8, 128 // sizes.dtype.itemsize)),
        plgpu.SwizzleTransform(128),
    )


class _Block:
    """What one warpgroup does. `refs`: everything in memory, by name."""

    def __init__(self, plgpu, sizes, refs):
        from jax.experimental import pallas as pl

        self.pl, self.plgpu, self.sizes, self.refs = pl, plgpu, sizes, refs
        self.load = functools.partial(mosaic.load, plgpu)
        self.store = functools.partial(mosaic.store, plgpu)
        self.row, self.head, self.part = (lax.axis_index(x) for x in ("row", "head", "part"))
        self.key_head = lax.div(self.head, sizes.group)
        self.values = pl.ds(self.part * _VALUES, _VALUES)
        # Two lanes a value, each with half of the columns of a tile.
        itemsize, tiled = sizes.dtype.itemsize, plgpu.Layout.TILED
        across = 128 // itemsize
        self.tile = tiled(
            plgpu.Tiling(((_VALUES, across), (_VALUES // 4, across // 2), (16 // itemsize,))),
            warp_dims=(-5,), lane_dims=(-4, -3), vector_dim=-1,
        )  # fmt: skip
        self.line = self.tile.reduce(1)
        vector = min(4, sizes.columns // 2)
        self.products = tiled(
            plgpu.Tiling(((_VALUES, 2 * vector), (_VALUES // 4, vector))),
            warp_dims=(-4,), lane_dims=(-3, -2), vector_dim=-1,
        )  # fmt: skip
        # 16 lanes a token.
        self.eight = tiled(
            plgpu.Tiling(((8, 64), (2, 64), (4,))),
            warp_dims=(-5,), lane_dims=(-3, -2), vector_dim=-1,
        )  # fmt: skip
        self.key = mosaic.vectors(plgpu, 1)
        # As a line and as eight, of a matrix with one column: Mosaic takes no vector with a stride.
        self.column = tiled(
            plgpu.Tiling(((_VALUES, 1), (_VALUES // 4, 1))),
            warp_dims=(-4,), lane_dims=(plgpu.Replicated(2), -2), vector_dim=-1,
        )  # fmt: skip
        self.eight_rows = tiled(
            plgpu.Tiling(((8, 1), (2, 1))),
            warp_dims=(-4,), lane_dims=(-2, plgpu.Replicated(16)), vector_dim=-1,
        )  # fmt: skip

    def spread(self, x, shape, axis, layout):
        """`x` along `axis` of a matrix, the same everywhere else."""
        return self.plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)

    def run(self):
        refs, pl = self.refs, self.pl
        slot, self.count = refs.slots[self.row], refs.query_len[self.row]
        live = (slot > 0) & (slot < self.sizes.slots) & (self.count > 0)
        self.place = refs.layer[0] * self.sizes.slots + slot

        @pl.when(live)
        def _():
            self.step()

        @pl.when(jnp.logical_not(live))
        def _():
            nothing = self.plgpu.layout_cast(jnp.zeros(_VALUES, jnp.float32), self.line)
            for t in range(self.sizes.width):
                self.store(refs.out.at[self.row, t, self.head, self.values], nothing)

    def step(self):
        """A live row."""
        refs, sizes, width = self.refs, self.sizes, self.sizes.width
        self.fetch()
        self.length = jnp.clip(refs.ring_length[self.row], 0, sizes.rows - width)
        self.begin = lax.rem(jnp.maximum(refs.num_computed[self.row], 0), sizes.rows)
        decay = self.read_ring()
        new = [self.load(refs.v.at[self.row, t, self.head, self.values], self.line)
               for t in range(width)]  # fmt: skip
        gates = [refs.g[self.row, t, self.head] for t in range(width)]
        betas = [refs.beta[self.row, t, self.head] for t in range(width)]
        self.round_keys()
        self.meet(refs.tokens_ready)
        self.multiply_tokens()
        self.plgpu.barrier_arrive(refs.overlap_ready)
        self.plgpu.barrier_wait(refs.state_came.at[self.part])
        if sizes.on_tensor_cores:
            read = self.multiply_state_by_tensor_cores()
        else:
            read = self.multiply_state()
        self.plgpu.barrier_wait(refs.overlap_ready)
        replayed = self.replay()
        read = [decay * x + y for x, y in zip(read, replayed, strict=True)]
        self.solve(read, new, gates, betas)
        self.append_tokens(gates)

        @self.pl.when(must_fold(self.length, width, sizes.rows))
        def _():
            self.fold(decay)

    def meet(self, barrier):
        """Both warpgroups' writes to shared memory are there for both."""
        self.plgpu.barrier_arrive(barrier)
        self.plgpu.barrier_wait(barrier)

    def fetch(self):
        """Begin to copy the checkpoint, and this step's queries and keys."""
        refs, pl, width, copy = self.refs, self.pl, self.sizes.width, self.plgpu.copy_gmem_to_smem
        copy(self.checkpoint(), refs.state.at[self.part], refs.state_came.at[self.part])
        for part, x in enumerate((refs.q, refs.k)):

            @pl.when(self.part == part)
            def _(part=part, x=x):
                to = refs.tokens.at[pl.ds(part * width, width)]
                copy(x.at[self.row, :, self.key_head], to, refs.tokens_came)

    def checkpoint(self):
        start = self.head * HEAD + self.part * _VALUES
        return self.refs.states.at[self.place, self.pl.ds(start, _VALUES)]

    def read_ring(self):
        """Keys, and decayed updates, to shared memory by age; returns the decay of them all."""
        refs, sizes = self.refs, self.sizes

        def place(j):
            # Rows beyond the length stand for the newest one, which no block writes.
            at = self.begin - jnp.maximum(self.length - j, 1)
            return jnp.where(at < 0, at + sizes.rows, at)

        def counts(j, x):
            if not x.ndim:
                return jnp.where(j < self.length, x, jnp.zeros((), x.dtype))
            nothing = jnp.zeros(x.shape, x.dtype)
            return jnp.where(jnp.broadcast_to(j < self.length, x.shape), x, nothing)

        every = range(sizes.window)
        mine = [i * _PARTS + self.part for i in range(sizes.window // _PARTS)]
        keys = [self.load(refs.ring_k.at[self.place, place(j), self.key_head], self.key)
                for j in mine]  # fmt: skip
        updates = [self.load(refs.ring_u.at[self.place, place(j), self.head, self.values],
                             self.line) for j in every]  # fmt: skip
        gates = [refs.ring_g[self.place, place(j), self.head] for j in every]
        for j, key in zip(mine, keys, strict=True):
            self.store(refs.tokens.at[2 * sizes.width + j], counts(j, key.astype(jnp.float32)))
        after = jnp.float32(0)
        # From the newest on: sums of what came after each, no differences.
        for j in reversed(every):
            update = counts(j, updates[j].astype(jnp.float32)) * jnp.exp(after)
            self.store(refs.updates.at[j, self.values], update)
            after = after + counts(j, gates[j])
        return jnp.exp(after)

    def round_keys(self):
        """This step's keys as the ring will hold them; into it, by one head of each group."""
        refs, sizes, pl = self.refs, self.sizes, self.pl
        self.plgpu.barrier_wait(refs.tokens_came)
        for i in range(-(-sizes.width // _PARTS)):
            t = i * _PARTS + self.part

            @pl.when(t < sizes.width)
            def _(t=t):
                key = self.load(refs.tokens.at[sizes.width + t], self.key).astype(sizes.dtype)
                if sizes.on_tensor_cores:
                    self.store(refs.tokens.at[sizes.width + t], key.astype(jnp.float32))

                @pl.when((t < self.count) & (lax.rem(self.head, sizes.group) == 0))
                def _():
                    self.store(refs.ring_k.at[self.place, self.next(t), self.key_head], key)

    def next(self, t):
        """The ring's row for token `t`."""
        at = self.begin + t
        return jnp.where(at >= self.sizes.rows, at - self.sizes.rows, at)

    def multiply_tokens(self):
        """Products of keys, this step's and then the ring's, with this step's queries and keys."""
        refs, pl, width = self.refs, self.pl, self.sizes.width
        factors = [self.load(refs.tokens.at[x], self.eight.reduce(0)) for x in range(2 * width)]

        def some(i, _):
            rows = pl.ds((i * _PARTS + self.part) * 8, 8)
            keys = self.load(refs.tokens.at[pl.ds(width + (i * _PARTS + self.part) * 8, 8)],
                             self.eight)  # fmt: skip
            for x, factor in enumerate(factors):
                product = jnp.sum(keys * self.spread(factor, (8, HEAD), 1, self.eight), axis=1)
                product = self.spread(product, (8, 1), 0, self.eight_rows)
                self.store(refs.overlap.at[rows, pl.ds(x, 1)], product)

        # Up to a full group of 4 ring tokens, as `replay` reads them.
        needed = lax.div(width + lax.div(self.length + 3, 4) * 4 + 7, 8)
        lax.fori_loop(0, lax.div(needed - self.part + _PARTS - 1, _PARTS), some, None)

    def multiply_state(self):
        """The checkpoint times each query and key, a line of values each."""
        refs, across = self.refs, 128 // self.sizes.dtype.itemsize
        lines = [None] * (2 * self.sizes.width)
        for start in range(0, HEAD, across):
            columns = self.pl.ds(start, across)
            state = self.load(refs.state.at[self.part, :, columns], self.tile)
            for x in range(len(lines)):
                factor = self.load(refs.tokens.at[x, columns], self.tile.reduce(0))
                sums = jnp.sum(state * self.spread(factor, state.shape, 1, self.tile), axis=1)
                lines[x] = sums if lines[x] is None else lines[x] + sums
        return lines

    def multiply_state_by_tensor_cores(self):
        """So too; what 16 bits lose of a factor is another one."""
        refs, sizes, plgpu = self.refs, self.sizes, self.plgpu
        factors, padded = refs.factors.at[self.part], sizes.padded
        for start in range(0, padded, 8):
            exact = self.load(refs.tokens.at[self.pl.ds(start, 8)], self.eight)
            most = exact.astype(sizes.dtype)
            rest = (exact - most.astype(jnp.float32)).astype(sizes.dtype)
            self.store(factors.at[self.pl.ds(start, 8)], most)
            self.store(factors.at[self.pl.ds(padded + start, 8)], rest)
        plgpu.commit_smem()

        def multiply(sums):
            plgpu.wgmma(sums, refs.state.at[self.part], factors.transpose((1, 0)))
            return sums[...]

        sums = self.pl.run_scoped(multiply, plgpu.ACC((_VALUES, 2 * padded), jnp.float32))
        turned = refs.turned.at[self.part]
        self.store(turned.at[:, self.pl.ds(0, 2 * padded)], sums)
        plgpu.commit_smem()
        lines = [
            self.column_of(turned, x) + self.column_of(turned, padded + x)
            for x in range(2 * sizes.width)
        ]
        plgpu.commit_smem()
        return lines

    def replay(self):
        """What the ring adds to each of these lines."""
        refs, sizes = self.refs, self.sizes
        shape = (_VALUES, sizes.columns)

        def four(i, sums):
            for j in range(4):
                update = self.load(refs.updates.at[i * 4 + j, self.values], self.products.reduce(1))
                row = refs.overlap.at[sizes.width + i * 4 + j]
                overlap = self.load(row, self.products.reduce(0))
                sums += self.spread(update, shape, 0, self.products) * self.spread(
                    overlap, shape, 1, self.products
                )
            return sums

        nothing = self.plgpu.layout_cast(jnp.zeros(shape, jnp.float32), self.products)
        sums = lax.fori_loop(0, lax.div(self.length + 3, 4), four, nothing)
        turned = refs.turned.at[self.part]
        self.store(turned.at[:, self.pl.ds(0, sizes.columns)], sums)
        self.plgpu.commit_smem()
        return [self.column_of(turned, x) for x in range(2 * sizes.width)]

    def column_of(self, ref, x):
        return jnp.sum(self.load(ref.at[:, self.pl.ds(x, 1)], self.column), axis=1)

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
        self.new_updates = updates

    def append_tokens(self, gates):
        """This step's updates and gates to the ring."""
        refs = self.refs
        for t, update in enumerate(self.new_updates):

            @self.pl.when(t < self.count)
            def _(t=t, update=update):
                row = self.place, self.next(t), self.head
                self.store(refs.ring_u.at[*row, self.values], update.astype(self.sizes.dtype))

                @self.pl.when(self.part == 0)
                def _():
                    refs.ring_g[*row] = gates[t]

    def fold(self, decay):
        """The ring's tokens into the checkpoint."""
        refs, sizes, plgpu = self.refs, self.sizes, self.plgpu
        across = 128 // sizes.dtype.itemsize
        for start in range(0, HEAD, across):
            columns = self.pl.ds(start, across)
            tile = refs.state.at[self.part, :, columns]

            def add(j, state):
                update = self.load(refs.updates.at[j, self.values], self.line)
                key = self.load(refs.tokens.at[2 * sizes.width + j, columns], self.tile.reduce(0))
                return state + self.spread(update, state.shape, 0, self.tile) * self.spread(
                    key, state.shape, 1, self.tile
                )

            state = decay * self.load(tile, self.tile).astype(jnp.float32)
            state = lax.fori_loop(0, self.length, add, state)
            self.store(tile, state.astype(sizes.dtype))
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(refs.state.at[self.part], self.checkpoint())
        plgpu.wait_smem_to_gmem(0)
