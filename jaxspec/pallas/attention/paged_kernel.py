"""`paged_attention` on a Hopper GPU (Pallas, Mosaic GPU); import only where kernels run.

A block has one key head of one row, and of its positions one share (several shares then merge, as
in Flash-Decoding; Dao et al. 2023). The queries of all heads that share the key head, and of as
many tokens as there is room for, are the rows of one tile, so that keys and values are read once
for all of them. Their tiles come through a ring in shared memory, one TMA copy a page, the page
numbers read a tile ahead.
"""

import functools
import types

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention import output_gate, paged_block_float32
from jaxspec.pallas.attention import paged_block_bfloat16 as blocks
from jaxspec.pallas.attention import paged_block_float8 as blocks8
from jaxspec.pallas.attention.paged_block import Plan, Sizes, begin
from jaxspec.pallas.attention.paged_tiling import query_rows
from jaxspec.pallas.gpu import access, device, layouts
from jaxspec.pallas.paging.page_tiles import PageTiles


def plan_for(blocks: int, context: int, head_dim: int, itemsize: int, queries: int) -> Plan:
    """The plan for so many blocks a share, of tiles of so many queries; measured on an H200.

    Two blocks on a multiprocessor hide each other's waits better than a longer ring does, so where
    there may be two, rings of heads of 256 are one tile long; in 8 bits one more fits. Shares merge
    eight at once, so up to eight cost as much as two, if each has a tile.
    """
    fit = (1 if head_dim == 256 else 2) + (itemsize == 1)
    keys = 32 if itemsize == 4 else 128 if head_dim == 64 else 64
    most = max(8 * (context // (8 * keys)), context // 256)
    splits = max(1, min(fit * device.MULTIPROCESSORS // blocks, most, 64))
    # Queries as they come, eights of them, and as tensor cores want them; keys and values.
    of_one = 2 * head_dim * (-(-queries // 8) * 8 + softmax.ROWS + 2 * keys)
    fits_twice = of_one <= device.room(splits * blocks)
    may_be_two = head_dim == 256 and itemsize == 2 and splits * blocks > device.MULTIPROCESSORS
    return Plan(keys, 1 if may_be_two and fits_twice else 2, splits)


@functools.partial(jax.jit, static_argnames=("plan", "interpret"))
def attend(
    queries, kv, layer, page_tables, slots, num_computed, query_len, gate=None,
    *, plan=None, interpret=None,
):  # fmt: skip
    """`paged_attention` with `layer` on the device, so that all layers share one kernel.

    The last kernel gates, be it the one that merges shares. `interpret`: parameters of Mosaic's
    interpreter.
    """
    rows, width, heads, head_dim = queries.shape
    layers, _, num_pages, page_size, kv_heads, _ = kv.shape
    group = heads // kv_heads
    tokens = min(width, query_rows(kv.dtype, head_dim) // group)
    if plan is None:
        count, context = rows * kv_heads * -(-width // tokens), page_tables.shape[1] * page_size
        plan = plan_for(count, context, head_dim, kv.dtype.itemsize, tokens * group)
    pages = PageTiles(plan.keys, head_dim, num_pages, page_size, *page_tables.shape)
    sizes = Sizes(plan, width, group, tokens, pages)
    operands = {
        "queries": queries.reshape(-1, heads, head_dim),
        "pool": kv.reshape(layers * 2 * num_pages * page_size, kv_heads * head_dim),
        "layer": layer[None],
        "tables": page_tables,
        "slots": slots,
        "num_computed": num_computed,
        "query_len": query_len,
    }
    params = {} if interpret is None else {"interpret": interpret}
    # As heads with a gate behind the query, or four neighbouring gates of a thread.
    unit = 2 * head_dim if plan.splits == 1 else 4
    inside, gate = (None, gate) if gate and gate.projected.shape[1] % unit else (gate, None)
    if inside and plan.splits == 1:
        operands["gates"] = inside.projected.reshape(rows * width, -1, unit)
    launched = _launch(sizes, operands, kv_heads, params)
    if plan.splits > 1:
        shares, sums = launched
        out = _merge(sizes, shares, sums, inside, queries, params)
    else:
        (out,) = launched
    out = out.reshape(-1, heads, head_dim)
    return (out if gate is None else gate(out)).reshape(queries.shape)


def _launch(sizes, operands, kv_heads, params):
    """The output, or every share's, and log2 of the sum of its weights."""
    queries, pool = operands["queries"], operands["pool"]
    rows, dim = len(operands["slots"]), sizes.pages.head_dim
    tiles, in_8_bits = sizes.tiles, pool.dtype == jnp.float8_e4m3fn
    tensor_cores, reductions = queries.dtype != jnp.float32, 2048
    if in_8_bits:
        block, scratch, padded = blocks8.float8, blocks8.scratch(sizes, bool(params)), sizes.height
        reductions = 128 * sizes.height  # all queries at once
    elif tensor_cores:
        # No sum crosses warps, and the rings may need all of shared memory.
        block, scratch, padded = (
            blocks.bfloat16,
            blocks.scratch(sizes, bool(params)),
            softmax.ROWS,
        )
        reductions = 0
    else:
        block, scratch, padded = (
            paged_block_float32.float32,
            paged_block_float32.scratch32(sizes),
            sizes.height,
        )
    semantics = plgpu.LoweringSemantics
    names, out_type = ["out"], [jax.ShapeDtypeStruct(queries.shape, queries.dtype)]
    if sizes.plan.splits > 1:
        shares = -(-sizes.plan.splits // 8) * 8, rows, kv_heads  # `_merge` reads eight at once
        dtype = jnp.float16 if in_8_bits else queries.dtype
        names.append("sums")
        out_type = [
            jax.ShapeDtypeStruct((*shares, tiles * sizes.height, dim), dtype),
            jax.ShapeDtypeStruct((*shares, tiles, padded), jnp.float32),
        ]

    def body(*refs, **scratch):
        refs = dict(zip([*operands, *names], refs, strict=True))
        begin(sizes, block, types.SimpleNamespace(**{"gates": None, **refs}), **scratch)

    return plgpu.kernel(
        body,
        kernel_name="paged_attention",
        out_type=out_type,
        scratch_types=scratch,
        grid=(tiles, sizes.plan.splits, kv_heads, rows),
        grid_names=("tile", "split", "head", "row"),
        compiler_params=plgpu.CompilerParams(
            approx_math=tensor_cores,
            # float32: shared memory is written by copies alone. 8 bits: barriers are written out.
            unsafe_no_auto_barriers=in_8_bits or not tensor_cores,
            reduction_scratch_bytes=reductions,
            # Where layouts are inferred, jax 0.11.2 swizzles what lies side by side, too, and
            # `put_out` read a token's heads of 64, fewer than eight rows, from the wrong places.
            # In float32 all views are of one row, which keeps it plain.
            lowering_semantics=semantics.Lane if tensor_cores else semantics.Warpgroup,
        ),
        **params,
    )(*operands.values())


def _merge(sizes, out, sums, gate, queries, params):
    """One output of the shares', `[splits and more, rows, kv_heads, tiles of queries, head_dim]`.

    Its own kernel, since XLA makes three of it, and a launch is a tenth of a long row's time.
    """
    _, width, heads, dim = queries.shape
    group, splits = sizes.group, sizes.plan.splits
    layout = layouts.row_layout(dim, 4)  # sums across warps want vectors of 4
    along = layout.reduce(0)

    def body(out, sums, *rest):
        *gates, merged = rest
        row, token, head = (lax.axis_index(name) for name in ("row", "token", "head"))
        at = (slice(None), row, lax.div(head, group))
        tile, place = lax.div(token, sizes.tokens), lax.rem(token, sizes.tokens) * group
        place += lax.rem(head, group)
        parts = access.load(out.at[*at, tile * sizes.height + place], layout)
        parts = parts.astype(jnp.float32)
        sum_of = access.load(sums.at[*at, tile, place], layout.reduce(1))
        columns = pl.ds((2 * head + 1) * dim, dim)
        gates = [access.load(x.at[row * width + token, columns], along) for x in gates]
        share = plgpu.broadcasted_iota(jnp.int32, sum_of.shape, 0, layout=layout.reduce(1))
        sum_of = jnp.where(share < splits, sum_of, -jnp.inf)
        most = jnp.max(sum_of)
        weight = jnp.exp2(sum_of - jnp.where(most == -jnp.inf, 0.0, most))
        total = jnp.sum(weight)
        share = lax.broadcast_in_dim(share, parts.shape, (0,))
        parts = jnp.where(share < splits, parts, 0.0)  # nobody wrote the others
        result = jnp.sum(parts * lax.broadcast_in_dim(weight, parts.shape, (0,)), axis=0)
        result = result / jnp.where(total == 0, 1.0, total)
        for x in gates:
            result = output_gate.in_kernel(result, x)
        access.store(merged.at[row, token, head], result.astype(queries.dtype))

    return plgpu.kernel(
        body,
        kernel_name="paged_attention_merge",
        out_type=jax.ShapeDtypeStruct(queries.shape, queries.dtype),
        grid=queries.shape[:3],
        grid_names=("row", "token", "head"),
        compiler_params=plgpu.CompilerParams(
            unsafe_no_auto_barriers=True, reduction_scratch_bytes=8192
        ),
        **params,
    )(out, sums, *(() if gate is None else (gate.projected,)))
