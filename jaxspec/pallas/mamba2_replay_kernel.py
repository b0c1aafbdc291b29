"""`mamba2_replay` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block has one head of one row. While the checkpoint, for which its time goes, is on the way to
shared memory, it goes over the tokens since then, the newest first, and sums with one warp for
each token `t` that reads

    sum_j exp(A (T_t - T_j)) dt_j (B_j . C_t) x_j

where `T_t - T_j` grows from token to token: no difference is taken, and none is positive. What the
checkpoint contributes, `exp(A T_t) S_0 C_t`, comes last. A block that folds has the ring's tokens
in the checkpoint by then, and only its new ones in the sum.
"""

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas import mosaic
from jaxspec.pallas.replay import must_fold

_CHUNK = 8  # tokens of the ring fetched at once: 56 registers, and one wait for the memory
_FOLD = 4  # tokens folded between two looks at the loop's counter
_ROWS = 32  # of the checkpoint in registers at once; 64 would leave room for 3 blocks, not 4

_load, _store = functools.partial(mosaic.load, plgpu), functools.partial(mosaic.store, plgpu)


@functools.partial(jax.jit, static_argnames="interpret")
def replay(
    x, dt, a, b, c, d, states, ring, layer, slots, num_computed, ring_length, query_len,
    *, interpret=None,
):  # fmt: skip
    """`mamba2_replay` with `layer` on the device, so that all layers share one kernel.

    `interpret`: parameters of Mosaic's interpreter.
    """
    _, num_slots, _, heads, head_dim, state_dim = states.shape
    rows, width, groups, _ = b.shape
    sizes = _Sizes(width, num_slots, heads // groups, head_dim, state_dim, ring.x.shape[2])
    kernel = plgpu.kernel(
        functools.partial(_body, sizes),
        kernel_name="mamba2_replay",
        out_type=jax.ShapeDtypeStruct(x.shape, jnp.float32),
        scratch_types={
            "state": plgpu.SMEM((head_dim, state_dim), states.dtype),
            "reads": plgpu.SMEM((sizes.readers, state_dim), c.dtype),
            "total": plgpu.SMEM((sizes.readers, head_dim), jnp.float32),
            "kept": plgpu.SMEM((sizes.readers,), jnp.float32),
            "folded_x": plgpu.SMEM((sizes.window, head_dim), jnp.float32),
            "folded_b": plgpu.SMEM((sizes.window, state_dim), ring.b.dtype),
            "arrived": plgpu.Barrier(num_barriers=2),
        },
        grid=(rows, heads),
        grid_names=("row", "head"),
        compiler_params=plgpu.CompilerParams(
            # Safe without: shared memory is written once, and read after a barrier; a block reads
            # no row of the ring that it or another writes, and its checkpoint before it writes.
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # no sum crosses warps
            # Every layout is named here; to have them inferred takes three times as long.
            lowering_semantics=plgpu.LoweringSemantics.Lane,
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    by_head = states.reshape(*states.shape[:2], heads * head_dim, state_dim)
    pools = [y.reshape(-1, *y.shape[2:]) for y in (by_head, ring.x, ring.b, ring.dt)]
    refs = [jax.new_ref(y, memory_space=plgpu.GMEM) for y in pools]
    out = kernel(x, dt, a, b, c, d, layer[None], slots, num_computed, ring_length, query_len, *refs)
    state, x, b, dt = (jax.freeze(ref) for ref in refs)
    ring = ring.replace(
        x=x.reshape(ring.x.shape), b=b.reshape(ring.b.shape), dt=dt.reshape(ring.dt.shape)
    )
    return out, state.reshape(states.shape), ring


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes a block knows."""

    width: int
    num_slots: int
    group: int  # heads that share B and C
    head_dim: int
    state_dim: int
    ring: int

    @property
    def readers(self) -> int:
        """Tokens that read, in whole blocks of 4 warps."""
        return -(-self.width // 4) * 4

    @property
    def window(self) -> int:
        """Tokens of a full ring, in whole chunks."""
        return -(-(self.ring - self.width) // _CHUNK) * _CHUNK

    @property
    def layouts(self) -> tuple[Any, Any]:
        """Of `[readers, head_dim]` and `[readers, state_dim]`: a row over a warp's lanes."""
        x, b = (
            plgpu.Layout.TILED(
                plgpu.Tiling(((4, size), (size // 32,))),
                warp_dims=(-3,),
                lane_dims=(-2,),
                vector_dim=-1,
            )
            for size in (self.head_dim, self.state_dim)
        )
        return x, b


@dataclasses.dataclass(frozen=True)
class _Ring:
    """One slot's ring, as one head sees it."""

    sizes: _Sizes
    x: Any
    b: Any
    dt: Any
    head: jax.Array
    cursor: jax.Array  # row of the step's first token
    length: jax.Array

    @property
    def chunks(self) -> jax.Array:
        return lax.div(self.length + _CHUNK - 1, _CHUNK)

    def fetch(self, chunk):
        """`x, B, dt` of a chunk's tokens, the newest first; past the oldest it again, `dt` 0."""
        by_x, by_b = self.sizes.layouts
        tokens = []
        for i in range(_CHUNK):
            age = chunk * _CHUNK + i + 1
            at = self.cursor - jnp.minimum(age, self.length)
            at = jnp.where(at < 0, at + self.sizes.ring, at)
            x = _load(self.x.at[at, self.head], by_x.reduce(0))
            b = _load(self.b.at[at, lax.div(self.head, self.sizes.group)], by_b.reduce(0))
            tokens.append((x, b, jnp.where(age <= self.length, self.dt[at, self.head], 0.0)))
        return tokens

    def append(self, tokens, count):
        """Store the first `count`; of the heads of a group, the first stores what they share."""
        for t, (x, b, dt) in enumerate(tokens):
            at = lax.rem(self.cursor + t, self.sizes.ring)

            @pl.when(t < count)
            def _(x=x, b=b, dt=dt, at=at):
                _store(self.x.at[at, self.head], x)
                self.dt[at, self.head] = dt

                @pl.when(lax.rem(self.head, self.sizes.group) == 0)
                def _():
                    _store(self.b.at[at, lax.div(self.head, self.sizes.group)], b)


def _body(
    sizes, x, dt, a, b, c, d, layer, slots, num_computed, ring_length, query_len,
    pool, ring_x, ring_b, ring_dt, out, *, state, reads, total, kept, folded_x, folded_b, arrived,
):  # fmt: skip
    row, head = lax.axis_index("row"), lax.axis_index("head")
    slot, count = slots[row], query_len[row]
    live = (slot > 0) & (slot < sizes.num_slots) & (count > 0)
    tile = mosaic.row_layout(plgpu, sizes.state_dim, state.dtype.itemsize, most_lanes=8)

    @pl.when(live)
    def _():
        place, group = layer[0] * sizes.num_slots + slot, lax.div(head, sizes.group)
        checkpoint = pool.at[place, pl.ds(head * sizes.head_dim, sizes.head_dim)]
        plgpu.copy_gmem_to_smem(checkpoint, state, arrived.at[0])
        new_reads = reads.at[pl.ds(0, sizes.width)]
        plgpu.copy_gmem_to_smem(c.at[row, :, group], new_reads, arrived.at[1])

        length = jnp.clip(ring_length[row], 0, sizes.ring - sizes.width)
        cursor = lax.rem(jnp.maximum(num_computed[row], 0), sizes.ring)
        ring = _Ring(
            sizes, ring_x.at[place], ring_b.at[place], ring_dt.at[place], head, cursor, length
        )
        new = _new_tokens(sizes, x.at[row], dt.at[row], b.at[row], head, ring)
        ring.append(new, count)
        folds = must_fold(length, sizes.width, sizes.ring)
        decay = a[head] * math.log2(math.e)  # a power of 2 costs half of what one of e does
        plgpu.barrier_wait(arrived.at[1])
        _sum_tokens(sizes, new, ring, jnp.where(folds, 0, ring.chunks), decay, reads, total, kept)
        chunks = jnp.where(folds, ring.chunks, 0)
        elapsed = lax.fori_loop(
            0, chunks, functools.partial(_stage, ring, decay, folded_x, folded_b), jnp.float32(0)
        )
        plgpu.commit_smem()
        plgpu.barrier_wait(arrived.at[0])

        for part in range(sizes.head_dim // _ROWS):
            some = pl.ds(part * _ROWS, _ROWS)
            start = _load(state.at[some], tile).astype(jnp.float32) * jnp.exp2(decay * elapsed)
            add = functools.partial(_fold, tile, folded_x.at[:, some], folded_b)
            start = lax.fori_loop(0, chunks * (_CHUNK // _FOLD), add, start)

            @pl.when(folds)
            def _(start=start, part=part):
                rows = pl.ds(head * sizes.head_dim + part * _ROWS, _ROWS)
                _store(pool.at[place, rows], start.astype(state.dtype))

            for t in range(sizes.width):
                c_t = _load(reads.at[t], tile.reduce(0)).astype(jnp.float32)
                y = jnp.sum(start * _spread(c_t, start.shape, 1, tile), axis=1) * kept[t]
                x_t = _load(x.at[row, t, head, some], tile.reduce(1)).astype(jnp.float32)
                y = y + _load(total.at[t, some], tile.reduce(1)) + d[head] * x_t
                _store(out.at[row, t, head, some], y)

    @pl.when(jnp.logical_not(live))
    def _():
        nothing = plgpu.layout_cast(jnp.zeros(sizes.head_dim, jnp.float32), tile.reduce(1))
        for t in range(sizes.width):
            _store(out.at[row, t, head], nothing)


def _new_tokens(sizes, x, dt, b, head, ring):
    """`x, B, dt` of the step's tokens, as the ring will hold them."""
    by_x, by_b = sizes.layouts
    group = lax.div(head, sizes.group)
    return [
        (
            _load(x.at[t, head], by_x.reduce(0)).astype(ring.x.dtype),
            _load(b.at[t, group], by_b.reduce(0)).astype(ring.b.dtype),
            dt[t, head],
        )
        for t in range(sizes.width)
    ]


def _sum_tokens(sizes, new, ring, chunks, decay, reads, total_out, kept_out):
    """The sum over the new tokens and so many chunks of the ring, and `exp(A T_t)`."""
    by_x, by_b = sizes.layouts
    c = _load(reads, by_b).astype(jnp.float32)
    total = jnp.zeros((sizes.readers, sizes.head_dim), jnp.float32)
    total = plgpu.layout_cast(total, by_x)
    elapsed = plgpu.layout_cast(jnp.zeros(sizes.readers, jnp.float32), by_b.reduce(1))
    reader = plgpu.broadcasted_iota(jnp.int32, elapsed.shape, 0, layout=by_b.reduce(1))

    def add(total, elapsed, x, b, dt):
        x, b = x.astype(jnp.float32), b.astype(jnp.float32)
        overlap = jnp.sum(c * _spread(b, c.shape, 1, by_b), axis=1)
        weight = jnp.exp2(decay * elapsed) * dt * overlap
        weight, x = (_spread(y, total.shape, axis, by_x) for axis, y in enumerate((weight, x)))
        return total + weight * x

    for t, (x, b, dt) in reversed(list(enumerate(new))):
        # Not a weight of 0: a token that overflows must not harm those before it.
        more, later = add(total, elapsed, x, b, dt), reader >= t
        total = jnp.where(_spread(later, total.shape, 0, by_x), more, total)
        elapsed = jnp.where(later, elapsed + dt, elapsed)

    def from_ring(chunk, carry):
        total, elapsed = carry
        for x, b, dt in ring.fetch(chunk):
            total, elapsed = add(total, elapsed, x, b, dt), elapsed + dt
        return total, elapsed

    total, elapsed = lax.fori_loop(0, chunks, from_ring, (total, elapsed))
    _store(total_out, total)
    _store(kept_out, jnp.exp2(decay * elapsed))


def _stage(ring, decay, folded_x, folded_b, chunk, elapsed):
    """Bring a chunk of the ring to shared memory, its `x` with the weights of the fold."""
    for i, (x, b, dt) in enumerate(ring.fetch(chunk)):
        weight = jnp.exp2(decay * elapsed) * dt
        _store(folded_x.at[chunk * _CHUNK + i], x.astype(jnp.float32) * weight)
        _store(folded_b.at[chunk * _CHUNK + i], b)
        elapsed = elapsed + dt
    return elapsed


def _fold(tile, folded_x, folded_b, i, state):
    """Add `_FOLD` tokens to some rows of a state."""
    for j in range(_FOLD):
        x = _load(folded_x.at[i * _FOLD + j], tile.reduce(1))
        b = _load(folded_b.at[i * _FOLD + j], tile.reduce(0)).astype(jnp.float32)
        state = state + _spread(x, state.shape, 0, tile) * _spread(b, state.shape, 1, tile)
    return state


def _spread(x, shape, axis, layout):
    """`x` along `axis` of a matrix, the same everywhere else."""
    return plgpu.layout_cast(lax.broadcast_in_dim(x, shape, (axis,)), layout)
