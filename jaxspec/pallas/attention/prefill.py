"""Prefill attention: chunks of prompts laid flat, each over its earlier context and itself."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jaxspec.pallas import dispatch

_TILE = 64  # queries handled at once; a tile never spans two sequences


def prefill_attention(
    queries: Float[Array, "tokens heads head_dim"],
    kv: Float[Array, "layers 2 pages page_size kv_heads head_dim"],
    layer: int,
    page_tables: Int[Array, "slots pages"],
    slots: Int[Array, " seqs"],
    num_computed: Int[Array, " seqs"],
    query_start: Int[Array, " seqs+1"],
) -> Float[Array, "tokens heads head_dim"]:
    """Causal attention of every token over its own sequence, in the queries' dtype.

    Sequence `s` is `query_start[s]:query_start[s + 1]`; its token `j` stands at position
    `num_computed[s] + j` and sees positions `0` to its own in the pages of request slot `slots[s]`,
    where `kv_write` has already stored this step's. Scale `head_dim ** -0.5`, grouped heads, scores
    and softmax in float32. Tokens outside every sequence and those of slot 0 come out as 0.
    """
    if dispatch.runs_kernel("prefill_attention", _unsupported(queries, kv)):
        # Here, because it takes 0.2 s and not every build of jaxlib for a CPU can import it.
        from jaxspec.pallas.attention.prefill_kernel import attend

        on_device = dispatch.layer_index(kv, layer)
        return attend(queries, kv, on_device, page_tables, slots, num_computed, query_start)
    return prefill_attention_reference(
        queries, kv, layer, page_tables, slots, num_computed, query_start
    )


def prefill_attention_reference(queries, kv, layer, page_tables, slots, num_computed, query_start):
    """The specification of `prefill_attention`: tiles, so that only real tokens cost."""
    num_tokens = queries.shape[0]
    num_slots = page_tables.shape[0]
    length = jnp.where((slots > 0) & (slots < num_slots), query_start[1:] - query_start[:-1], 0)
    tiles_end = jnp.cumsum((length + _TILE - 1) // _TILE, dtype=jnp.int32)
    padded = jnp.pad(queries, ((0, _TILE), (0, 0), (0, 0)))  # the last tile may reach beyond

    def attend_tile(tile, out):
        seq = jnp.searchsorted(tiles_end, tile, side="right").astype(jnp.int32)
        seq = jnp.minimum(seq, slots.shape[0] - 1)
        first = jnp.where(seq > 0, tiles_end[jnp.maximum(seq - 1, 0)], 0)
        begin = (tile - first) * _TILE
        start = query_start[seq] + begin
        taken = jax.lax.dynamic_slice_in_dim(padded, start, _TILE)
        new = _attend(
            taken,
            kv,
            layer,
            page_tables[slots[seq]],
            num_computed[seq] + begin,
            length[seq] - begin,
        )
        real = jnp.arange(_TILE, dtype=jnp.int32) < length[seq] - begin
        old = jax.lax.dynamic_slice_in_dim(out, start, _TILE)
        new = jnp.where(real[:, None, None], new, old)
        return jax.lax.dynamic_update_slice_in_dim(out, new, start, 0)

    out = jax.lax.fori_loop(0, tiles_end[-1], attend_tile, jnp.zeros_like(padded))
    return out[:num_tokens]


def _attend(queries, kv, layer, pages, position, num_real):
    """Attention of consecutive tokens, the first at `position`, over one row of pages."""
    tokens, heads, head_dim = queries.shape
    _, _, num_pages, page_size, kv_heads, _ = kv.shape
    context = pages.shape[0] * page_size
    pages = jnp.clip(pages, 0, num_pages - 1)
    keys = kv[layer, 0, pages].reshape(context, kv_heads, head_dim)
    values = kv[layer, 1, pages].reshape(context, kv_heads, head_dim)

    place = jnp.arange(context, dtype=jnp.int32)
    own = position + jnp.arange(tokens, dtype=jnp.int32)
    grouped = queries.reshape(tokens, kv_heads, heads // kv_heads, head_dim)
    scores = jnp.einsum(
        "tkgd,ckd->kgtc",
        grouped,
        keys.astype(queries.dtype),
        precision="highest",
        preferred_element_type=jnp.float32,
    )
    sees = (place[None, :] <= own[:, None])[None, None]
    weights = jax.nn.softmax(jnp.where(sees, scores * head_dim**-0.5, -jnp.inf), axis=-1)
    # Pages beyond the sequence hold what an earlier request left, perhaps not finite.
    written = place < position + num_real
    values = jnp.where(written[:, None, None], values.astype(jnp.float32), 0.0)
    out = jnp.einsum("kgtc,ckd->tkgd", weights, values, precision="highest")
    return out.reshape(queries.shape).astype(queries.dtype)


def _unsupported(queries, kv):
    """Why the kernel does not take these operands, or None."""
    page_size, kv_heads, head_dim = kv.shape[3:]
    group = queries.shape[1] // kv_heads
    if queries.dtype != jnp.bfloat16 or kv.dtype not in (jnp.bfloat16, jnp.float8_e4m3fn):
        given = f"queries in {queries.dtype} over {kv.dtype}"
        return f"{given}, not bfloat16 over bfloat16 or float8_e4m3fn"
    if head_dim not in (64, 128, 256):
        return f"heads of {head_dim}, not 64, 128 or 256"
    if page_size < 16 or page_size % 8:
        return f"pages of {page_size}, no multiple of 8 from 16 on"
    if group > (7 if group % 2 else 16):
        return f"{group} heads to a key head, more than a tile of queries holds"
    return None
