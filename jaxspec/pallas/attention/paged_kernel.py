"""Pallas (Mosaic GPU) kernel of `paged_attention` for Hopper GPUs.

Each block handles one key head of one row, and one split of its positions; a second kernel merges
the splits (Flash-Decoding, Dao et al. 2023). Keys and values are read once for all query heads that
share a key head: these heads, for as many tokens as fit, are the rows of one query tile. Tiles of
keys and values pass through a ring in shared memory, with TMA copies that each stay within a page;
page numbers are read one tile ahead.
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

from jaxspec.pallas.attention import online_softmax_block as softmax
from jaxspec.pallas.attention import (
    output_gate,
    paged_block_bfloat16,
    paged_block_float8,
    paged_block_float32,
)
from jaxspec.pallas.attention.paged_block import Block, BlockSizes, Refs, run
from jaxspec.pallas.attention.paged_tiling import MERGED_AT_ONCE, choose_tiling, max_query_rows
from jaxspec.pallas.attention.ring_tables import PAGE
from jaxspec.pallas.gpu import access, layouts
from jaxspec.pallas.paging.page_tiles import PageTiles, flatten_pool, flatten_rings


@functools.partial(jax.jit, static_argnames=("window", "tiling", "interpret"))
def paged_attention_kernel(
    queries,
    kv,
    layer,
    page_tables,
    rows,
    gate=None,
    scales=None,
    sinks=None,
    *,
    window=None,
    tiling=None,
    interpret=None,
):
    """Run `paged_attention`; `tiling` None means that of `choose_tiling`.

    With a `window`, `kv` is a `WindowPool`, whose pages have `ring_tables.PAGE` positions, and a
    token attends to the `window` newest positions, its own included.

    With sinks a row has two splits or more: the merge adds a head's sink as one split more.
    """
    num_rows, width, heads, head_dim = queries.shape
    kv_heads = kv.shape[4]
    group = heads // kv_heads
    tokens = min(width, max_query_rows(kv.dtype, head_dim) // group)
    if tiling is None:
        blocks = num_rows * kv_heads * -(-width // tokens)
        context = page_tables.shape[1] * (kv.shape[3] if window is None else PAGE)
        tiling = choose_tiling(blocks, context, head_dim, kv.dtype.itemsize, tokens * group)
    if sinks is not None:
        tiling = dataclasses.replace(tiling, splits=max(2, tiling.splits))
    if window is None:
        pages = PageTiles.of(kv, page_tables, tiling.block_kv)
    else:
        pages = PageTiles.of_rings(kv, PAGE, page_tables, tiling.block_kv)
    sizes = BlockSizes(tiling, width, group, tokens, pages, window)
    operands = {
        "queries": queries.reshape(num_rows * width, heads, head_dim),
        "pool": flatten_pool(kv) if window is None else flatten_rings(kv),
        "layer": layer[None],
        "page_tables": page_tables,
        "slots": rows.slots,
        "num_computed": rows.num_computed,
        "query_len": rows.query_len,
    }
    if scales is not None:
        operands["scales"] = scales
    params = {} if interpret is None else {"interpret": interpret}
    # The last kernel applies the gate if the projection's columns divide into the units it reads:
    # pairs of query and gate heads, or vectors of four when merging. Otherwise XLA applies it.
    divisor = 2 * head_dim if tiling.splits == 1 else 4
    in_kernel, by_xla = gate, None
    if gate is not None and gate.projected.shape[1] % divisor:
        in_kernel, by_xla = None, gate
    if tiling.splits == 1:
        if in_kernel is not None:
            projected = in_kernel.projected
            by_head = num_rows * width, projected.shape[1] // divisor, divisor
            operands["gates"] = projected.reshape(by_head)
        (out,) = _attend(sizes, operands, kv_heads, params)
    else:
        out, lse = _attend(sizes, operands, kv_heads, params, has_sinks=sinks is not None)
        more = {"gates": in_kernel and in_kernel.projected, "scales": scales, "sinks": sinks}
        out = _merge(sizes, out, lse, more, queries, params)
    out = out.reshape(num_rows * width, heads, head_dim)
    return (out if by_xla is None else by_xla(out)).reshape(queries.shape)


class _DtypeBlock(NamedTuple):
    """Parts of the kernel that depend on the dtypes of queries and pool."""

    attend: Callable[[Block], None]
    smem: Any
    split_dtype: Any  # dtype of a split's output
    lse_rows: int  # rows per query tile in a split's log-sum-exp
    compiler_params: plgpu.CompilerParams


def _block_of(sizes, query_dtype, pool_dtype, interpreted) -> _DtypeBlock:
    """Return the block for these dtypes, which `why_not_kernel` has accepted."""
    # With inferred layouts (Warpgroup semantics), jax 0.11.2 also swizzles buffers that have no
    # transforms. `store_heads` would then read a token's heads of 64, fewer than eight rows, from
    # wrong addresses. In float32 all views have one row, so buffers are not swizzled.
    semantics = plgpu.LoweringSemantics
    if pool_dtype == jnp.float8_e4m3fn:
        return _DtypeBlock(
            attend=paged_block_float8.attend,
            smem=paged_block_float8.smem(sizes, interpreted),
            split_dtype=jnp.float16,
            lse_rows=sizes.query_rows,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=True,  # all barriers are explicit
                reduction_scratch_bytes=128 * sizes.query_rows,  # reduces all queries at once
                lowering_semantics=semantics.Lane,
            ),
        )
    if query_dtype == jnp.bfloat16:
        return _DtypeBlock(
            attend=paged_block_bfloat16.attend,
            smem=paged_block_bfloat16.smem(sizes, interpreted),
            split_dtype=query_dtype,
            lse_rows=paged_block_bfloat16.LSE_ROWS,
            compiler_params=plgpu.CompilerParams(
                approx_math=True,
                unsafe_no_auto_barriers=False,
                # No reduction crosses warps, and the rings may need all of shared memory.
                reduction_scratch_bytes=0,
                lowering_semantics=semantics.Lane,
            ),
        )
    return _DtypeBlock(
        attend=paged_block_float32.attend,
        smem=paged_block_float32.smem(sizes),
        split_dtype=query_dtype,
        lse_rows=sizes.query_rows,
        compiler_params=plgpu.CompilerParams(
            approx_math=False,
            unsafe_no_auto_barriers=True,  # only copies write smem, but for the output
            reduction_scratch_bytes=2048,
            lowering_semantics=semantics.Warpgroup,
        ),
    )


def _attend(sizes, operands, kv_heads, params, *, has_sinks=False):
    """Return the output or, with several splits, the output and log-sum-exp of each.

    With sinks there is room for one split more, which is not written.
    """
    queries, pool = operands["queries"], operands["pool"]
    num_rows, splits = len(operands["slots"]), sizes.tiling.splits
    block = _block_of(sizes, queries.dtype, pool.dtype, interpreted=bool(params))
    outputs = {"out": jax.ShapeDtypeStruct(queries.shape, queries.dtype)}
    if splits > 1:
        count = -(-(splits + has_sinks) // MERGED_AT_ONCE) * MERGED_AT_ONCE
        lead = count, num_rows, kv_heads
        row = sizes.query_tiles * sizes.query_rows, sizes.pages.head_dim
        outputs = {
            "out": jax.ShapeDtypeStruct((*lead, *row), block.split_dtype),
            "lse": jax.ShapeDtypeStruct((*lead, sizes.query_tiles, block.lse_rows), jnp.float32),
        }

    def body(*refs, smem):
        names = [*operands, *outputs]
        run(sizes, block.attend, Refs(**dict(zip(names, refs, strict=True))), smem)

    return plgpu.kernel(
        body,
        kernel_name="paged_attention",
        out_type=list(outputs.values()),
        scratch_types={"smem": block.smem},
        grid=(sizes.query_tiles, splits, kv_heads, num_rows),
        grid_names=("tile", "split", "head", "row"),
        compiler_params=block.compiler_params,
        **params,
    )(*operands.values())


def _merge(sizes, out, lse, more, queries, params):
    """Merge the outputs of all splits, and apply sinks, the scale of values and the gate, if any.

    `out` is `[splits, rows, kv_heads, query rows per row, head_dim]`; its first axis is padded to a
    multiple of `MERGED_AT_ONCE`, and the padding is not written. `more` are operands by name, None
    for those that there are not. This is one kernel because XLA would make three, and a launch
    takes a tenth of the time of a long row.
    """
    _, width, heads, dim = queries.shape
    group, splits = sizes.group, sizes.tiling.splits
    layout = layouts.row_layout(dim, 4)  # reductions across warps need vectors of 4
    per_split, per_channel = layout.reduce(1), layout.reduce(0)
    more = {name: operand for name, operand in more.items() if operand is not None}

    def body(out, lse, *more_and_merged):
        *operands, merged = more_and_merged
        given = dict(zip(more, operands, strict=True))
        gates, factors, sinks = map(given.get, ("gates", "scales", "sinks"))
        row, token, head = (lax.axis_index(name) for name in ("row", "token", "head"))
        kv_head = lax.div(head, group)
        tile, query_row = lax.div(token, sizes.tokens), lax.rem(token, sizes.tokens) * group
        query_row += lax.rem(head, group)
        parts = access.load(out.at[:, row, kv_head, tile * sizes.query_rows + query_row], layout)
        parts = parts.astype(jnp.float32)
        split_lse = access.load(lse.at[:, row, kv_head, tile, query_row], per_split)
        columns = pl.ds((2 * head + 1) * dim, dim)
        gate = None
        if gates is not None:
            gate = access.load(gates.at[row * width + token, columns], per_channel)
        split = plgpu.broadcasted_iota(jnp.int32, split_lse.shape, 0, layout=per_split)
        rest = -jnp.inf
        if sinks is not None:  # its values are zero, as those of padding
            rest = jnp.where(split == splits, sinks[head] * softmax.LOG2E, -jnp.inf)
        split_lse = jnp.where(split < splits, split_lse, rest)
        max_lse = jnp.max(split_lse)
        weight = jnp.exp2(split_lse - jnp.where(max_lse == -jnp.inf, 0.0, max_lse))
        total = jnp.sum(weight)
        split = lax.broadcast_in_dim(split, parts.shape, (0,))
        parts = jnp.where(split < splits, parts, 0.0)
        result = jnp.sum(parts * lax.broadcast_in_dim(weight, parts.shape, (0,)), axis=0)
        result = result / jnp.where(total == 0, 1.0, total)
        if factors is not None:
            result = result * factors[1]
        if gate is not None:
            result = output_gate.gate_in_kernel(result, gate)
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
    )(out, lse, *more.values())
