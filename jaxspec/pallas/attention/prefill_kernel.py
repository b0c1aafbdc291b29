"""Pallas (Mosaic GPU) kernel of `prefill_attention` and `window_prefill` for Hopper GPUs.

Each block handles some tokens of one chunk, with the query heads that share one key head. The
kernel is warp-specialised: two warpgroups compute, each on `softmax.ROWS` of these queries, and a
third copies tiles of keys and values into a ring in shared memory for both (Shah et al. 2024,
FlashAttention-3, figure 1, algorithm 1).
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.gpu import access, device, layouts, tensor_cores
from jaxspec.pallas.paging.page_tiles import (
    KEYS,
    VALUES,
    PageTiles,
    PoolHead,
    flatten_pool,
    float8_tile,
)
from jaxspec.regions import owner_of

_BLOCK_KV = {64: 128, 128: 128, 256: 64}  # positions per tile by head_dim; registers limit them
_STAGES = 2  # tiles per ring; with heads of 256 they fill shared memory
_WARPGROUPS = 2  # warpgroups that compute
# Registers per thread of computing and of copying warpgroups; a multiprocessor has 65536.
_REGISTERS = 232, 40
_FLOAT8_REGISTERS = {64: (224, 56), 128: (224, 56), 256: (232, 40)}  # by head_dim


@dataclasses.dataclass(frozen=True)
class _BlockSizes:
    pages: PageTiles
    group: int  # query heads that share a key head
    window: int | None = None  # positions that a token attends to; None means all

    @property
    def warpgroup_heads(self) -> int:
        """Heads per warpgroup: half of an even group, so that both attend to equal contexts."""
        return self.group if self.group % 2 else self.group // 2

    @property
    def warpgroup_tokens(self) -> int:
        """Tokens per warpgroup: as many as fit, in multiples of 8 as copies require."""
        return softmax.ROWS // self.warpgroup_heads // 8 * 8

    @property
    def tokens(self) -> int:
        return self.warpgroup_tokens * self.warpgroup_heads * _WARPGROUPS // self.group


class _Refs(NamedTuple):
    """Output and operands in global memory."""

    out: Any  # [blocks * tokens per block, heads * head_dim]
    work: Any  # [blocks, 4 or, with a window, 5], see `_schedule`
    queries: Any  # [tokens, heads * head_dim]
    pool: Any  # from `flatten_pool`
    layer: Any  # [1]
    page_tables: Any  # [slots, pages]
    scales: Any = None  # [2] in float32, of keys and of values, if they are scaled
    sinks: Any = None  # [heads] in float32, if there are any


class _Smem(NamedTuple):
    """Barriers and shared memory, in allocation order; pairs are (keys, values)."""

    produced: tuple[Any, Any]  # a barrier per stage: the tile is in the ring
    cleared: Any  # a barrier: the first warpgroup has zeroed the values that are not written
    consumed: tuple[Any, Any]  # a barrier per stage: both warpgroups have read the tile
    float8_produced: tuple[Any, Any] | None  # a barrier: `float8_tiles` is copied; 8-bit pools only
    float8_tiles: tuple[Any, Any] | None  # [block_kv, head_dim], as copied
    ring: tuple[Any, Any]  # [_STAGES, block_kv, head_dim]
    queries: Any  # [_WARPGROUPS, ROWS, head_dim]; finally the output
    weights: Any  # substitute for the register operand under the interpreter, else None


class _Work(NamedTuple):
    """Work of one block: a row of `_schedule`. Positions count from the block's first tile on."""

    slot: Any
    token: Any  # first token
    position: Any  # position of the first token
    end: Any  # number of positions that the block reads; not positive means no work
    first: Any  # number of its first tile
    count: Any  # number of its tiles


@functools.partial(jax.jit, static_argnames=("window", "block_kv", "interpret"))
def prefill_attention_kernel(
    queries,
    kv,
    layer,
    page_tables,
    chunks,
    scales=None,
    sinks=None,
    *,
    window=None,
    block_kv=None,
    interpret=None,
):
    """Run `prefill_attention`; `block_kv`: positions per tile, None means the default.

    With a `window`, a token at position p attends to positions p - `window` + 1 to p.
    """
    num_tokens, heads, head_dim = queries.shape
    kv_heads = kv.shape[4]
    pages = PageTiles.of(kv, page_tables, block_kv or _BLOCK_KV[head_dim])
    sizes = _BlockSizes(pages, heads // kv_heads, window)
    # The barrier keeps XLA from recomputing a token's row for every element that it gathers.
    work, row = lax.optimization_barrier(_schedule(sizes, chunks, num_tokens))
    flat = device.aligned(queries.reshape(num_tokens, heads * head_dim))
    flat = jnp.pad(flat, ((0, max(0, sizes.tokens - num_tokens)), (0, 0)))  # at least one block
    params = {} if interpret is None else {"interpret": interpret}

    operands = {
        "work": work,
        "queries": flat,
        "pool": flatten_pool(kv),
        "layer": layer[None],
        "page_tables": page_tables,
    }
    more = {"scales": scales, "sinks": sinks}
    operands |= {name: operand for name, operand in more.items() if operand is not None}

    def body(*refs, smem):
        *inputs, out = refs
        _run_block(sizes, _Refs(out, **dict(zip(operands, inputs, strict=True))), smem)

    out = plgpu.kernel(
        body,
        kernel_name="prefill_attention",
        out_type=jax.ShapeDtypeStruct((work.shape[0] * sizes.tokens, heads * head_dim), flat.dtype),
        scratch_types={"smem": _smem(sizes, kv.dtype, interpret is not None)},
        grid=(kv_heads, work.shape[0]),
        grid_names=("head", "tile"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        # No reduction crosses warps, and the rings may need all of shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **params,
    )(*operands.values())
    # XLA fuses this gather of rows with the caller's next operation.
    out = out.reshape(out.shape[0], heads, head_dim)
    return out.at[row].get(mode="fill", fill_value=0)


def _schedule(sizes, chunks, num_tokens):
    """Return the work of every block, and the row of the blocks' output that holds each token.

    Both are the same for all layers, so XLA computes them once. The work has the fields of `_Work`
    except the last and, without a window, the first tile. A token outside every chunk gets a row
    past the output.
    """
    num_seqs, pages, size = chunks.slots.shape[0], sizes.pages, sizes.tokens
    starts, ends = chunks.query_start[:-1], chunks.query_start[1:]
    live = chunks.is_live(pages.num_slots)
    length = jnp.where(live, jnp.clip(ends - starts, 0, num_tokens), 0)
    last_block = jnp.cumsum(lax.div(length + size - 1, jnp.int32(size)), dtype=jnp.int32)
    first_block = jnp.concatenate([jnp.zeros(1, jnp.int32), last_block[:-1]])

    block = jnp.arange(num_tokens // size + num_seqs, dtype=jnp.int32)
    seq = owner_of(block, last_block)
    offset = (block - first_block[seq]) * size
    count = jnp.clip(length[seq] - offset, 0, size)
    # Clamped, because the host's numbers may be out of bounds.
    position = jnp.clip(chunks.num_computed[seq], 0, pages.context) + offset
    end = jnp.where(count > 0, jnp.clip(position + count, 0, pages.context), 0)
    # A block that would extend past the last token starts earlier, with tokens it does not own.
    token = starts[seq] + offset
    start = jnp.clip(token, 0, max(0, num_tokens - size))
    position = position + start - token
    first, block_kv = jnp.zeros_like(block), sizes.pages.block_kv
    if sizes.window is not None:
        first = lax.div(jnp.maximum(position - (sizes.window - 1), 0), jnp.int32(block_kv))
    position, end = (x - first * block_kv for x in (position, end))
    work = [chunks.slots[seq], start, position, end, first]
    work = jnp.stack(work[: 4 if sizes.window is None else 5], axis=1)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = owner_of(token, ends)
    within = token - starts[owner]
    token_block = first_block[owner] + lax.div(within, jnp.int32(size))
    token_block = jnp.clip(token_block, 0, block.shape[0] - 1)
    row = token_block * size + token - start[token_block]
    is_real = (within >= 0) & (within < length[owner])
    return work, jnp.where(is_real, row, block.shape[0] * size)


def _smem(sizes, pool_dtype, interpreted) -> _Smem:
    block_kv, dim = sizes.pages.block_kv, sizes.pages.head_dim
    ring = tensor_cores.tile(_STAGES, block_kv, dim)
    consumed = plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES)
    in_8_bits = pool_dtype == jnp.float8_e4m3fn
    copied, widened = sizes.pages.barriers(1), plgpu.Barrier(num_barriers=_STAGES)
    produced = widened if in_8_bits else sizes.pages.barriers(_STAGES)
    float8 = float8_tile(block_kv, dim)
    return _Smem(
        produced=(produced, produced),
        cleared=plgpu.Barrier(),
        consumed=(consumed, consumed),
        float8_produced=(copied, copied) if in_8_bits else None,
        float8_tiles=(float8, float8) if in_8_bits else None,
        ring=(ring, ring),
        queries=tensor_cores.tile(_WARPGROUPS, softmax.ROWS, dim),
        weights=tensor_cores.tile(_WARPGROUPS, softmax.ROWS, block_kv) if interpreted else None,
    )


def _run_block(sizes, refs, smem):
    head, index, warpgroup = (lax.axis_index(name) for name in ("head", "tile", "warpgroup"))
    index = refs.work.shape[0] - 1 - index  # the last tokens take longest, so they start first
    slot, token, position, end = (refs.work[index, i] for i in range(4))
    first = 0 if sizes.window is None else refs.work[index, 4]
    count = lax.div(end + sizes.pages.block_kv - 1, sizes.pages.block_kv)
    work = _Work(slot, token, position, end, first, count)
    in_8_bits = smem.float8_tiles is not None
    registers = _FLOAT8_REGISTERS[sizes.pages.head_dim] if in_8_bits else _REGISTERS

    @pl.when((count > 0) & (warpgroup == _WARPGROUPS))
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        copy = _copy_float8 if in_8_bits else _copy
        copy(sizes, work, PoolHead(refs.pool, refs.layer[0], head), refs.page_tables, smem)

    @pl.when((count > 0) & (warpgroup < _WARPGROUPS))
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        _compute(sizes, work, index, head, warpgroup, refs, smem)


def _copy(sizes, work, source, page_tables, smem):
    """Fill the rings, each stage as soon as both warpgroups have read it."""
    pages = sizes.pages

    @pl.loop(0, work.count)
    def _(j):
        stage, tile = lax.rem(j, _STAGES), work.first + j
        found = pages.find_pages(page_tables, work.slot, tile)  # overlaps with the waits below
        for kind in (KEYS, VALUES):
            _wait_until_consumed(smem, kind, j, stage)
            target, produced = smem.ring[kind].at[stage], smem.produced[kind].at[stage]
            pages.fetch(source, kind, tile, found, target, produced)


def _copy_float8(sizes, work, source, page_tables, smem):
    """`_copy` for a float8_e4m3fn pool: tiles are widened on their way into the rings."""
    pages = sizes.pages
    found = pages.find_pages(page_tables, work.slot, work.first)
    for kind in (KEYS, VALUES):
        target, produced = smem.float8_tiles[kind], smem.float8_produced[kind]
        pages.fetch(source, kind, work.first, found, target, produced)

    @pl.loop(0, work.count)
    def _(j):
        stage, following = lax.rem(j, _STAGES), work.first + j + 1
        found = pages.find_pages(page_tables, work.slot, following)
        for kind in (KEYS, VALUES):
            narrow, narrow_produced = smem.float8_tiles[kind], smem.float8_produced[kind]
            plgpu.barrier_wait(narrow_produced)
            _wait_until_consumed(smem, kind, j, stage)
            _widen(narrow, smem.ring[kind].at[stage])
            plgpu.commit_smem()
            plgpu.barrier_arrive(smem.produced[kind].at[stage])

            @pl.when(j + 1 < work.count)
            def _(kind=kind, target=narrow, produced=narrow_produced):
                pages.fetch(source, kind, following, found, target, produced)


def _wait_until_consumed(smem, kind, j, stage):
    """Wait until tile `j` may overwrite its stage; the first tile of each stage need not wait."""

    @pl.when(j >= _STAGES)
    def _():
        plgpu.barrier_wait(smem.consumed[kind].at[stage])


def _widen(narrow, target):
    """Widen a tile to bfloat16, two pieces at a time because this warpgroup has few registers."""
    block_kv, dim = narrow.shape
    size, layout = max(8, 1024 // dim), layouts.row_layout(dim, 2)
    for start in range(0, block_kv, 2 * size):
        pieces = [pl.ds(start + i * size, size) for i in range(2)]
        loaded = [access.load(narrow.at[rows], layout) for rows in pieces]
        for rows, x in zip(pieces, loaded, strict=True):
            # Hopper converts float8 to float16 only.
            x = x.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
            access.store(target.at[rows], x)


def _compute(sizes, work, index, head, warpgroup, refs, smem):
    """Run a computing warpgroup: load its queries, attend, store the result.

    Its rows are all of its tokens for the first head, then for the next. The two warpgroups divide
    the heads of an even group, and the tokens of an odd one.
    """
    dim, num_tokens = sizes.pages.head_dim, sizes.warpgroup_tokens
    tile = smem.queries.at[warpgroup]
    ahead, column = warpgroup * num_tokens, head * sizes.group
    if sizes.warpgroup_heads < sizes.group:
        ahead, column = 0, column + warpgroup * sizes.warpgroup_heads  # the first head
    columns = [pl.ds((column + i) * dim, dim) for i in range(sizes.warpgroup_heads)]
    rows = [pl.ds(i * num_tokens, num_tokens) for i in range(sizes.warpgroup_heads)]
    tokens = pl.ds(work.token + ahead, num_tokens)
    # Through registers: copies must start at a multiple of 8 rows, and prompts start anywhere.
    layout = layouts.row_layout(dim, max(2, 256 // dim))  # 8 rows at a time
    loaded = [access.load(refs.queries.at[tokens, of_head], layout) for of_head in columns]
    for head_rows, x in zip(rows, loaded, strict=True):
        access.store(tile.at[head_rows], x)
    plgpu.commit_smem()
    weights = None if smem.weights is None else smem.weights.at[warpgroup]
    state = _attend(sizes, work, ahead, tile, weights, refs.scales, smem)
    sink = None
    if refs.sinks is not None:
        sink = _sink_of_rows(sizes, refs.sinks, column)
    output = softmax.output(state, sink)
    tile[...] = (output if refs.scales is None else output * refs.scales[1]).astype(tile.dtype)
    plgpu.commit_smem()
    tokens = pl.ds(index * sizes.tokens + ahead, num_tokens)
    for head_rows, head_columns in zip(rows, columns, strict=True):
        plgpu.copy_smem_to_gmem(tile.at[head_rows], refs.out.at[tokens, head_columns])
    plgpu.wait_smem_to_gmem(0)


def _sink_of_rows(sizes, sinks, first_head):
    """Return the sink of each row of a warpgroup, in the layout of the softmax's state."""
    layout = plgpu.Layout.WGMMA.reduce(1)
    row = plgpu.broadcasted_iota(jnp.int32, (softmax.ROWS,), 0, layout=layout)
    head = lax.div(row, jnp.int32(sizes.warpgroup_tokens))
    found = softmax.full((softmax.ROWS,), 0.0, layout)
    for i in range(sizes.warpgroup_heads):
        found = jnp.where(head == i, sinks[first_head + i], found)
    return found


def _attend(sizes, work, ahead, queries, weights_operand, scales, smem):
    """Return the softmax state of a warpgroup's queries after all tiles.

    `ahead`: offset of the warpgroup's first token within the block.
    """
    block_kv, dim = sizes.pages.block_kv, sizes.pages.head_dim
    keys, values = smem.ring
    factor = dim**-0.5 * softmax.LOG2E
    factor = factor if scales is None else factor * scales[0]

    def mask(scores, base):
        row, position = (softmax.tile_iota(block_kv, i) for i in range(2))
        newest = work.position + ahead + lax.rem(row, jnp.int32(sizes.warpgroup_tokens)) - base
        sees = position <= newest
        if sizes.window is not None:
            sees &= position > newest - sizes.window
        return jnp.where(sees, scores, -jnp.inf)

    def clear(tile, written):
        """Zero the values that are not written: they may be non-finite, and 0 * NaN is NaN."""

        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            tensor_cores.clear(tile, 0, written)
            plgpu.barrier_arrive(smem.cleared)

        plgpu.barrier_wait(smem.cleared)

    def attend_tile(j, state):
        stage = lax.rem(j, _STAGES)
        base, is_refilled = j * block_kv, j + _STAGES < work.count
        plgpu.barrier_wait(smem.produced[KEYS].at[stage])
        scores = tensor_cores.product(queries, keys.at[stage].transpose((1, 0)))
        pl.when(is_refilled)(lambda: plgpu.barrier_arrive(smem.consumed[KEYS].at[stage]))
        # A tile that every query attends to in full needs no mask.
        is_masked = base + block_kv > work.position + 1
        if sizes.window is not None:
            before = work.position - base  # positions of the tile before the first token
            is_masked = (before < block_kv - 1) | (before > sizes.window - sizes.tokens)
        scores = lax.cond(is_masked, mask, lambda scores, base: scores, scores, base)
        weights, state = softmax.update(state, scores, factor)
        plgpu.barrier_wait(smem.produced[VALUES].at[stage])
        tile = values.at[stage]
        pl.when(base + block_kv > work.end)(lambda: clear(tile, work.end - base))
        (acc,) = tensor_cores.accumulate(weights_operand, (state.acc, weights, tile))
        pl.when(is_refilled)(lambda: plgpu.barrier_arrive(smem.consumed[VALUES].at[stage]))
        return state._replace(acc=acc)

    return lax.fori_loop(0, work.count, attend_tile, softmax.empty(dim))
