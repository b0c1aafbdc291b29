"""Kernel of `mamba2_prefill` in 16 bits (Pallas, Mosaic GPU).

A block walks the chunks of one tile of a sequence with 64 rows of one head's state, which stay in
registers as float32. As in `gdn_prefill`, everything is computed transposed, values by tokens, so
that the state, in registers, is an accumulator of matmuls and, rounded, an operand.

A single long prompt would only have as many blocks as heads, half of what a GPU runs at once. So it
is split into several tiles. A first kernel, `prefill_tiles.add_tiles`, computes what each tile but
the last adds to the state; each block then starts with the sum over the tiles before its own.
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
    store_zeros,
)
from jaxspec.pallas.recurrent.chunks import CHUNK

# Blocks that an H200 runs at once: registers and shared memory allow two per multiprocessor.
_BLOCKS = 2 * device.MULTIPROCESSORS
_MIN_TILE = 4 * CHUNK  # minimum tokens of a tile


@functools.partial(jax.jit, static_argnames=("tile", "interpret"))
def mamba2_prefill_kernel(tokens, states, layer, chunks, *, tile=None, interpret=None):
    """Run `mamba2_prefill`; `tile` is the number of tokens per tile, in whole chunks."""
    x, dt, a, b, c, d = tokens
    num_tokens, groups, state_dim = b.shape
    dtype = x.dtype
    if tile is None:
        tiles_at_once = max(1, _BLOCKS // (x.shape[1] * x.shape[2] // VALUES))
        tile = max(_MIN_TILE, -(-num_tokens // (tiles_at_once * CHUNK)) * CHUNK)
    sizes = tiles.Sizes(*states.shape, groups=groups, tokens=num_tokens, tile=tile, dtype=dtype)
    schedule = _schedule(sizes, sequences(chunks, num_tokens, sizes.num_slots))

    x, b, c = (y.astype(dtype).reshape(num_tokens, y.shape[1] * y.shape[2]) for y in (x, b, c))
    operands = tiles.Operands(x=x, b=b, dt=dt.T, a=a, schedule=schedule, layer=layer[None])
    flat = (
        sizes.layers * sizes.num_slots * sizes.candidates,
        sizes.heads * sizes.head_dim,
        state_dim,
    )
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    is_cut = tile < num_tokens
    tile_sums = tiles.add_tiles(sizes, operands, pool, interpret) if is_cut else None
    kernel = plgpu.kernel(
        functools.partial(_walk_tile, sizes),
        kernel_name="mamba2_prefill",
        out_type=jax.ShapeDtypeStruct((sizes.tokens, sizes.heads, sizes.head_dim), jnp.float32),
        scratch_types={"scratch": tiles.output_scratch(sizes, interpret)},
        **tiles.launch_options(sizes, schedule.shape[0], interpret),
    )
    out = kernel(operands, c, d, tile_sums, pool)
    return out, jax.freeze(pool).reshape(states.shape)


def _schedule(sizes, seqs):
    """Return the tiles of all sequences, a `Tile` in each row; the same for all layers.

    There are as many rows as there can be tiles; rows beyond the last tile have no tokens.
    """
    begin, end = seqs.query_start[:-1], seqs.query_start[1:]
    first = begin // ALIGN * ALIGN
    number = jnp.where(begin < end, (end - first + sizes.tile - 1) // sizes.tile, 0)
    last = jnp.cumsum(number, dtype=jnp.int32)
    max_tiles = (sizes.tokens + (sizes.tile + ALIGN - 2) * len(begin)) // sizes.tile
    row = jnp.arange(max_tiles, dtype=jnp.int32)
    seq = jnp.sum(last[None, :] <= row[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, len(begin) - 1)
    position = row - (last - number)[seq]
    start = first[seq] + position * sizes.tile
    candidate = jnp.clip(seqs.state_offset, 0, sizes.candidates - 1)
    table = tiles.Tile(
        slot=seqs.slots[seq],
        source=jnp.where(seqs.num_computed > 0, candidate, -1)[seq],
        begin=jnp.maximum(begin[seq], start),
        end=jnp.minimum(end[seq], start + sizes.tile),
        position=position,
        tiles=number[seq],
    )
    return jnp.stack(table, axis=1)


def _walk_tile(sizes, operands, c, d, tile_sums, pool, out, *, scratch):
    """Run the block of one tile; array operands are references.

    `tile_sums` is None if no prompt is split.
    """
    block, index = tiles.BlockIndex.of_grid(sizes), lax.axis_index("tile")
    tile = tiles.Tile.load(operands.schedule, index)
    own_out = out.at[:, block.head, pl.ds(lax.axis_index("part") * VALUES, VALUES)]

    def copies(tokens):
        return (
            (operands.b.at[tokens, block.keys], scratch.keys),
            (operands.x.at[tokens, block.values], scratch.values),
            (operands.dt.at[block.head, tokens], scratch.steps),
            (c.at[tokens, block.keys], scratch.queries),
        )

    walk = tiles.Walk(tile, copies, operands.a[block.head], scratch)

    def start():
        def from_pool():
            return tiles.initial_state(sizes, tile, pool, operands.layer, block.values)

        def from_tiles():
            return _sum(sizes, tile_sums, tile, block)

        if tile_sums is None:
            return from_pool()
        return lax.cond(tile.tiles > 1, from_tiles, from_pool)

    pl.when(tile.slot == 0)(lambda: store_zeros(own_out, tile.begin, tile.end))

    @pl.when((tile.slot > 0) & (tile.begin < tile.end))
    def _():
        step = functools.partial(_step, walk, d[block.head], own_out)
        state = walk.over(tile.chunks, step, start)
        # Reloaded, because the loop has no registers to keep it in.
        walked = tiles.Tile.load(operands.schedule, index)

        @pl.when(walked.position == walked.tiles - 1)
        def _():
            candidate_0 = operands.layer[0] * sizes.num_slots + walked.slot
            target = pool.at[candidate_0 * sizes.candidates, block.values]
            access.store(target, state.astype(pool.dtype))


def _sum(sizes, tile_sums, tile, block):
    """Return the state at the start of a tile, from the sums of the tiles before it."""
    index = lax.axis_index("tile")

    def add(i, state):
        new = access.load(tile_sums.added.at[i, block.values], plgpu.Layout.WGMMA)
        return state * tile_sums.left[i, block.head] + new

    return lax.fori_loop(index - tile.position, index + 1, add, tiles.zero_state(sizes))


def _step(walk, skip, out, chunk, release, state):
    """Store the outputs of a chunk, and return the state `[values, state_dim]` after it.

    `skip` is `D`.
    """
    weights = walk.scratch.weights
    kept, written, left, last = _start_outputs(walk, skip, chunk, state)
    result, state = tensor_cores.accumulate(
        walk.scratch.spare,
        (kept, written, weights.transpose((1, 0))),
        (state * jnp.exp2(last), left, chunk.keys),
    )
    release()
    store(out, chunk.start, chunk.low, chunk.high, result)
    return state


def _start_outputs(walk, skip, chunk, state):
    """Return the outputs from the state and `D` alone, then the last three results of `written_by`.

    `scratch.weights` then holds the weight of each written value in each output. While a matmul is
    in flight, the kernel computes everything that does not need it.
    """
    queries, keys, scratch = chunk.queries, chunk.keys, walk.scratch

    def run(cb, read):
        plgpu.wgmma(cb, queries, keys.transpose((1, 0)))
        log = along(walk.sum_up(chunk), 0) - along(walk.sums(), 1)
        decay = jnp.exp2(jnp.where(iota(1) <= iota(0), log, -jnp.inf))
        scratch.weights[...] = (cb[...] * decay).astype(scratch.weights.dtype)
        plgpu.commit_smem()
        rounded = tensor_cores.operand(state.astype(keys.dtype), scratch.spare)
        plgpu.wgmma(read, rounded, queries.transpose((1, 0)))
        x, written, left, last = walk.written_by(chunk)
        kept = read[...] * along(jnp.exp2(walk.sums()), 1) + skip * x
        return kept, written, left, last

    return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((VALUES, CHUNK), jnp.float32)] * 2)
