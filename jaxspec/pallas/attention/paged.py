"""Paged attention for the decode region of a step."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged_tiling import max_query_rows
from jaxspec.pallas.attention.references import Sinks, masked_softmax, over_longest_row
from jaxspec.pallas.paging.kv_write import KVPool, KVScales
from jaxspec.regions import DecodeRegion

WIDE = 512
"""Head size that runs `wide_kernel.py`, for decoding and for prompts."""

_MAX_KERNEL_WIDTH = 9
_KERNEL_DTYPES = (  # (queries, pool)
    ("bfloat16", "bfloat16"),
    ("bfloat16", "float8_e4m3fn"),
    ("float32", "float32"),
)


def paged_attention(
    queries: Float[Array, "rows width heads head_dim"],
    kv: KVPool,
    layer: int,
    page_tables: Int[Array, "slots pages"],
    rows: DecodeRegion,
    gate: OutputGate | None = None,
    scales: KVScales | None = None,
    sinks: Sinks | None = None,
) -> Float[Array, "rows width heads head_dim"]:
    """Causal attention of each row's `width` newest tokens over its pages, in the queries' dtype.

    Token `j` of a row is at position `rows.num_computed + j` and attends to positions `0` up to its
    own, all of which `kv_write` has already stored, divided by `scales` if there are any. Query
    heads share keys in groups of `heads // kv_heads`; scores are multiplied by `head_dim ** -0.5`;
    scores and softmax are float32, with `sinks` if there are any (`masked_softmax`). The output of
    padding (tokens `j >= rows.query_len`, and rows that are not live) is 0, never NaN. `gate`, over
    all `rows * width` tokens, then multiplies all heads, including those of padding.

    The tokens after a row's first are drafts, and a draft that the target rejects may be NaN. Its
    non-finite values count as 0, so that the tokens before it are unaffected. Its keys are NaN as
    well, so every token that attends to it becomes NaN. With 8-bit pages the kernel does not
    protect earlier tokens in this way: no registers are left for it.

    Raises:
        ValueError: `gate` does not match the tokens or heads.

    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention".
    """
    num_rows, width, heads, head_dim = queries.shape
    if gate is not None:
        gate.check(num_rows * width, heads, head_dim)
    if head_dim == WIDE:
        why = why_not_wide_kernel(queries, kv, scales, sinks)
    else:
        why = why_not_kernel(queries, kv, kv.shape[3], scales)
    if not dispatch.runs_kernel("paged_attention", why, rows=num_rows):

        def attend(tables):
            return paged_attention_reference(queries, kv, layer, tables, rows, scales, sinks)

        out = over_longest_row(attend, page_tables, rows, kv.shape[3])
    elif head_dim == WIDE:
        from jaxspec.pallas.attention.wide_kernel import wide_attention_kernel

        on_device = dispatch.layer_index(kv, layer)
        out = wide_attention_kernel(queries, kv, on_device, page_tables, rows)
    else:
        from jaxspec.pallas.attention.paged_kernel import paged_attention_kernel

        on_device = dispatch.layer_index(kv, layer)
        return paged_attention_kernel(
            queries, kv, on_device, page_tables, rows, gate, scales, sinks
        )
    if gate is None:
        return out
    return gate(out.reshape(num_rows * width, heads, head_dim)).reshape(out.shape)


def paged_attention_reference(queries, kv, layer, page_tables, rows, scales=None, sinks=None):
    """Reference for `paged_attention`: gather every page of the row, mask, softmax."""
    num_rows, width, heads, head_dim = queries.shape
    _, _, num_pages, page_size, kv_heads, _ = kv.shape
    num_slots = page_tables.shape[0]

    pages = jnp.clip(page_tables[jnp.clip(rows.slots, 0, num_slots - 1)], 0, num_pages - 1)
    context = pages.shape[1] * page_size
    keys = kv[layer, 0, pages].reshape(num_rows, context, kv_heads, head_dim)
    values = kv[layer, 1, pages].reshape(num_rows, context, kv_heads, head_dim)

    query_len = jnp.where(rows.is_live(num_slots), rows.query_len, 0)
    position = jnp.arange(context, dtype=jnp.int32)
    token = jnp.arange(width, dtype=jnp.int32)
    newest = rows.num_computed[:, None] + token[None, :]  # last position visible to each token
    is_real = token[None, :] < query_len[:, None]
    sees = (position[None, None, :] <= newest[:, :, None]) & is_real[:, :, None]

    grouped = queries.reshape(num_rows, width, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "rwkgd,rckd->rkgwc",
        grouped,
        keys.astype(queries.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    scores = scores * softmax_factor(head_dim, scales)
    scores = jnp.where(sees[:, None, None, :, :], scores, -jnp.inf)
    weights = masked_softmax(scores, sinks)
    # Pages beyond the row's length may hold non-finite values of an earlier request.
    length = jnp.where(query_len > 0, rows.num_computed + query_len, 0)
    written = (position[None, :] < length[:, None])[:, :, None, None]
    is_draft = (position[None, :] > rows.num_computed[:, None])[:, :, None, None]
    values = values.astype(jnp.float32)
    values = jnp.where(written & (~is_draft | jnp.isfinite(values)), values, 0.0)
    out = jnp.einsum("rkgwc,rckd->rwkgd", weights, values, precision="highest")
    out = out if scales is None else out * scales[1]
    return out.reshape(queries.shape).astype(queries.dtype)


def softmax_factor(head_dim: int, scales: KVScales | None) -> float | Float[Array, ""]:
    """Return the factor of products of queries and stored keys."""
    return head_dim**-0.5 if scales is None else head_dim**-0.5 * scales[0]


def why_not_kernel(queries, kv, page_size, scales):
    """Return the reason why the kernel does not take these operands; None if it does.

    `kv` is a `KVPool` or a `WindowPool`, whose last axes are the same.
    """
    width, head_dim = queries.shape[1], kv.shape[5]
    group = queries.shape[2] // kv.shape[4]
    if width > _MAX_KERNEL_WIDTH:
        return f"{width} tokens a row, more than {_MAX_KERNEL_WIDTH}"
    if (queries.dtype, kv.dtype) not in _KERNEL_DTYPES:
        return f"queries in {queries.dtype} over {kv.dtype}, which no kernel takes"
    if scales is not None and kv.dtype != jnp.float8_e4m3fn:
        return f"scaled keys and values in {kv.dtype}"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}, not 64, 128 or 256"
    max_group = max_query_rows(kv.dtype, head_dim)
    if group > max_group:
        return f"{group} heads that share a key head, more than {max_group}"
    return why_not_page_size(page_size)


def why_not_page_size(page_size: int) -> str | None:
    """Return the reason why kernels do not read pages of `page_size`; None if they do."""
    if page_size < 16 or page_size % 8:
        return f"pages of {page_size}, no multiple of 8 from 16 on"
    return None


def why_not_wide_kernel(queries, kv, scales, sinks) -> str | None:
    """Return the reason why the kernel does not take heads of 512; None if it does."""
    if queries.dtype != jnp.bfloat16 or kv.dtype != jnp.bfloat16:
        return f"heads of {WIDE}: queries in {queries.dtype} over {kv.dtype}, not bfloat16"
    if scales is not None or sinks is not None:
        return f"heads of {WIDE} with scales or sinks"
    return why_not_page_size(kv.shape[3])
