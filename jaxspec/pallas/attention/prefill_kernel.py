"""`prefill_attention` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block has some tokens of one sequence, and of their heads those that share one key head. Two
warpgroups have `softmax.ROWS` of these queries each; a third copies tiles of keys and values
into a ring in shared memory for both (Shah et al. 2024, FlashAttention-3, figure 1, algorithm 1).
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.gpu import access, layouts, tensor_cores
from jaxspec.pallas.paging.page_tiles import PageTiles, float8_tile

_KEYS = {64: 128, 128: 128, 256: 64}  # positions in a tile, by head dim: registers bound it
_STAGES = 2  # tiles in a ring; at a head dim of 256 shared memory is then full
_WARPGROUPS = 2  # that compute
_REGISTERS = 232, 40  # of a thread that computes, that copies: 65536 a multiprocessor
_WIDENING = {64: (224, 56), 128: (224, 56), 256: (232, 40)}  # the same over 8 bits, by head dim


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes a block knows."""

    pages: PageTiles
    kv_heads: int
    group: int

    @property
    def heads(self) -> int:
        """Of a warpgroup's queries. An even group is cut in two, so that both see as much."""
        return self.group if self.group % 2 else self.group // 2

    @property
    def rows(self) -> int:
        """Tokens of a warpgroup: what fits, in whole tiles of 8 rows, which copies want."""
        return softmax.ROWS // self.heads // 8 * 8

    @property
    def tokens(self) -> int:
        """Tokens of a block."""
        return self.rows * self.heads * _WARPGROUPS // self.group


@functools.partial(jax.jit, static_argnames=("keys", "interpret"))
def attend(
    queries, kv, layer, page_tables, slots, num_computed, query_start, *, keys=None, interpret=None
):
    """`prefill_attention` with `layer` on the device, so that all layers share one kernel.

    `keys`: positions in a tile. `interpret`: parameters of Mosaic's interpreter.
    """
    num_tokens, heads, head_dim = queries.shape
    layers, _, num_pages, page_size, kv_heads, _ = kv.shape
    pages = PageTiles(keys or _KEYS[head_dim], head_dim, num_pages, page_size, *page_tables.shape)
    sizes = _Sizes(pages, kv_heads, heads // kv_heads)
    schedule = _schedule(sizes, slots, num_computed, query_start, num_tokens)
    # Or XLA would compute a token's row anew for every element that it gathers.
    work, row = lax.optimization_barrier(schedule)
    flat = queries.reshape(num_tokens, heads * head_dim)
    flat = jnp.pad(flat, ((0, max(0, sizes.tokens - num_tokens)), (0, 0)))  # a block's at least
    pool = kv.reshape(layers * 2 * num_pages * page_size, kv_heads * head_dim)
    params = {} if interpret is None else {"interpret": interpret}
    out = plgpu.kernel(
        functools.partial(_block, sizes),
        kernel_name="prefill_attention",
        out_type=jax.ShapeDtypeStruct((work.shape[0] * sizes.tokens, heads * head_dim), flat.dtype),
        scratch_types=_scratch(sizes, kv.dtype, interpret is not None),
        grid=(kv_heads, work.shape[0]),
        grid_names=("head", "tile"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        # No sum crosses warps, and the rings may need all of shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **params,
    )(work, flat, pool, layer[None], page_tables)
    # A gather of rows, which XLA makes part of what the caller does with them.
    out = out.reshape(-1, heads, head_dim)
    return out.at[row].get(mode="fill", fill_value=0)


def _schedule(sizes, slots, num_computed, query_start, num_tokens):
    """What every block does, and in which row of their output each token then is.

    The same for all layers, so that XLA computes it once. `[tiles, 4]`: slot, first token, its
    position, and where what the tokens see ends, 0 if there is nothing to do. A token of no
    sequence gets a row beyond the output.
    """
    seqs, pages, size = slots.shape[0], sizes.pages, sizes.tokens
    begin, end = query_start[:-1], query_start[1:]
    live = (slots > 0) & (slots < pages.num_slots)
    length = jnp.where(live, jnp.clip(end - begin, 0, num_tokens), 0)
    last = jnp.cumsum(lax.div(length + size - 1, jnp.int32(size)), dtype=jnp.int32)
    first = jnp.concatenate([jnp.zeros(1, jnp.int32), last[:-1]])

    tile = jnp.arange(num_tokens // size + seqs, dtype=jnp.int32)
    seq = jnp.minimum(jnp.sum(tile[:, None] >= last[None, :], axis=1, dtype=jnp.int32), seqs - 1)
    offset = (tile - first[seq]) * size
    count = jnp.clip(length[seq] - offset, 0, size)
    # Clamped: what the host sent is not trusted to stay inside of memory.
    position = jnp.clip(num_computed[seq], 0, pages.context) + offset
    sees = jnp.where(count > 0, jnp.clip(position + count, 0, pages.context), 0)
    # A block near the end begins earlier, with tokens that are none of its own.
    token = begin[seq] + offset
    start = jnp.clip(token, 0, max(0, num_tokens - size))
    work = jnp.stack([slots[seq], start, position + start - token, sees], axis=1)

    token = jnp.arange(num_tokens, dtype=jnp.int32)
    owner = jnp.minimum(jnp.sum(token[:, None] >= end[None, :], axis=1, dtype=jnp.int32), seqs - 1)
    within = token - begin[owner]
    block = jnp.clip(first[owner] + lax.div(within, jnp.int32(size)), 0, tile.shape[0] - 1)
    row = block * size + token - start[block]
    return work, jnp.where((within >= 0) & (within < length[owner]), row, tile.shape[0] * size)


def _scratch(sizes, dtype, interpreted):
    """Shared memory and barriers; `dtype` is the pool's."""
    keys, dim = sizes.pages.keys, sizes.pages.head_dim
    ring = tensor_cores.tile(_STAGES, keys, dim)
    free = plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES)
    scratch = {
        "tile": tensor_cores.tile(_WARPGROUPS, softmax.ROWS, dim),
        "ring": (ring, ring),
        "arrived": (sizes.pages.barriers(_STAGES),) * 2,
        "free": (free, free),
        "cleared": plgpu.Barrier(),
    }
    if dtype == jnp.float8_e4m3fn:
        narrow = float8_tile(keys, dim)
        scratch["narrow"] = (narrow, narrow)
        scratch["landed"] = (sizes.pages.barriers(1),) * 2
        scratch["arrived"] = (plgpu.Barrier(num_barriers=_STAGES),) * 2
    if interpreted:
        scratch["weights"] = tensor_cores.tile(_WARPGROUPS, softmax.ROWS, keys)
    return scratch


def _block(
    sizes, work, queries, pool, layer, tables, out,
    *, tile, ring, arrived, free, cleared, weights=None, narrow=None, landed=None,
):  # fmt: skip
    """Find what this block does, and share it among the warpgroups."""
    head, index, warpgroup = (lax.axis_index(name) for name in ("head", "tile", "warpgroup"))
    index = work.shape[0] - 1 - index  # the last tokens see most, and should not begin last
    slot, token, position, end = (work[index, i] for i in range(4))
    count = lax.div(end + sizes.pages.keys - 1, sizes.pages.keys)
    registers = _REGISTERS if narrow is None else _WIDENING[sizes.pages.head_dim]

    @pl.when((count > 0) & (warpgroup == _WARPGROUPS))
    def _():
        plgpu.set_max_registers(registers[1], action="decrease")
        start = functools.partial(sizes.pages.fetch, pool, layer[0], head)
        find = functools.partial(sizes.pages.find, tables, slot)
        if narrow is None:
            _copy(count, find, start, ring, arrived, free)
        else:
            _copy_float8(count, find, start, ring, arrived, free, narrow, landed)

    @pl.when((count > 0) & (warpgroup < _WARPGROUPS))
    def _():
        plgpu.set_max_registers(registers[0], action="increase")
        mine, dim = tile.at[warpgroup], sizes.pages.head_dim
        ahead, column = warpgroup * sizes.rows, head * sizes.group
        if sizes.heads < sizes.group:
            ahead, column = 0, column + warpgroup * sizes.heads
        columns = [pl.ds((column + i) * dim, dim) for i in range(sizes.heads)]
        rows = [pl.ds(i * sizes.rows, sizes.rows) for i in range(sizes.heads)]
        tokens = pl.ds(token + ahead, sizes.rows)
        # Through registers: copies begin at multiples of 8 rows only, and prompts anywhere.
        layout = layouts.row_layout(dim, max(2, 256 // dim))  # 8 rows at a time
        loaded = [access.load(queries.at[tokens, of_head], layout) for of_head in columns]
        for of_tile, x in zip(rows, loaded, strict=True):
            access.store(mine.at[of_tile], x)
        plgpu.commit_smem()
        mine_weights = None if weights is None else weights.at[warpgroup]
        spans = count, position, ahead, end
        state = _attend(sizes, spans, mine, ring, arrived, free, cleared, mine_weights)
        mine[...] = softmax.result(state).astype(mine.dtype)
        plgpu.commit_smem()
        tokens = pl.ds(index * sizes.tokens + ahead, sizes.rows)
        for of_tile, of_head in zip(rows, columns, strict=True):
            plgpu.copy_smem_to_gmem(mine.at[of_tile], out.at[tokens, of_head])
        plgpu.wait_smem_to_gmem(0)


def _copy(count, find, fetch, ring, arrived, free):
    """The warpgroup that fills the rings, as soon as both others are done with a tile."""

    @pl.loop(0, count)
    def _(j):
        stage = lax.rem(j, _STAGES)
        found = find(j)  # while it would wait anyway
        for which in range(2):
            pl.when(j >= _STAGES)(lambda which=which: plgpu.barrier_wait(free[which].at[stage]))
            target = ring[which].at[stage], arrived[which].at[stage]
            fetch(which, j, found, *target)


def _copy_float8(count, find, fetch, ring, arrived, free, narrow, landed):
    """`_copy` of a pool of float8_e4m3fn, which lands in `narrow` and is widened into the rings."""
    found = find(0)
    for which in range(2):
        fetch(which, 0, found, narrow[which], landed[which])

    @pl.loop(0, count)
    def _(j):
        stage, found = lax.rem(j, _STAGES), find(j + 1)
        for which in range(2):
            plgpu.barrier_wait(landed[which])
            pl.when(j >= _STAGES)(lambda which=which: plgpu.barrier_wait(free[which].at[stage]))
            _widen(narrow[which], ring[which].at[stage])
            plgpu.commit_smem()
            plgpu.barrier_arrive(arrived[which].at[stage])
            target = narrow[which], landed[which]
            pl.when(j + 1 < count)(lambda w=which, target=target: fetch(w, j + 1, found, *target))


def _widen(narrow, wide):
    """A tile in bfloat16, two pieces at a time: the warpgroup has few registers."""
    keys, dim = narrow.shape
    size, layout = max(8, 1024 // dim), layouts.row_layout(dim, 2)
    for begin in range(0, keys, 2 * size):
        pieces = [pl.ds(begin + i * size, size) for i in range(2)]
        loaded = [access.load(narrow.at[rows], layout) for rows in pieces]
        for rows, x in zip(pieces, loaded, strict=True):
            # Hopper converts to float16 alone.
            x = x.astype(jnp.float16).astype(jnp.float32).astype(jnp.bfloat16)
            access.store(wide.at[rows], x)


def _attend(sizes, spans, queries, ring, arrived, free, cleared, weights):
    """The state of the softmax after all `count` tiles of positions."""
    count, position, ahead, end = spans
    size, dim = sizes.pages.keys, sizes.pages.head_dim
    keys, values = ring

    def mask(scores, j):
        row, place = (softmax.iota(size, i) for i in range(2))
        sees = position + ahead + lax.rem(row, jnp.int32(sizes.rows))
        return jnp.where(place <= sees - j * size, scores, -jnp.inf)

    def clear(tile, live):
        @pl.when(lax.axis_index("warpgroup") == 0)
        def _():
            tensor_cores.clear(tile, 0, live)
            plgpu.barrier_arrive(cleared)

        plgpu.barrier_wait(cleared)

    def step(j, state):
        stage = lax.rem(j, _STAGES)
        base, refilled = j * size, j + _STAGES < count
        plgpu.barrier_wait(arrived[0].at[stage])
        scores = tensor_cores.product(queries, keys.at[stage].transpose((1, 0)))
        pl.when(refilled)(lambda: plgpu.barrier_arrive(free[0].at[stage]))
        # Tiles that all queries see whole need no mask.
        scores = lax.cond(base + size > position + 1, mask, lambda scores, j: scores, scores, j)
        weight, (acc, peak, total) = softmax.weigh(state, scores, dim**-0.5 * softmax.LOG2E)
        plgpu.barrier_wait(arrived[1].at[stage])
        pl.when(base + size > end)(lambda: clear(values.at[stage], end - base))
        (acc,) = tensor_cores.accumulate(weights, (acc, weight, values.at[stage]))
        pl.when(refilled)(lambda: plgpu.barrier_arrive(free[1].at[stage]))
        return acc, peak, total

    return lax.fori_loop(0, count, step, softmax.empty(dim))
