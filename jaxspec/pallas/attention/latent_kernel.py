"""Pallas (Mosaic GPU) kernel of `latent_attention` for Hopper GPUs.

Each block handles `softmax.ROWS` queries of one row, of all its tokens and heads, and one split of
its positions. The kernel is warp-specialised: a third warpgroup copies tiles of latents into a ring
in shared memory, and two warpgroups compute. Both compute the scores of all queries, and each adds
up one half of the values' features: the sums of 512 features for 64 queries do not fit into the
registers of one warpgroup. A tile is read once, as keys and as values.
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
from jaxspec.pallas.paging.page_tiles import PageTiles
from jaxspec.regions import real_tokens

_BLOCK_KV = 64  # positions per tile; registers and shared memory limit them
_STAGES = 2  # tiles in the ring, which fill shared memory
_WARPGROUPS = 2  # warpgroups that compute, each one half of the values' features
_REGISTERS = 232, 40  # per thread of computing and of copying warpgroups
_MAX_SPLITS = 32
_LEAST_POSITIONS = 256  # per split


@dataclasses.dataclass(frozen=True)
class _BlockSizes:
    pages: PageTiles
    width: int  # tokens per row
    heads: int
    half: int  # features per half of a value
    shared: int  # features of a key after those of the value
    splits: int
    scale: float

    @property
    def tiles(self) -> int:
        """Query tiles per row."""
        return -(-self.width * self.heads // softmax.ROWS)


class _Refs(NamedTuple):
    """Operands and outputs in global memory."""

    queries: Any  # [rows * tiles * ROWS, features]
    pool: Any  # [layers * pages * page_size, features]
    layer: Any  # [1]
    page_tables: Any  # [slots, pages]
    slots: Any  # [rows], like the next two
    num_computed: Any
    query_len: Any
    out: Any  # [splits * rows * tiles * ROWS, value_dim]
    lse: Any  # [splits * rows * tiles, ROWS], in base 2


class _Parts(NamedTuple):
    """Rows of queries or latents in shared memory."""

    halves: Any  # [..., _WARPGROUPS, rows, half]: those of the value
    shared: Any  # [..., rows, shared]


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
    """Run `latent_attention` without an index; `splits` None means `_choose_splits`."""
    num_rows, width, heads, features = queries.shape
    layers, num_pages, page_size, _ = latents.shape
    pages = PageTiles(_BLOCK_KV, features, num_pages, page_size, *page_tables.shape)
    tiles = -(-width * heads // softmax.ROWS)
    splits = splits or _choose_splits(num_rows * tiles, pages.context)
    half, shared = value_dim // _WARPGROUPS, features - value_dim
    sizes = _BlockSizes(pages, width, heads, half, shared, splits, scale)
    of_row, padded = width * heads, tiles * softmax.ROWS
    flat = queries.reshape(num_rows, of_row, features)
    flat = jnp.pad(flat, ((0, 0), (0, padded - of_row), (0, 0)))
    operands = {
        "queries": flat.reshape(num_rows * padded, features),
        "pool": latents.reshape(layers * num_pages * page_size, features),
        "layer": layer[None],
        "page_tables": page_tables,
        "slots": rows.slots,
        "num_computed": rows.num_computed,
        "query_len": rows.query_len,
    }
    out, lse = _attend(sizes, operands, num_rows, interpret)
    out = out.reshape(splits, num_rows, padded, value_dim)
    out = _merged(out, lse.reshape(splits, num_rows, padded)) if splits > 1 else out[0]
    out = out[:, :of_row].reshape(num_rows, width, heads, value_dim)
    # XLA fuses this with the caller's next operation.
    query_len = jnp.where(rows.is_live(page_tables.shape[0]), rows.query_len, 0)
    return jnp.where(real_tokens(query_len, width)[:, :, None, None], out, 0)


def _choose_splits(blocks: int, context: int) -> int:
    """Return how many blocks share a row's positions: as many as run side by side."""
    useful = min(context // _LEAST_POSITIONS, _MAX_SPLITS)
    return max(1, min(device.MULTIPROCESSORS // blocks, useful))


def _merged(out, lse):
    """Merge the outputs of splits `[splits, rows, queries, value_dim]` by their log-sum-exps."""
    largest = jnp.max(lse, axis=0, keepdims=True)
    weight = jnp.exp2(lse - jnp.where(largest == -jnp.inf, 0.0, largest))
    total = jnp.sum(weight, axis=0, keepdims=True)
    weight = weight / jnp.where(total == 0, 1.0, total)
    return jnp.sum(out.astype(jnp.float32) * weight[..., None], axis=0).astype(out.dtype)


def _attend(sizes, operands, num_rows, interpret):
    """Return the output and the log-sum-exp of each split."""
    tiles = sizes.splits * num_rows * sizes.tiles
    value_dim, dtype = _WARPGROUPS * sizes.half, operands["queries"].dtype
    outputs = {
        "out": jax.ShapeDtypeStruct((tiles * softmax.ROWS, value_dim), dtype),
        "lse": jax.ShapeDtypeStruct((tiles, softmax.ROWS), jnp.float32),
    }

    def body(*refs, smem):
        names = [*operands, *outputs]
        _run_block(sizes, _Refs(**dict(zip(names, refs, strict=True))), smem)

    return plgpu.kernel(
        body,
        kernel_name="latent_attention",
        out_type=list(outputs.values()),
        scratch_types={"smem": _smem(sizes, interpret is not None)},
        grid=(sizes.tiles, sizes.splits, num_rows),
        grid_names=("tile", "split", "row"),
        num_threads=_WARPGROUPS + 1,
        thread_name="warpgroup",
        # No reduction crosses warps, and the ring needs nearly all of shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **({} if interpret is None else {"interpret": interpret}),
    )(*operands.values())


def _smem(sizes, interpreted) -> _Smem:
    copies = _BLOCK_KV // sizes.pages.copy_size * (_WARPGROUPS + 1)
    spare = tensor_cores.tile(_WARPGROUPS, softmax.ROWS, _BLOCK_KV)
    return _Smem(
        q_produced=plgpu.Barrier(num_arrivals=_WARPGROUPS + 1),
        produced=plgpu.Barrier(num_arrivals=copies, num_barriers=_STAGES),
        scored=plgpu.Barrier(num_arrivals=_WARPGROUPS),
        consumed=plgpu.Barrier(num_arrivals=_WARPGROUPS, num_barriers=_STAGES),
        attended=plgpu.Barrier(num_arrivals=_WARPGROUPS),
        queries=_Parts(
            tensor_cores.tile(_WARPGROUPS, softmax.ROWS, sizes.half),
            tensor_cores.tile(softmax.ROWS, sizes.shared),
        ),
        ring=_Parts(
            tensor_cores.tile(_STAGES, _WARPGROUPS, _BLOCK_KV, sizes.half),
            tensor_cores.tile(_STAGES, _BLOCK_KV, sizes.shared),
        ),
        lse=plgpu.SMEM((softmax.ROWS,), jnp.float32),
        weights=spare if interpreted else None,
    )


def _run_block(sizes, refs, smem):
    axes = "tile", "split", "row", "warpgroup"
    tile, split, row, warpgroup = (lax.axis_index(name) for name in axes)
    found = _read_row(sizes, refs, split, row)
    num_rows = refs.slots.shape[0]

    @pl.when(warpgroup == _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_REGISTERS[1], action="decrease")
        start = (row * sizes.tiles + tile) * softmax.ROWS
        _fetch(sizes, refs.queries, start, softmax.ROWS, smem.queries, 0, smem.q_produced)
        _copy(sizes, found, refs, smem)

    @pl.when(warpgroup < _WARPGROUPS)
    def _():
        plgpu.set_max_registers(_REGISTERS[0], action="increase")
        target = (split * num_rows + row) * sizes.tiles + tile
        _compute(sizes, found, tile, target, warpgroup, refs, smem)


def _read_row(sizes, refs, split, row) -> _Row:
    pages, slot = sizes.pages, refs.slots[row]
    live = (slot > 0) & (slot < pages.num_slots)
    # Clamped so that sums do not overflow.
    start = jnp.clip(refs.num_computed[row], -sizes.width, pages.context)
    query_len = jnp.where(live, jnp.clip(refs.query_len[row], 0, sizes.width), 0)
    length = jnp.where(query_len > 0, jnp.clip(start + query_len, 0, pages.context), 0)
    row_tiles = lax.div(length + _BLOCK_KV - 1, _BLOCK_KV)
    split_tiles = lax.div(row_tiles + sizes.splits - 1, sizes.splits)
    first = split * split_tiles
    count = jnp.clip(row_tiles - first, 0, split_tiles)
    return _Row(slot, start, length, first, count)


def _fetch(sizes, source, start, count, target, place, produced):
    """Start copying `count` rows of all features, from `start` to row `place` of `target`."""
    rows, into = pl.ds(start, count), pl.ds(place, count)
    for half in range(_WARPGROUPS):
        columns = pl.ds(half * sizes.half, sizes.half)
        to = target.halves.at[half, into]
        plgpu.copy_gmem_to_smem(source.at[rows, columns], to, produced)
    columns = pl.ds(_WARPGROUPS * sizes.half, sizes.shared)
    plgpu.copy_gmem_to_smem(source.at[rows, columns], target.shared.at[into], produced)


def _copy(sizes, row, refs, smem):
    """Fill the ring, each stage as soon as both warpgroups have read it."""
    pages, layer = sizes.pages, refs.layer[0]

    @pl.loop(0, row.count)
    def _(j):
        stage, tile = lax.rem(j, _STAGES), row.first + j
        found = pages.find_pages(refs.page_tables, row.slot, tile)  # overlaps with the wait below

        @pl.when(j >= _STAGES)
        def _():
            plgpu.barrier_wait(smem.consumed.at[stage])

        target = _Parts(smem.ring.halves.at[stage], smem.ring.shared.at[stage])
        for i, page in enumerate(found):
            place = i * pages.copy_size
            start = (layer * pages.num_pages + page) * pages.page_size
            if pages.page_size > pages.copy_size:
                start += lax.rem(tile * _BLOCK_KV + place, pages.page_size)
            produced = smem.produced.at[stage]
            _fetch(sizes, refs.pool, start, pages.copy_size, target, place, produced)


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
    columns = pl.ds(warpgroup * sizes.half, sizes.half)
    rows = pl.ds(target * softmax.ROWS, softmax.ROWS)
    plgpu.copy_smem_to_gmem(half, refs.out.at[rows, columns])

    @pl.when(warpgroup == 0)
    def _():
        plgpu.copy_smem_to_gmem(smem.lse, refs.lse.at[target])

    plgpu.wait_smem_to_gmem(0)


def _attend_tiles(sizes, row, tile, warpgroup, smem):
    """Return the softmax state of all queries, with one half of the values' features."""
    weights_operand = None if smem.weights is None else smem.weights.at[warpgroup]

    def mask(scores, base):
        query, position = (softmax.tile_iota(_BLOCK_KV, i) for i in range(2))
        token = lax.div(tile * softmax.ROWS + query, jnp.int32(sizes.heads))
        return jnp.where(position <= row.start + token - base, scores, -jnp.inf)

    def clear(values, base):
        """Zero what is not written and what drafts have that is not finite; keys stay for both."""
        plgpu.barrier_arrive(smem.scored)
        plgpu.barrier_wait(smem.scored)
        tensor_cores.clear(values, 0, row.length - base, row.start + 1 - base)

    def attend_tile(j, state):
        stage, base = lax.rem(j, _STAGES), (row.first + j) * _BLOCK_KV
        plgpu.barrier_wait(smem.produced.at[stage])
        keys = [smem.ring.halves.at[stage, half] for half in range(_WARPGROUPS)]
        keys.append(smem.ring.shared.at[stage])
        queries = [smem.queries.halves.at[half] for half in range(_WARPGROUPS)]
        queries.append(smem.queries.shared)
        scores = _scores(queries, keys, is_interpreted=smem.weights is not None)
        # A tile that every token attends to in full needs no mask.
        is_masked = base + _BLOCK_KV > row.start + 1
        scores = lax.cond(is_masked, mask, lambda scores, base: scores, scores, base)
        weights, state = softmax.update(state, scores, sizes.scale * softmax.LOG2E)
        values = smem.ring.halves.at[stage, warpgroup]
        pl.when(is_masked)(lambda: clear(values, base))
        (acc,) = tensor_cores.accumulate(weights_operand, (state.acc, weights, values))
        is_refilled = j + _STAGES < row.count
        pl.when(is_refilled)(lambda: plgpu.barrier_arrive(smem.consumed.at[stage]))
        return state._replace(acc=acc)

    return lax.fori_loop(0, row.count, attend_tile, softmax.empty(sizes.half))


def _scores(queries, keys, *, is_interpreted):
    """Return the products of queries and keys, whose features are in several parts."""
    pairs = [(a, b.transpose((1, 0))) for a, b in zip(queries, keys, strict=True)]
    if is_interpreted:
        return sum(tensor_cores.product(a, b) for a, b in pairs)

    def run(acc):
        for a, b in pairs:
            plgpu.wgmma(acc, a, b)
        return acc[...]

    shape = softmax.ROWS, _BLOCK_KV
    return pl.run_scoped(run, plgpu.WGMMAAccumulatorRef(shape, jnp.float32))
