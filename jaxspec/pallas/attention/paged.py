"""Paged attention of a decode rectangle, and the write of keys and values that precedes it."""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec import device
from jaxspec.pallas import dispatch
from jaxspec.pallas.attention.output_gate import OutputGate
from jaxspec.pallas.attention.paged_tiling import query_rows
from jaxspec.pallas.paging.kv_write import _KV

_FEWEST_TOKENS = 128  # of context that a CPU attends over


def paged_attention(
    queries: Float[Array, "rows width heads head_dim"],
    kv: _KV,
    layer: int,
    page_tables: Int[Array, "slots pages"],
    slots: Int[Array, " rows"],
    num_computed: Int[Array, " rows"],
    query_len: Int[Array, " rows"],
    gate: OutputGate | None = None,
) -> Float[Array, "rows width heads head_dim"]:
    """Causal attention of each row's `width` newest tokens over its pages, in the queries' dtype.

    Token `j` of a row stands at position `num_computed + j` and sees positions `0` to its own;
    `kv_write` has already stored them all. Query heads share keys in groups of `heads // kv_heads`;
    the scale is `head_dim ** -0.5`; scores and softmax are float32. Tokens `j >= query_len` and
    rows of the null slot come out as 0, never NaN. `gate`: of all `rows * width` tokens, what then
    multiplies their heads, padding's too.

    Raises:
        ValueError: `gate` is not for these tokens and heads.

    Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with
    PagedAttention".
    """
    rows, width, heads, head_dim = queries.shape
    if gate is not None:
        gate.check(rows * width, heads, head_dim)
    if dispatch.runs_kernel("paged_attention", _unsupported(queries, kv)):
        # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
        from jaxspec.pallas.attention.paged_kernel import attend

        on_device = dispatch.layer_index(kv, layer)
        return attend(queries, kv, on_device, page_tables, slots, num_computed, query_len, gate)
    on_cpu = device.default_device().platform == "cpu"
    attend = _attend_longest_row if on_cpu else paged_attention_reference
    out = attend(queries, kv, layer, page_tables, slots, num_computed, query_len)
    return out if gate is None else gate(out.reshape(-1, heads, head_dim)).reshape(out.shape)


def _attend_longest_row(queries, kv, layer, page_tables, slots, num_computed, query_len):
    """`paged_attention` for a CPU, which pays for every page, read or masked.

    The longest row bounds what is gathered. A GPU would have to ask the host which branch to take.
    """
    attend = functools.partial(_attend_first_pages, layer=layer)
    page_size, table_width = kv.shape[3], page_tables.shape[1]
    widths = [-(-_FEWEST_TOKENS // page_size)]
    while widths[-1] < table_width:
        widths.append(2 * widths[-1])
    widths[-1] = table_width
    live = (slots > 0) & (slots < page_tables.shape[0]) & (query_len > 0)
    length = jnp.max(jnp.where(live, num_computed + query_len, 0), initial=0)
    branch = jnp.sum(length > page_size * jnp.array(widths[:-1], jnp.int32))
    arguments = (queries, kv, page_tables, slots, num_computed, query_len)
    return jax.lax.switch(branch, [functools.partial(attend, w) for w in widths], *arguments)


def _attend_first_pages(num_pages, queries, kv, page_tables, slots, num_computed, query_len, layer):
    tables = page_tables[:, :num_pages]
    return paged_attention_reference(queries, kv, layer, tables, slots, num_computed, query_len)


def paged_attention_reference(queries, kv, layer, page_tables, slots, num_computed, query_len):
    """The specification of `paged_attention`: gather every page of the row, mask, softmax."""
    rows, width, heads, head_dim = queries.shape
    _, _, num_pages, page_size, kv_heads, _ = kv.shape
    num_slots = page_tables.shape[0]

    pages = jnp.clip(page_tables[jnp.clip(slots, 0, num_slots - 1)], 0, num_pages - 1)
    context = pages.shape[1] * page_size
    keys = kv[layer, 0, pages].reshape(rows, context, kv_heads, head_dim)
    values = kv[layer, 1, pages].reshape(rows, context, kv_heads, head_dim)

    query_len = jnp.where((slots > 0) & (slots < num_slots), query_len, 0)
    place = jnp.arange(context, dtype=jnp.int32)
    token = jnp.arange(width, dtype=jnp.int32)
    last = num_computed[:, None] + token[None, :]  # the newest position a token sees
    sees = (place[None, None, :] <= last[:, :, None]) & (token[None, :] < query_len[:, None])[
        :, :, None
    ]

    grouped = queries.reshape(rows, width, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "rwkgd,rckd->rkgwc",
        grouped,
        keys.astype(queries.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    sees = sees[:, None, None, :, :]
    scores = jnp.where(sees, scores * head_dim**-0.5, -jnp.inf)
    # A row of a padding token is all -inf: its maximum is replaced, and its sum is 0.
    peak = jnp.max(scores, axis=-1, keepdims=True)
    weights = jnp.exp(scores - jnp.where(jnp.isfinite(peak), peak, 0.0))
    total = jnp.sum(weights, axis=-1, keepdims=True)
    weights = weights / jnp.where(total > 0, total, 1.0)
    # Pages beyond the row's length hold what an earlier request left, perhaps not finite.
    length = jnp.where(query_len > 0, num_computed + query_len, 0)
    written = place[None, :] < length[:, None]
    values = jnp.where(written[:, :, None, None], values.astype(jnp.float32), 0.0)
    out = jnp.einsum("rkgwc,rckd->rwkgd", weights, values, precision="highest")
    return out.reshape(queries.shape).astype(queries.dtype)


def _unsupported(queries, kv):
    """Why the kernel does not take these operands, or None."""
    width, page_size, head_dim = queries.shape[1], kv.shape[3], kv.shape[5]
    group = queries.shape[2] // kv.shape[4]
    if width > 9:
        return f"{width} tokens a row, more than 9"
    taken = [("bfloat16", "bfloat16"), ("bfloat16", "float8_e4m3fn"), ("float32", "float32")]
    if (queries.dtype, kv.dtype) not in taken:
        return f"queries in {queries.dtype} over {kv.dtype}, which no kernel takes"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}, not 64, 128 or 256"
    most = query_rows(kv.dtype, head_dim)
    if group > most:
        return f"{group} heads that share a key head, more than {most}"
    if page_size < 16 or page_size % 8:
        return f"pages of {page_size}, no multiple of 8 from 16 on"
    return None
