"""`gdn_prefill` on a Hopper GPU (Pallas, Mosaic GPU), in 16 bits; import only where kernels run.

Two kernels. `gdn_prefill_chunks` prepares all chunks at once; here a block then walks the chunks of
one sequence with 64 rows of one head's state, which stay in registers as float32. All it computes
is transposed, values by tokens, so that what one product puts out is what the next one takes from
registers: only keys, queries, values and the chunk's two matrices come through shared memory.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.gated_delta.prefill_block import Sizes, prepare
from jaxspec.pallas.gpu import access, device, tensor_cores
from jaxspec.pallas.recurrent.chunk_blocks import ALIGN, VALUES, sequences, store, store_nothing
from jaxspec.pallas.recurrent.chunks import CHUNK


@functools.partial(jax.jit, static_argnames="interpret")
def prefill(
    q, k, v, g, beta, states, layer, slots, state_offset, num_computed, query_start,
    *, interpret=None
):  # fmt: skip
    """`gdn_prefill` with `layer` on the device, so that all layers share one kernel.

    Queries and keys are rounded to the dtype of `v`, and so is all that tensor cores multiply;
    sums are float32. `interpret`: parameters of Mosaic's interpreter.
    """
    tokens, key_heads, key_dim = k.shape
    sizes = Sizes(*states.shape, key_heads=key_heads, tokens=tokens, dtype=v.dtype)
    seqs = sequences(tokens, query_start, slots, state_offset, num_computed)
    edges, slots, offset, computed = seqs
    live = (slots > 0) & (slots < sizes.num_slots)
    first, chunks = _chunks(edges[:-1], edges[1:], live, tokens)

    q, k = (x.astype(v.dtype).reshape(tokens, key_heads * key_dim) for x in (q, k))
    params = {} if interpret is None else {"interpret": interpret}
    prepared = prepare(sizes, q, k, g, beta, chunks, params)
    flat = (sizes.layers * sizes.num_slots * sizes.candidates, -1, key_dim)
    pool = jax.new_ref(states.reshape(flat), memory_space=plgpu.GMEM)
    rows = (edges, first, slots, offset, computed, layer[None])
    out = _walk(sizes, (q, k, v.reshape(tokens, -1)), prepared, rows, pool, params)
    return out, jax.freeze(pool).reshape(states.shape)


def _chunks(begin, end, live, tokens):
    """The first chunk of each sequence; of each chunk its start, and which of its rows are real.

    As many chunks as there may be; those that are not have no real row.
    """
    start = begin // ALIGN * ALIGN
    number = jnp.where(live & (begin < end), (end - start + CHUNK - 1) // CHUNK, 0)
    last = jnp.cumsum(number, dtype=jnp.int32)
    # Two of the sequences are null.
    most = (tokens + (CHUNK + ALIGN - 2) * (len(begin) - 2)) // CHUNK
    chunk = jnp.arange(max(most, 1), dtype=jnp.int32)
    seq = jnp.sum(last[None, :] <= chunk[:, None], axis=1, dtype=jnp.int32)
    seq = jnp.minimum(seq, len(begin) - 1)
    here = start[seq] + (chunk - (last - number)[seq]) * CHUNK
    low = jnp.maximum(begin[seq] - here, 0)
    high = jnp.where(chunk < last[-1], jnp.clip(end[seq] - here, 0, CHUNK), 0)
    return last - number, (here, low, high)


def _stages(blocks):
    """Chunks in shared memory, given how many blocks there may be.

    Three hide the copies of a chunk behind two others: one prompt takes a third less time. With two
    chunks two blocks fit on a multiprocessor, with 1 KB to spare (why the sums of `g` do not come
    this way), and where there are two for each, that is faster: four prompts of 2048 tokens take an
    H200 149 us and not 187. But where four may come one often does: its 8192 take 302, not 462.
    """
    return 3 if blocks <= 2 * device.MULTIPROCESSORS else 2


def _walk(sizes, tokens, chunks, rows, pool, params):
    """Outputs of all tokens; the final states go into `pool`."""
    dim, dtype, seqs = sizes.key_dim, sizes.dtype, len(rows[1])
    grid = (sizes.value_dim // VALUES, sizes.value_heads, seqs)
    stages = _stages(grid[0] * grid[1] * (seqs - 2))  # two of the sequences are null
    scratch = {
        "queries": tensor_cores.tile(stages, CHUNK, dim, dtype=dtype),
        "keys": tensor_cores.tile(stages, CHUNK, dim, dtype=dtype),
        "values": tensor_cores.tile(stages, CHUNK, VALUES, dtype=dtype),
        "matrices": tensor_cores.tile(stages, 2 * CHUNK, CHUNK, dtype=dtype),
        "arrived": plgpu.Barrier(num_arrivals=4, num_barriers=stages),
    }
    if params:
        scratch["spare"] = tensor_cores.tile(VALUES, dim, dtype=dtype)
    kernel = plgpu.kernel(
        functools.partial(_begin, sizes),
        kernel_name="gdn_prefill",
        out_type=jax.ShapeDtypeStruct(
            (sizes.tokens, sizes.value_heads, sizes.value_dim), jnp.float32
        ),
        scratch_types=scratch,
        grid=grid,
        grid_names=("part", "head", "seq"),
        # Safe without barriers but `_step`'s own: copies alone write what several threads read.
        compiler_params=plgpu.CompilerParams(
            approx_math=True, reduction_scratch_bytes=0, unsafe_no_auto_barriers=True
        ),
        **params,
    )
    return kernel(*tokens, *chunks, *rows, pool)


@dataclasses.dataclass(frozen=True)
class _Walk:
    """What one block walks: values on the device, and how it gets a chunk."""

    begin: jax.Array  # the first token
    end: jax.Array
    start: jax.Array  # of the first chunk
    number: jax.Array  # of chunks
    fetch: Callable  # (chunk, stage): starts the copies
    ring: tuple  # of queries, keys, values, matrices, arrived
    sums: Callable  # (chunk) -> where those of `g` are
    out: Any  # of this block's values: [tokens, VALUES]
    spare: Any  # as for `tensor_cores.operand`


def _begin(
    sizes, q, k, v, matrices_in, sums_in, edges, first, slots, offset, computed, layer, pool, out,
    *, queries, keys, values, matrices, arrived, spare=None
):  # fmt: skip
    """Find the block's sequence and its initial state, walk it, and keep the final one."""
    part, head, seq = (lax.axis_index(name) for name in ("part", "head", "seq"))
    begin, end, slot = edges[seq], edges[seq + 1], slots[seq]
    live = (slot > 0) & (slot < sizes.num_slots)
    start = begin - lax.rem(begin, ALIGN)
    number = jnp.where(live & (begin < end), lax.div(end - start + CHUNK - 1, CHUNK), 0)
    rows = pl.ds(head * sizes.value_dim + part * VALUES, VALUES)
    columns = pl.ds(lax.div(head, sizes.group) * sizes.key_dim, sizes.key_dim)
    ring = (queries, keys, values, matrices, arrived)

    def fetch(j, stage):
        here = pl.ds(pl.multiple_of(start + j * CHUNK, ALIGN), CHUNK)
        sources = (
            q.at[here, columns], k.at[here, columns], v.at[here, rows],
            matrices_in.at[first[seq] + j, head],
        )  # fmt: skip
        for source, target in zip(sources, ring, strict=False):
            plgpu.copy_gmem_to_smem(source, target.at[stage], arrived.at[stage])

    mine = out.at[:, head, pl.ds(part * VALUES, VALUES)]
    walk = _Walk(
        *(begin, end, start, number, fetch, ring),
        *(lambda j: sums_in.at[first[seq] + j, head], mine, spare),
    )

    @pl.when(number > 0)
    def _():
        for stage in range(queries.shape[0]):
            pl.when(stage < number)(functools.partial(fetch, stage, stage))
        place = (layer[0] * sizes.num_slots + slot) * sizes.candidates
        source = place + jnp.clip(offset[seq], 0, sizes.candidates - 1)
        state = access.load(pool.at[source, rows], plgpu.Layout.WGMMA).astype(jnp.float32)
        state = jnp.where(jnp.broadcast_to(computed[seq] > 0, state.shape), state, 0.0)
        state = lax.fori_loop(0, number, functools.partial(_step, sizes, walk), state)
        access.store(pool.at[place, rows], state.astype(pool.dtype))

    @pl.when(jnp.logical_not(live))
    def _():
        store_nothing(mine, begin, end)


def _step(sizes, walk, j, state):
    """One chunk: its outputs, and the state `[values, key_dim]` after it."""
    stages = walk.ring[0].shape[0]
    stage = lax.rem(j, stages)
    arrived = walk.ring[-1].at[stage]
    queries, keys, values, matrices = (x.at[stage] for x in walk.ring[:-1])
    coupling, weights = (matrices.at[pl.ds(i * CHUNK, CHUNK)].transpose((1, 0)) for i in range(2))
    start = walk.start + j * CHUNK
    low, high = jnp.maximum(walk.begin - start, 0), jnp.minimum(walk.end - start, CHUNK)
    whole = high - low == CHUNK
    sums = walk.sums(j)
    total, last = access.load(sums, plgpu.Layout.WGMMA.reduce(0)), sums[CHUNK - 1]
    plgpu.barrier_wait(arrived)

    @pl.when(jnp.logical_not(whole))
    def _():
        tensor_cores.clear(keys, low, high)
        tensor_cores.clear(values, low, high)

    def factor(log):
        return lax.broadcast_in_dim(jnp.exp(log), (VALUES, CHUNK), (1,))

    written, decayed, read = _against_state(
        *(state.astype(sizes.dtype), queries, keys, values, coupling),
        *(lambda: factor(total), lambda: factor(last - total), walk.spare),
    )
    state, out = tensor_cores.accumulate(
        walk.spare, (state * jnp.exp(last), decayed, keys), (read, written, weights)
    )
    store(walk.out, start, low, high, out)
    plgpu.commit_smem()  # all threads have read the chunk that the next copy overwrites
    again = j + stages
    pl.when(again < walk.number)(lambda: walk.fetch(again, stage))
    return state


def _against_state(state, queries, keys, values, coupling, from_start, to_end, spare):
    """What the chunk writes, `(values - recalled) @ coupling`, that at its end, and what it reads.

    Every product is under way before one that it does not need is waited for. `from_start` and
    `to_end` are called when they are needed, for what they wait for may still be loading.
    """

    def run(recalled, written, read):
        plgpu.wgmma(recalled, tensor_cores.operand(state, spare), keys.transpose((1, 0)))
        plgpu.wgmma(written, values.transpose((1, 0)), coupling)
        kept = from_start()
        wrong = plgpu.wgmma_accumulator_load(recalled, wait_n=1) * -kept
        plgpu.wgmma(written, tensor_cores.operand(wrong.astype(state.dtype), spare), coupling)
        plgpu.wgmma(read, tensor_cores.operand(state, spare), queries.transpose((1, 0)))
        new = plgpu.wgmma_accumulator_load(written, wait_n=1)
        rounded, decayed = new.astype(state.dtype), (new * to_end()).astype(state.dtype)
        return rounded, decayed, read[...] * kept

    return pl.run_scoped(run, *[plgpu.WGMMAAccumulatorRef((VALUES, CHUNK), jnp.float32)] * 3)
