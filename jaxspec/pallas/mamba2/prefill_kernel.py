"""`mamba2_prefill` on a Hopper GPU (Pallas, Mosaic GPU), in 16 bits; import only where kernels run.

A block walks the chunks of a tile of one sequence with 64 rows of one head's state, which stay in
registers as float32. As in `gdn_prefill` all it computes is transposed, values by tokens, so that
the state is what products put out and what they take from registers.

A long prompt alone would be as many blocks as it has heads, half of what a GPU runs at once. So it
is cut into several tiles, and a kernel before finds what each of them but the last adds to the
state; a block then begins with the sum over the tiles before its own.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.mamba2 import prefill_tiles as tiles
from jaxspec.pallas.recurrent.chunk_blocks import (
    ALIGN,
    VALUES,
    along,
    iota,
    sequences,
    store,
    store_nothing,
)
from jaxspec.pallas.recurrent.chunks import CHUNK

# That an H200 runs at once: registers and shared memory are for two each.
_BLOCKS = 2 * device.MULTIPROCESSORS
_LEAST_TILE = 4 * CHUNK  # tokens worth a tile of their own


@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def prefill(
    x, dt, a, b, c, d, states, layer, slots, state_offset, num_computed, query_start,
    *, tile=None, interpret=None
):  # fmt: skip
    """`mamba2_prefill` with `layer` on the device, so that all layers share one kernel.

    `tile`: tokens of a tile, whole chunks. `interpret`: parameters of Mosaic's interpreter.
    """
    tokens, groups, state_dim = b.shape
    dtype = x.dtype
    if tile is None:
        wanted = max(1, _BLOCKS // (x.shape[1] * x.shape[2] // VALUES))
        tile = max(_LEAST_TILE, -(-tokens // (wanted * CHUNK)) * CHUNK)
    sizes = tiles.Sizes(*states.shape, groups=groups, tokens=tokens, tile=tile, dtype=dtype)
    seqs = sequences(tokens, query_start, slots, state_offset, num_computed)
    work = _schedule(sizes, *seqs)

    x, b, c = (y.astype(dtype).reshape(tokens, -1) for y in (x, b, c))
    steps = dt.T  # a head's are neighbours, which copies want
    params = {} if interpret is None else {"interpret": interpret}
    flat = (sizes.layers * sizes.num_slots * sizes.candidates, -1, state_dim)
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    operands = (x, b, steps, a, work, layer[None])
    before = tiles.add_tiles(sizes, *operands, pool, params) if tile < tokens else ()
    out = _walk_tiles(sizes, (*operands, c, d, *before), pool, params)
    return out, jax.freeze(pool).reshape(states.shape)


def _schedule(sizes, edges, slots, offset, computed):
    """What every tile is, `[tiles, 6]` in the order of `Tile`; the same for all layers.

    As many tiles as there may be; in those that are not there is no token.
    """
    begin, end = edges[:-1], edges[1:]
    live = (slots > 0) & (slots < sizes.num_slots)
    first = begin // ALIGN * ALIGN
    number = jnp.where(begin < end, (end - first + sizes.tile - 1) // sizes.tile, 0)
    last = jnp.cumsum(number, dtype=jnp.int32)
    most = (sizes.tokens + (sizes.tile + ALIGN - 2) * len(begin)) // sizes.tile
    tile = jnp.arange(most, dtype=jnp.int32)
    seq = jnp.sum(last[None, :] <= tile[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, len(begin) - 1)
    index = tile - (last - number)[seq]
    start = first[seq] + index * sizes.tile
    source = jnp.where(computed > 0, jnp.clip(offset, 0, sizes.candidates - 1), -1)
    here = jnp.maximum(begin[seq], start), jnp.minimum(end[seq], start + sizes.tile)
    columns = (jnp.where(live, slots, 0)[seq], source[seq], *here, index, number[seq])
    return jnp.stack(columns, axis=1)


def _walk_tiles(sizes, operands, pool, params):
    """Outputs of all tokens; the final states go into `pool`."""
    work = operands[4]
    scratch = {
        **tiles.scratch(sizes, max(CHUNK, sizes.state_dim), bool(params)),
        "queries": tiles.queries(sizes),
        "weights": tensor_cores.tile(CHUNK, CHUNK, dtype=sizes.dtype),
        "arrived": tiles.arrived(4),
    }
    out = (sizes.tokens, sizes.heads, sizes.head_dim)
    return plgpu.kernel(
        functools.partial(_walk_tile, sizes),
        kernel_name="mamba2_prefill",
        out_type=jax.ShapeDtypeStruct(out, jnp.float32),
        scratch_types=scratch,
        **tiles.launch(sizes, work.shape[0], params),
    )(*operands, pool)


def _walk_tile(
    sizes, x, b, steps_in, rates, work, layer, c, d, *others,
    keys, values, steps, queries, weights, arrived, line, spare=None
):  # fmt: skip
    """The block of one tile."""
    *before, pool, out = others
    (rows, shared, head), index = tiles.place(sizes), lax.axis_index("tile")
    tile = tiles.Tile.find(work, index)
    mine = out.at[:, head, pl.ds(lax.axis_index("part") * VALUES, VALUES)]

    def sources(here):
        own = (b.at[here, shared], x.at[here, rows], steps_in.at[head, here])
        return *own, c.at[here, shared]

    ring = (keys, values, steps, queries)
    walk = tiles.Walk(tile, sources, ring, arrived, rates[head], line, spare)

    def start():
        def from_pool():
            return tiles.initial(sizes, tile, pool, layer, rows)

        if not before:
            return from_pool()
        return lax.cond(tile.number > 1, lambda: _sum(sizes, before, tile, rows), from_pool)

    pl.when(tile.slot == 0)(lambda: store_nothing(mine, tile.begin, tile.end))

    @pl.when((tile.slot > 0) & (tile.begin < tile.end))
    def _():
        step = functools.partial(_step, walk, weights, d[head], mine)
        state = walk.over(tile.chunks, step, start)
        again = tiles.Tile.find(work, index)  # the loop has no registers to keep it in

        @pl.when(again.index == again.number - 1)
        def _():
            target = (layer[0] * sizes.num_slots + again.slot) * sizes.candidates
            access.store(pool.at[target, rows], state.astype(pool.dtype))


def _sum(sizes, before, tile, rows):
    """The state at the start of a tile, from what those before it add."""
    added, left = before
    index, head = lax.axis_index("tile"), lax.axis_index("head")

    def one(i, state):
        new = access.load(added.at[i, rows], plgpu.Layout.WGMMA)
        return state * left[i, head] + new

    return lax.fori_loop(index - tile.index, index + 1, one, tiles.nothing(sizes))


def _step(walk, weights, skip, out, chunk, done, state):
    """One chunk: its outputs, and the state `[values, state_dim]` after it."""
    kept, written, left, last = _start_outputs(walk, weights, skip, chunk, state)
    result, state = tensor_cores.accumulate(
        walk.spare,
        (kept, written, weights.transpose((1, 0))),
        (state * jnp.exp2(last), left, chunk.keys),
    )
    done()
    store(out, chunk.start, chunk.low, chunk.high, result)
    return state


def _start_outputs(walk, weights, skip, chunk, state):
    """The outputs without what the chunk itself writes; that, for them and for its end; its decay.

    `weights` then holds how much each output takes of what each token writes. While a product is
    under way, what does not need it is found.
    """
    queries, keys = chunk.queries, chunk.keys

    def run(alike, read):
        plgpu.wgmma(alike, queries, keys.transpose((1, 0)))
        log = along(walk.sum_up(chunk), 0) - along(walk.sums(), 1)
        decay = jnp.exp2(jnp.where(iota(1) <= iota(0), log, -jnp.inf))
        weights[...] = (alike[...] * decay).astype(weights.dtype)
        plgpu.commit_smem()
        rounded = tensor_cores.operand(state.astype(keys.dtype), walk.spare)
        plgpu.wgmma(read, rounded, queries.transpose((1, 0)))
        values, written, left, last = walk.left_of(chunk)
        kept = read[...] * along(jnp.exp2(walk.sums()), 1) + skip * values
        return kept, written, left, last

    return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((VALUES, CHUNK), jnp.float32)] * 2)
