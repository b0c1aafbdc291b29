"""Pallas (Mosaic GPU) kernel of `gdn_prefill` for Hopper GPUs, in 16 bits.

There are two kernels. `gdn_prefill_chunks` prepares all chunks at once (`prefill_block`). In the
kernel here, each block then walks the chunks of one sequence with 64 rows of one head's state,
which stay in registers as float32. All matrices are transposed, values by tokens: the output of one
matmul is then the operand of the next in registers, and only keys, queries, values and the chunk's
two matrices pass through shared memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.prefill_block import (
    ChunkRows,
    Decays,
    Operands,
    Sizes,
    prepare,
)
from jaxspec.pallas.gated_delta.prefill_by_channel_block import prepare_by_channel
from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, VALUES, sequences, store, store_zeros
from jaxspec.pallas.recurrent.chunks import CHUNK

_NULL_SEQUENCES = 2  # number of sequences that `sequences` adds


class _Sequences(NamedTuple):
    """Layer `[1]`, and the indices of each sequence's tokens, first chunk and state."""

    query_start: Any
    first_chunk: Any
    slots: Any
    state_offset: Any
    num_computed: Any
    layer: Any


class _Scratch(NamedTuple):
    """Barriers and the ring of chunks in shared memory, in allocation order; axis 0 is stages."""

    arrived: Any
    matrices: Any
    parts: Any  # [stages, parts * CHUNK, key_dim]: queries and keys
    spare: Any  # argument of `tensor_cores.operand`; has no stages
    values: Any


@dataclasses.dataclass(frozen=True)
class _Walk:
    """One block's walk over a sequence: indices on the device, and access to its chunks."""

    begin: jax.Array  # first token of the sequence
    end: jax.Array
    start: jax.Array  # first token of the first chunk, a multiple of `ALIGN`
    number: jax.Array  # number of chunks
    fetch: Callable  # (chunk, stage): starts the copies
    decays: Callable  # (chunk) -> its `Decays`
    out: Any  # the block's values: [tokens, VALUES]
    scratch: _Scratch


class _Chunk(NamedTuple):
    """A chunk in shared memory, and its decays."""

    queries: Any
    keys: Any
    values: Any
    coupling: Any  # the first of the two prepared matrices, transposed
    decays: Decays


@functools.partial(jax.jit, static_argnames="interpret")
def gdn_prefill_kernel(tokens, states, layer, chunks, *, interpret=None):
    q, k, v, g, beta = tokens
    num_tokens, key_heads, key_dim = k.shape
    sizes = Sizes(*states.shape, key_heads=key_heads, tokens=num_tokens, dtype=v.dtype)
    seqs = sequences(chunks, num_tokens, sizes.num_slots)
    first_chunk, chunk_rows = _chunks(seqs, num_tokens)

    q, k = (x.astype(v.dtype).reshape(num_tokens, key_heads * key_dim) for x in (q, k))
    if g.ndim == v.ndim:
        g = g.reshape(num_tokens, key_heads * key_dim)
        prepared = prepare_by_channel(sizes, Operands(q, k, g, beta), chunk_rows, interpret)
    else:
        prepared = prepare(sizes, Operands(q, k, g, beta), chunk_rows, interpret)
    flat = (
        sizes.layers * sizes.num_slots * sizes.candidates,
        sizes.value_heads * sizes.value_dim,
        key_dim,
    )
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    indices = _Sequences(
        query_start=seqs.query_start,
        first_chunk=first_chunk,
        slots=seqs.slots,
        state_offset=seqs.state_offset,
        num_computed=seqs.num_computed,
        layer=layer[None],
    )
    values = v.reshape(num_tokens, sizes.value_heads * sizes.value_dim)
    out = _walk(sizes, values, prepared, indices, pool, interpret)
    return out, jax.freeze(pool).reshape(states.shape)


def _chunks(seqs, num_tokens):
    """Return the first chunk of each sequence, and the `ChunkRows` of all chunks.

    The arrays have room for the largest possible number of chunks; unused chunks have no rows.
    """
    begin, end = seqs.query_start[:-1], seqs.query_start[1:]
    start = begin // ALIGN * ALIGN
    number = jnp.where(seqs.slots > 0, (end - start + CHUNK - 1) // CHUNK, 0)
    last = jnp.cumsum(number, dtype=jnp.int32)
    real_seqs = len(begin) - _NULL_SEQUENCES
    max_chunks = (num_tokens + (CHUNK + ALIGN - 2) * real_seqs) // CHUNK
    chunk = jnp.arange(max(max_chunks, 1), dtype=jnp.int32)
    seq = jnp.sum(last[None, :] <= chunk[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, len(begin) - 1)
    chunk_start = start[seq] + (chunk - (last - number)[seq]) * CHUNK
    low = jnp.maximum(begin[seq] - chunk_start, 0)
    high = jnp.where(chunk < last[-1], jnp.clip(end[seq] - chunk_start, 0, CHUNK), 0)
    return last - number, ChunkRows(chunk_start, low, high)


def _stages(blocks):
    """Return the number of stages of the ring of chunks, given the maximum number of blocks.

    With three, the copies of a chunk overlap with two other chunks. With two, two blocks fit on a
    multiprocessor, which is faster if there are more blocks than fit at once (op gdn_prefill in
    benchmarks/results/kernels_h200.json). They have 1 KB to spare, too little for the sums of `g`,
    so these do not pass through shared memory.
    """
    return 3 if blocks <= 2 * device.MULTIPROCESSORS else 2


def _walk(sizes, values, prepared, seqs, pool, interpret):
    """Walk all sequences: return the outputs of all tokens, and write final states to `pool`."""
    dim, dtype, num_seqs = sizes.key_dim, sizes.dtype, len(seqs.slots)
    grid = (sizes.value_dim // VALUES, sizes.value_heads, num_seqs)
    stages = _stages(grid[0] * grid[1] * (num_seqs - _NULL_SEQUENCES))
    scratch = _Scratch(
        arrived=plgpu.Barrier(num_arrivals=2 + prepared.parts, num_barriers=stages),
        matrices=tensor_cores.tile(stages, 2 * CHUNK, CHUNK, dtype=dtype),
        parts=tensor_cores.tile(stages, prepared.parts * CHUNK, dim, dtype=dtype),
        spare=None if interpret is None else tensor_cores.tile(VALUES, dim, dtype=dtype),
        values=tensor_cores.tile(stages, CHUNK, VALUES, dtype=dtype),
    )
    kernel = plgpu.kernel(
        functools.partial(_walk_sequence, sizes),
        kernel_name="gdn_prefill",
        out_type=jax.ShapeDtypeStruct(
            (sizes.tokens, sizes.value_heads, sizes.value_dim), jnp.float32
        ),
        scratch_types={"scratch": scratch},
        grid=grid,
        grid_names=("part", "head", "seq"),
        # Safe with only the barriers in `_step`: what several threads read is written by copies.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(values, prepared, seqs, pool)


def _walk_sequence(sizes, all_values, prepared, seqs, pool, out, *, scratch):
    """Load the initial state of the block's sequence, walk its chunks, store the final state."""
    part, head, seq = (lax.axis_index(name) for name in ("part", "head", "seq"))
    begin, end, slot = seqs.query_start[seq], seqs.query_start[seq + 1], seqs.slots[seq]
    live = slot > 0
    start = begin - lax.rem(begin, ALIGN)
    number = jnp.where(live, lax.div(end - start + CHUNK - 1, CHUNK), 0)
    values = pl.ds(head * sizes.value_dim + part * VALUES, VALUES)
    first = seqs.first_chunk[seq]

    def fetch(j, stage):
        rows, chunk = pl.ds(pl.multiple_of(start + j * CHUNK, ALIGN), CHUNK), first + j
        arrived, parts = scratch.arrived.at[stage], scratch.parts.at[stage]
        prepared.fetch(sizes, chunk, head, rows, _parts(parts), arrived)
        copies = (
            (all_values.at[rows, values], scratch.values),
            (prepared.matrices.at[chunk, head], scratch.matrices),
        )
        for source, target in copies:
            plgpu.copy_gmem_to_smem(source, target.at[stage], arrived)

    own_out = out.at[:, head, pl.ds(part * VALUES, VALUES)]
    walk = _Walk(
        begin=begin,
        end=end,
        start=start,
        number=number,
        fetch=fetch,
        decays=lambda j: prepared.decays(sizes, first + j, head),
        out=own_out,
        scratch=scratch,
    )

    @pl.when(number > 0)
    def _():
        for stage in range(scratch.values.shape[0]):
            pl.when(stage < number)(functools.partial(fetch, stage, stage))
        candidate_0 = (seqs.layer[0] * sizes.num_slots + slot) * sizes.candidates
        source = candidate_0 + jnp.clip(seqs.state_offset[seq], 0, sizes.candidates - 1)
        state = access.load(pool.at[source, values], plgpu.Layout.WGMMA).astype(jnp.float32)
        continues = jnp.broadcast_to(seqs.num_computed[seq] > 0, state.shape)
        state = jnp.where(continues, state, 0.0)
        state = lax.fori_loop(0, number, functools.partial(_step, sizes, walk), state)
        access.store(pool.at[candidate_0, values], state.astype(pool.dtype))

    @pl.when(jnp.logical_not(live))
    def _():
        store_zeros(own_out, begin, end)


def _parts(rows):
    return [rows.at[pl.ds(i, CHUNK)] for i in range(0, rows.shape[0], CHUNK)]


def _step(sizes, walk, j, state):
    """Store the outputs of one chunk, and return the state `[values, key_dim]` after it."""
    ring, stages = walk.scratch, walk.scratch.values.shape[0]
    stage = lax.rem(j, stages)
    values, matrices = (x.at[stage] for x in (ring.values, ring.matrices))
    queries, *keys = _parts(ring.parts.at[stage])
    coupling, weights = (matrices.at[pl.ds(i * CHUNK, CHUNK)].transpose((1, 0)) for i in range(2))
    start = walk.start + j * CHUNK
    low, high = jnp.maximum(walk.begin - start, 0), jnp.minimum(walk.end - start, CHUNK)
    whole = high - low == CHUNK
    decays = walk.decays(j)
    plgpu.barrier_wait(ring.arrived.at[stage])

    @pl.when(jnp.logical_not(whole))
    def _():
        for rows in (*keys, values):
            tensor_cores.clear(rows, low, high)

    chunk = _Chunk(queries, keys[0], values, coupling, decays)
    written, decayed, read = _against_state(state.astype(sizes.dtype), chunk, ring.spare)
    state, out = tensor_cores.accumulate(
        ring.spare, (state * decays.of_state, decayed, keys[-1]), (read, written, weights)
    )
    store(walk.out, start, low, high, out)
    plgpu.commit_smem()  # barrier: all threads have read the chunk that the next copy overwrites
    refill = j + stages
    pl.when(refill < walk.number)(lambda: walk.fetch(refill, stage))
    return state


def _against_state(state, chunk, spare):
    """Return the values that a chunk writes, these decayed to its end, and its reads of the state.

    The written values are `(values - recalled) @ coupling`. Each wgmma is issued before the kernel
    waits for the results of others that it does not need.
    """

    def run(recalled, written, read):
        plgpu.wgmma(recalled, tensor_cores.operand(state, spare), chunk.keys.transpose((1, 0)))
        plgpu.wgmma(written, chunk.values.transpose((1, 0)), chunk.coupling)
        decay = chunk.decays.from_start()
        wrong = plgpu.wgmma_accumulator_load(recalled, wait_n=1) * -decay
        plgpu.wgmma(written, tensor_cores.operand(wrong.astype(state.dtype), spare), chunk.coupling)
        plgpu.wgmma(read, tensor_cores.operand(state, spare), chunk.queries.transpose((1, 0)))
        new = plgpu.wgmma_accumulator_load(written, wait_n=1)
        decayed = (new * chunk.decays.to_end()).astype(state.dtype)
        return new.astype(state.dtype), decayed, read[...] * decay

    return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((VALUES, CHUNK), jnp.float32)] * 3)
