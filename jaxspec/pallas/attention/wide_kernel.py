"""Kernel of attention with wide values on Hopper GPUs: latents, and heads of 512.

Each block handles `softmax.ROWS` queries of one row, of all its tokens and of the heads that share
a key, and one split of its positions. The block is warp-specialised: a third warpgroup copies tiles
of keys and values into a ring in shared memory, and two warpgroups compute. Both compute the scores
of all queries, and each adds up its half of the values: the sums of 512 features for 64 queries do
not fit into the registers of one warpgroup.
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
from jaxspec.pallas.gpu import device, tensor_cores
from jaxspec.pallas.paging.page_tiles import KEYS, VALUES, PageTiles, PoolHead, flatten_pool
from jaxspec.regions import DecodeRegion, real_tokens

_WARPGROUPS = 2  # warpgroups that compute, each one half of the values' features
_BLOCK_KV = 64  # positions per tile; a matmul adds up a multiple of them
_STAGES = 2  # tiles in the ring, which fill shared memory
_MAX_SPLITS = 32
_LEAST_POSITIONS = 256  # per split


@dataclasses.dataclass(frozen=True)
class _Heads:
    """Sizes of a model's heads, independent of the step.

    `pages` tiles the pool with heads of half of a value's features. Where it has no pages of values
    (`value_pages` is 0), the first features of a key are the value.
    """

    pages: PageTiles
    kv_heads: int
    shared: int  # features of a key after those of the value
    scale: float

    @property
    def half(self) -> int:
        return self.pages.head_dim

    @property
    def value_dim(self) -> int:
        return _WARPGROUPS * self.half

    @property
    def kinds(self) -> tuple[int, ...]:
        """Tiles that the ring gets for the same positions, in this order."""
        return (KEYS, VALUES) if self.pages.value_pages else (KEYS,)

    @property
    def registers(self) -> tuple[int, int]:
        """Registers per thread of computing and of copying warpgroups."""
        return (240, 24) if VALUES in self.kinds else (232, 40)

    @property
    def copies(self) -> int:
        """Copies per tile."""
        parts = _WARPGROUPS + (self.shared > 0)
        return parts * (self.pages.block_kv // self.pages.copy_size)


@dataclasses.dataclass(frozen=True)
class _Sizes:
    heads: _Heads
    width: int  # tokens per row
    group: int  # query heads that share a key
    splits: int

    @property
    def tiles(self) -> int:
        """Query tiles per row and key head."""
        return -(-self.width * self.group // softmax.ROWS)


class _Refs(NamedTuple):
    """Operands and outputs in global memory."""

    queries: Any  # [rows * kv_heads * tiles * ROWS, features]
    pool: Any  # [positions of all layers, features of all key heads]
    layer: Any  # [1]
    page_tables: Any  # [slots, pages]
    slots: Any  # [rows], like the next two
    num_computed: Any
    query_len: Any
    out: Any  # [splits * rows * kv_heads * tiles * ROWS, value_dim]
    lse: Any  # [splits * rows * kv_heads * tiles, ROWS], in base 2


class _Parts(NamedTuple):
    """Rows of queries or keys in shared memory."""

    halves: Any  # [..., _WARPGROUPS, rows, half]
    shared: Any  # [..., rows, shared], or None


class _Smem(NamedTuple):
    """Barriers and shared memory, in allocation order."""

    q_produced: Any  # a barrier: the queries are copied
    produced: Any  # a barrier per stage: the tile is in the ring
    scored: Any  # a barrier: both warpgroups have computed the scores of a tile
    consumed: Any  # a barrier per stage: both warpgroups have read the tile
    attended: Any  # a barrier: both warpgroups have read the queries for the last time
    queries: _Parts  # the halves are finally those of the output
    ring: _Parts  # [_STAGES, ...]
    lse: Any  # [ROWS]
    weights: Any  # substitute for the register operand under the interpreter, else None


class _Row(NamedTuple):
    """A row's indices, clamped because the host's numbers may be out of range, and the tiles."""

    slot: Any
    start: Any  # position of its first token
    length: Any  # number of positions up to its last token, 0 for padding
    first: Any  # the split's first tile
    count: Any  # number of its tiles


@functools.partial(jax.jit, static_argnames=("value_dim", "scale", "splits", "interpret"))
def latent_attention_kernel(
    queries, latents, layer, page_tables, rows, *, value_dim, scale, splits=None, interpret=None
):
    """Run `latent_attention` without an index; `splits` None means `_choose_splits`.

    A tile of latents is copied once, as keys and as values.
    """
    layers, num_pages, page_size, features = latents.shape
    sizes = value_dim // _WARPGROUPS, num_pages, page_size, *page_tables.shape
    pages = PageTiles(_BLOCK_KV, *sizes, layer_pages=num_pages)
    heads = _Heads(pages, kv_heads=1, shared=features - value_dim, scale=scale)
    pool = latents.reshape(layers * num_pages * page_size, features)
    operands = queries, pool, layer, page_tables, rows
    return _attend("latent_attention", heads, *operands, splits=splits, interpret=interpret)


@functools.partial(jax.jit, static_argnames=("splits", "interpret"))
def wide_attention_kernel(queries, kv, layer, page_tables, rows, *, splits=None, interpret=None):
    """Run `paged_attention` with heads of 512, without gate, scales and sinks."""
    kv_heads, head_dim = kv.shape[4:]
    pages = PageTiles.of(kv, page_tables, _BLOCK_KV)
    pages = dataclasses.replace(pages, head_dim=head_dim // _WARPGROUPS)
    heads = _Heads(pages, kv_heads, shared=0, scale=head_dim**-0.5)
    operands = queries, flatten_pool(kv), layer, page_tables, rows
    return _attend("wide_attention", heads, *operands, splits=splits, interpret=interpret)


def _attend(
    name: str,
    heads: _Heads,
    queries: jax.Array,
    pool: jax.Array,
    layer: jax.Array,
    page_tables: jax.Array,
    rows: DecodeRegion,
    *,
    splits: int | None = None,
    interpret: Any = None,
) -> jax.Array:
    """Run the kernel called `name`; `splits` None means `_choose_splits`.

    Args:
        queries: `[rows, width, heads, features]` in bfloat16.
        pool: `[positions of all layers, features of all key heads]` in bfloat16.

    Returns:
        The output `[rows, width, heads, value_dim]`, 0 for padding.
    """
    num_rows, width, num_heads, features = queries.shape
    group = num_heads // heads.kv_heads
    tiles = -(-width * group // softmax.ROWS)
    blocks = num_rows * heads.kv_heads * tiles
    splits = splits or _choose_splits(blocks, heads.pages.context)
    sizes = _Sizes(heads, width, group, splits)
    lead, of_tiles = (num_rows, heads.kv_heads), tiles * softmax.ROWS
    flat = queries.reshape(num_rows, width, heads.kv_heads, group, features)
    flat = flat.swapaxes(1, 2).reshape(*lead, width * group, features)
    flat = jnp.pad(flat, ((0, 0), (0, 0), (0, of_tiles - width * group), (0, 0)))
    operands = {
        "queries": flat.reshape(blocks * softmax.ROWS, features),
        "pool": pool,
        "layer": layer[None],
        "page_tables": page_tables,
        "slots": rows.slots,
        "num_computed": rows.num_computed,
        "query_len": rows.query_len,
    }
    out, lse = _launch(name, sizes, operands, interpret)
    out = out.reshape(splits, *lead, of_tiles, heads.value_dim)
    out = _merged(out, lse.reshape(splits, *lead, of_tiles)) if splits > 1 else out[0]
    out = out[:, :, : width * group].reshape(*lead, width, group, heads.value_dim)
    out = out.swapaxes(1, 2).reshape(num_rows, width, num_heads, heads.value_dim)
    # XLA fuses this with the caller's next operation.
    query_len = jnp.where(rows.is_live(page_tables.shape[0]), rows.query_len, 0)
    return jnp.where(real_tokens(query_len, width)[:, :, None, None], out, 0)


def _choose_splits(blocks: int, context: int) -> int:
    """Return how many blocks share a row's positions: as many as run side by side."""
    useful = min(context // _LEAST_POSITIONS, _MAX_SPLITS)
    return max(1, min(device.MULTIPROCESSORS // blocks, useful))


def _merged(out, lse):
    """Merge the outputs of splits `[splits, ..., value_dim]` by their log-sum-exps."""
    largest = jnp.max(lse, axis=0, keepdims=True)
    weight = jnp.exp2(lse - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = jnp.sum(weight, axis=0, keepdims=True)
    weight = weight / jnp.where(total == 0, 1.0, total)
    return jnp.sum(out.astype(jnp.float32) * weight[..., None], axis=0).astype(out.dtype)


def _launch(name, sizes, operands, interpret):
    """Return the output and the log-sum-exp of each split."""
    heads, num_rows, dtype = sizes.heads, len(operands["slots"]), operands["queries"].dtype
    tiles = sizes.splits * num_rows * heads.kv_heads * sizes.tiles
    outputs = {
        "out": jax.ShapeDtypeStruct((tiles * softmax.ROWS, heads.value_dim), dtype),
        "lse": jax.ShapeDtypeStruct((tiles, softmax.ROWS), jnp.float32),
    }

    def body(*refs, smem):
        names = [*operands, *outputs]
        _run_block(sizes, _Refs(**dict(zip(names, refs, strict=True))), smem)

    return plgpu.kernel(
        body,
        kernel_name=name,
        out_type=list(outputs.values()),
        scratch_types={"smem": _smem(heads, interpret is not None)},
        grid=(sizes.tiles, sizes.splits, heads.kv_heads, num_rows),
        grid_names=("tile", "split", "head", "row"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        # No reduction crosses warps, and the ring needs nearly all of shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands.values())


def _smem(heads, interpreted) -> _Smem:
    block_kv, half, shared = heads.pages.block_kv, heads.half, heads.shared

    def parts(*lead, rows):
        return _Parts(
            tensor_cores.tile(*lead, _WARPGROUPS, rows, half),
            tensor_cores.tile(*lead, rows, shared) if shared else None,
        )

    spare = tensor_cores.tile(_WARPGROUPS, softmax.ROWS, block_kv)
    return _Smem(
        q_produced=plgpu.Barrier(num_arrivals=_WARPGROUPS + (shared > 0)),
        produced=plgpu.Barrier(num_arrivals=heads.copies, num_barriers=_STAGES),
        scored=plgpu.Barrier(num_arrivals=_WARPGROUPS),
        consumed=plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
        attended=plgpu.Barrier(num_arrivals=_WARPGROUPS),
        queries=parts(rows=softmax.ROWS),
        ring=parts(_STAGES, rows=block_kv),
        lse=plgpu.SMEM((softmax.ROWS,), jnp.float32),
        weights=spare if interpreted else None,
    )


def _run_block(sizes, refs, smem):
    axes = "tile", "split", "head", "row", "warpgroup"
    tile, split, head, row, warpgroup = (lax.axis_index(name) for name in axes)
    num_rows = refs.slots.shape[0]
    row = num_rows - 1 - row  # a prompt's last tokens take longest, so they start first
    found = _read_row(sizes, refs, split, row)
    kv_heads = sizes.heads.kv_heads

    @pl.when(warpgroup == _WARPGROUPS)
    def _():
        plgpu.set_max_registers(sizes.heads.registers[1], action="decrease")
        _fetch_queries(sizes, (row * kv_heads + head) * sizes.tiles + tile, refs, smem)
        _copy(sizes, found, head, refs, smem)

    @pl.when(warpgroup < _WARPGROUPS)
    def _():
        plgpu.set_max_registers(sizes.heads.registers[0], action="increase")
        target = ((split * num_rows + row) * kv_heads + head) * sizes.tiles + tile
        _compute(sizes, found, tile, target, warpgroup, refs, smem)


def _read_row(sizes, refs, split, row) -> _Row:
    pages, slot = sizes.heads.pages, refs.slots[row]
    live = (slot > 0) & (slot < pages.num_slots)
    # Clamped so that sums do not overflow.
    start = jnp.clip(refs.num_computed[row], -sizes.width, pages.context)
    query_len = jnp.where(live, jnp.clip(refs.query_len[row], 0, sizes.width), 0)
    length = jnp.where(query_len > 0, jnp.clip(start + query_len, 0, pages.context), 0)
    row_tiles = lax.div(length + pages.block_kv - 1, pages.block_kv)
    split_tiles = lax.div(row_tiles + sizes.splits - 1, sizes.splits)
    first = split * split_tiles
    count = jnp.clip(row_tiles - first, 0, split_tiles)
    return _Row(slot, start, length, first, count)


def _fetch_queries(sizes, tile, refs, smem):
    rows, half = pl.ds(tile * softmax.ROWS, softmax.ROWS), sizes.heads.half
    for i in range(_WARPGROUPS):
        source = refs.queries.at[rows, pl.ds(i * half, half)]
        plgpu.copy_gmem_to_smem(source, smem.queries.halves.at[i], smem.q_produced)
    if sizes.heads.shared:
        source = refs.queries.at[rows, pl.ds(_WARPGROUPS * half, sizes.heads.shared)]
        plgpu.copy_gmem_to_smem(source, smem.queries.shared, smem.q_produced)


def _copy(sizes, row, head, refs, smem):
    """Fill the ring, each stage as soon as both warpgroups have read it."""
    heads = sizes.heads
    pages, layer = heads.pages, refs.layer[0]
    halves = [PoolHead(refs.pool, layer, _WARPGROUPS * head + i) for i in range(_WARPGROUPS)]

    def copy(number, kind, tile, found):
        stage = lax.rem(number, _STAGES)

        @pl.when(number >= _STAGES)
        def _():
            plgpu.barrier_wait(smem.consumed.at[stage])

        produced = smem.produced.at[stage]
        for i, source in enumerate(halves):
            pages.fetch(source, kind, tile, found, smem.ring.halves.at[stage, i], produced)
        if heads.shared:
            after = dataclasses.replace(pages, head_dim=heads.shared)
            source = PoolHead(refs.pool, layer, heads.value_dim // heads.shared)
            after.fetch(source, kind, tile, found, smem.ring.shared.at[stage], produced)

    @pl.loop(0, row.count)
    def _(j):
        found = pages.find_pages(refs.page_tables, row.slot, row.first + j)
        for i, kind in enumerate(heads.kinds):
            copy(j * len(heads.kinds) + i, kind, row.first + j, found)


def _compute(sizes, row, tile, target, warpgroup, refs, smem):
    """Run a computing warpgroup: attend, store one half of the output's features."""
    plgpu.barrier_wait(smem.q_produced)
    state = _attend_tiles(sizes, row, tile, warpgroup, smem)
    # The output replaces queries, which the other warpgroup may still read.
    plgpu.barrier_arrive(smem.attended)
    plgpu.barrier_wait(smem.attended)
    half = smem.queries.halves.at[warpgroup]
    half[...] = softmax.output(state).astype(half.dtype)

    @pl.when(warpgroup == 0)
    def _():
        smem.lse[...] = softmax.lse(state)

    plgpu.commit_smem()
    columns = pl.ds(warpgroup * sizes.heads.half, sizes.heads.half)
    rows = pl.ds(target * softmax.ROWS, softmax.ROWS)
    plgpu.copy_smem_to_gmem(half, refs.out.at[rows, columns])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.copy_smem_to_gmem(smem.lse, refs.lse.at[target])

    plgpu.wait_smem_to_gmem(0)


def _attend_tiles(sizes, row, tile, warpgroup, smem):
    """Return the softmax state of all queries, with one half of the values' features."""
    heads, block_kv = sizes.heads, sizes.heads.pages.block_kv
    weights_operand = None if smem.weights is None else smem.weights.at[warpgroup]
    kinds = len(heads.kinds)

    def mask(scores, base):
        query, position = (softmax.tile_iota(block_kv, i) for i in range(2))
        token = lax.div(tile * softmax.ROWS + query, jnp.int32(sizes.group))
        return jnp.where(position <= row.start + token - base, scores, -jnp.inf)

    def clear(values, base):
        """Zero unwritten values, and non-finite values of drafts.

        Keys that are values stay until both warpgroups have read them.
        """
        if kinds == 1:
            plgpu.barrier_arrive(smem.scored)
            plgpu.barrier_wait(smem.scored)
        tensor_cores.clear(values, 0, row.length - base, row.start + 1 - base)

    def stage_of(j, kind):
        # `zero` is 0, because slots of live rows are positive, and the compiler does not see it.
        # Without it keys would always be in one stage, and the compiler would keep the addresses of
        # all matmuls in registers.
        zero = jnp.minimum(row.slot + j, 0)
        return lax.rem(j * kinds + kind, _STAGES) + zero

    def release(j, kind):
        """Let the ring get another tile, if there is one, in place of the tile of this `kind`."""

        @pl.when(j * kinds + kind + _STAGES < row.count * kinds)
        def _():
            plgpu.barrier_arrive(smem.consumed.at[stage_of(j, kind)])

    def attend_tile(j, state):
        stage, base = stage_of(j, KEYS), (row.first + j) * block_kv
        plgpu.barrier_wait(smem.produced.at[stage])
        pairs = [
            (smem.queries.halves.at[i], smem.ring.halves.at[stage, i]) for i in range(_WARPGROUPS)
        ]
        if heads.shared:
            pairs.append((smem.queries.shared, smem.ring.shared.at[stage]))
        pairs = [(a, b.transpose((1, 0))) for a, b in pairs]
        scores = tensor_cores.sum_of_products(pairs, is_interpreted=smem.weights is not None)
        if kinds > 1:
            release(j, KEYS)
            stage = stage_of(j, VALUES)
        # A tile that every token attends to in full needs no mask.
        is_masked = base + block_kv > row.start + 1
        scores = lax.cond(is_masked, mask, lambda scores, base: scores, scores, base)
        weights, state = softmax.update(state, scores, heads.scale * softmax.LOG2E)
        if kinds > 1:
            plgpu.barrier_wait(smem.produced.at[stage])
        values = smem.ring.halves.at[stage, warpgroup]
        pl.when(is_masked)(lambda: clear(values, base))
        (acc,) = tensor_cores.accumulate(weights_operand, (state.acc, weights, values))
        release(j, heads.kinds[-1])
        return state._replace(acc=acc)

    return lax.fori_loop(0, row.count, attend_tile, softmax.empty(heads.half))
