"""`paged_attention` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block has one key head of one row, and of its positions one share (`splits` blocks then merge, as
in Flash-Decoding; Dao et al. 2023). The queries of all tokens and of all heads that share the key
head are the rows of one tile, so that keys and values are read once for all of them. Their tiles
come through a ring in shared memory, one TMA copy a page, the page numbers read a tile ahead.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

ROWS = 64  # of a tile of queries, what wgmma takes
_LOG2E = math.log2(math.e)


@dataclasses.dataclass(frozen=True)
class Plan:
    """How the work is cut: positions in a tile, tiles in the ring, blocks that share a row."""

    keys: int
    stages: int
    splits: int


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Static sizes a block knows."""

    plan: Plan
    width: int
    group: int
    head_dim: int
    layers: int
    num_pages: int
    page_size: int
    num_slots: int
    table: int  # pages of a row in the table

    @property
    def piece(self) -> int:
        """Positions one copy brings: they lie in one page."""
        return math.gcd(self.plan.keys, self.page_size)


def plan_for(rows: int, kv_heads: int, tiles: int, context: int, head_dim: int) -> Plan:
    """The plan for these shapes, from measurements on an H200 (132 multiprocessors)."""
    blocks, fit = rows * kv_heads * tiles, 1 if head_dim == 256 else 2
    most = max(1, context // 256)  # a share below 256 positions is not worth its merge
    return Plan(64, 3, max(1, min(fit * 132 // blocks, most)))


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def attend(
    queries, kv, layer, page_tables, slots, num_computed, query_len, *, plan=None, interpret=None
):
    """`paged_attention` with `layer` on the device, so that all layers share one kernel.

    `interpret`: parameters of Mosaic's interpreter.
    """
    rows, width, heads, head_dim = queries.shape
    layers, _, num_pages, page_size, kv_heads, _ = kv.shape
    group = heads // kv_heads
    packed = width * group
    tiles = -(-packed // ROWS)
    height = ROWS if tiles > 1 else -(-packed // 8) * 8
    if plan is None:
        plan = plan_for(rows, kv_heads, tiles, page_tables.shape[1] * page_size, head_dim)
    sizes = _Sizes(
        *(plan, width, group, head_dim, layers, num_pages, page_size), *page_tables.shape
    )
    tile = queries.reshape(rows, width, kv_heads, group, head_dim).transpose(0, 2, 1, 3, 4)
    tile = tile.reshape(rows, kv_heads, packed, head_dim)
    tile = jnp.pad(tile, ((0, 0), (0, 0), (0, tiles * height - packed), (0, 0)))
    pool = kv.reshape(layers * 2 * num_pages * page_size, kv_heads * head_dim)
    indices = (layer[None], page_tables, slots, num_computed, query_len)
    out, weight = _launch(sizes, tile, pool, indices, (rows, kv_heads, tiles, height), interpret)
    out = _merge(out, weight[..., :height].reshape(*out.shape[:-1]))[:, :, :packed]
    out = out.reshape(rows, kv_heads, width, group, head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(queries.shape).astype(queries.dtype)


def _merge(out, weight):
    """The shares' outputs `[splits, rows, heads, packed, dim]`, by log2 of their weights' sums."""
    if out.shape[0] == 1:
        return out[0]
    most = jnp.max(weight, axis=0, keepdims=True)
    scale = jnp.exp2(weight - jnp.where(jnp.isfinite(most), most, 0.0))
    total = jnp.sum(scale, axis=0)
    merged = jnp.sum(out.astype(jnp.float32) * scale[..., None], axis=0)
    return merged / jnp.where(total > 0, total, 1.0)[..., None]


def _launch(sizes, tile, pool, indices, grid, interpret):
    """The kernel on its grid: outputs of every share, and log2 of its weights' sum."""
    rows, kv_heads, tiles, height = grid
    plan, dim, dtype = sizes.plan, sizes.head_dim, tile.dtype
    swizzled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))
    ring = plgpu.SMEM((plan.stages, plan.keys, dim), dtype, transforms=swizzled)
    arrived = plgpu.Barrier(num_arrivals=plan.keys // sizes.piece, num_barriers=plan.stages)
    scratch = {
        "tile": plgpu.SMEM((ROWS, dim), dtype, transforms=swizzled),
        "keys": ring,
        "values": ring,
        "sums": plgpu.SMEM((ROWS,), jnp.float32),
        "arrived": (plgpu.Barrier(), arrived, arrived),
    }
    if interpret is not None:
        scratch["weights"] = plgpu.SMEM((ROWS, plan.keys), dtype, transforms=swizzled)
    kernel = plgpu.kernel(
        functools.partial(_block, sizes, height),
        out_type=[
            jax.ShapeDtypeStruct((plan.splits, rows, kv_heads, tiles * height, dim), dtype),
            jax.ShapeDtypeStruct((plan.splits, rows, kv_heads, tiles, ROWS), jnp.float32),
        ],
        scratch_types=scratch,
        grid=(tiles, plan.splits, kv_heads, rows),
        grid_names=("tile", "split", "head", "row"),
        # No sum crosses warps, and at a head dim of 256 the rings need all of shared memory.
        compiler_params=plgpu.CompilerParams(approx_math=True, reduction_scratch_bytes=0),
        **({} if interpret is None else {"interpret": interpret}),
    )
    return kernel(tile, pool, *indices)


def _span(sizes, split, slot, start, count):
    """First tile of this share, tiles in it, the row's length, and its tokens; 0 for padding."""
    plan, context = sizes.plan, sizes.table * sizes.page_size
    live = (slot > 0) & (slot < sizes.num_slots)
    count = jnp.where(live, jnp.clip(count, 0, sizes.width), 0)
    length = jnp.where(count > 0, jnp.clip(start + count, 0, context), 0)
    tiles = lax.div(length + plan.keys - 1, plan.keys)
    share = lax.div(tiles + plan.splits - 1, plan.splits)
    first = split * share
    return first, jnp.clip(tiles - first, 0, share), length, count


def _block(
    sizes, height, queries, pool, layer, tables, slots, num_computed, query_len, out, sums_out,
    *, tile, keys, values, sums, arrived, weights=None
):  # fmt: skip
    """One block: `height` queries over one share of the positions of one key head of one row."""
    part, split, head, row = (lax.axis_index(name) for name in ("tile", "split", "head", "row"))
    plan, dim = sizes.plan, sizes.head_dim
    here, keys_here, values_here = arrived
    rows = pl.ds(part * height, height)
    plgpu.copy_gmem_to_smem(queries.at[row, head, rows], tile.at[pl.ds(0, height)], here)

    # Clamped: a row's position is not trusted either, and must not overflow.
    start = jnp.clip(num_computed[row], -sizes.width, sizes.table * sizes.page_size)
    slot = slots[row]
    first, count, length, tokens = _span(sizes, split, slot, start, query_len[row])
    slot = jnp.clip(slot, 0, sizes.num_slots - 1)
    find = functools.partial(_pages, sizes, tables, slot)
    fetch = functools.partial(_fetch, sizes, pool, layer[0], head)

    for stage in range(plan.stages):

        @pl.when(stage < count)
        def _(stage=stage):
            pages = find(first + stage)
            fetch(0, first + stage, pages, keys.at[stage], keys_here.at[stage])
            fetch(1, first + stage, pages, values.at[stage], values_here.at[stage])

    token = lax.div(_iota(plan.keys, 0) + part * ROWS, jnp.int32(sizes.group))
    sees = jnp.where(token < tokens, start + token, -1)  # the newest position that a row sees
    place = _iota(plan.keys, 1)
    plgpu.barrier_wait(here)

    def step(j, carry):
        acc, peak, total, pages = carry
        stage, base, again = lax.rem(j, plan.stages), (first + j) * plan.keys, j + plan.stages
        plgpu.barrier_wait(keys_here.at[stage])
        scores = _product(tile, keys.at[stage].transpose((1, 0)))

        @pl.when(again < count)
        def _():
            fetch(0, first + again, pages, keys.at[stage], keys_here.at[stage])

        scores = jnp.where(place <= sees - base, scores * (dim**-0.5 * _LOG2E), -jnp.inf)
        new = jnp.maximum(peak, scores.max(axis=1))
        safe = jnp.where(new == -jnp.inf, 0.0, new)
        weight = jnp.exp2(scores - lax.broadcast_in_dim(safe, scores.shape, (0,)))
        fade = jnp.exp2(peak - safe)
        total = total * fade + weight.sum(axis=1)
        acc = acc * lax.broadcast_in_dim(fade, acc.shape, (0,))
        plgpu.barrier_wait(values_here.at[stage])

        @pl.when(base + plan.keys > length)
        def _():
            _clear(values.at[stage], length - base)

        acc = _accumulate(acc, weight.astype(tile.dtype), values.at[stage], weights)

        @pl.when(again < count)
        def _():
            fetch(1, first + again, pages, values.at[stage], values_here.at[stage])

        return acc, new, total, find(first + again + 1)

    column = plgpu.Layout.WGMMA.reduce(1)
    carry = (
        _full((ROWS, dim), 0.0, plgpu.Layout.WGMMA),
        _full((ROWS,), -jnp.inf, column),
        _full((ROWS,), 0.0, column),
        find(first + plan.stages),
    )
    acc, peak, total, _ = lax.fori_loop(0, count, step, carry)
    some = jnp.where(total > 0, total, 1.0)
    tile[...] = (acc / lax.broadcast_in_dim(some, acc.shape, (0,))).astype(tile.dtype)
    sums[...] = peak + jnp.log(some) * _LOG2E
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(tile.at[pl.ds(0, height)], out.at[split, row, head, rows])
    plgpu.copy_smem_to_gmem(sums, sums_out.at[split, row, head, part])
    plgpu.wait_smem_to_gmem(0)


def _pages(sizes, tables, slot, tile):
    """The pages of a tile, one a copy; beyond the table its last, beyond the pool its last."""
    places = [tile * sizes.plan.keys + i for i in range(0, sizes.plan.keys, sizes.piece)]
    entries = [jnp.minimum(lax.div(x, sizes.page_size), sizes.table - 1) for x in places]
    return tuple(jnp.clip(tables[slot, entry], 0, sizes.num_pages - 1) for entry in entries)


def _fetch(sizes, pool, layer, head, which, tile, pages, stage, arrived):
    """Start copying a tile of keys (`which` 0) or values (1)."""
    for i, page in enumerate(pages):
        begin = ((layer * 2 + which) * sizes.num_pages + page) * sizes.page_size
        if sizes.page_size > sizes.piece:
            begin += lax.rem(tile * sizes.plan.keys + i * sizes.piece, sizes.page_size)
        plgpu.copy_gmem_to_smem(
            pool.at[pl.ds(begin, sizes.piece), pl.ds(head * sizes.head_dim, sizes.head_dim)],
            stage.at[pl.ds(i * sizes.piece, sizes.piece)],
            arrived,
        )


def _product(a, b):
    """`a @ b` in float32."""

    def run(acc):
        plgpu.wgmma(acc, a, b)
        return acc[...]

    return pl.run_scoped(run, plgpu.ACC((a.shape[0], b.shape[1]), jnp.float32))


def _accumulate(acc, weight, values, weights):
    """`acc + weight @ values`; `weights` is shared memory where the interpreter runs.

    It knows neither wgmma on a given accumulator nor an operand in registers.
    """
    if weights is not None:
        weights[...] = weight
        plgpu.commit_smem()
        return acc + _product(weights, values)
    return pl.run_state(lambda ref: plgpu.wgmma(ref, weight, values))(plgpu.ACC.init(acc))


def _clear(values, live):
    """Zero from row `live` on: what others left there may not be finite, and 0 * NaN is NaN."""
    place = plgpu.broadcasted_iota(jnp.int32, (values.shape[0], 64), 0, layout=plgpu.Layout.WGMMA)
    for column in range(0, values.shape[1], 64):
        part = values.at[:, pl.ds(column, 64)]
        part[...] = jnp.where(place < live, part[...], jnp.zeros((), values.dtype))
    plgpu.commit_smem()


def _iota(keys, dimension):
    return plgpu.broadcasted_iota(jnp.int32, (ROWS, keys), dimension, layout=plgpu.Layout.WGMMA)


def _full(shape, value, layout):
    return plgpu.layout_cast(jnp.full(shape, value, jnp.float32), layout)
