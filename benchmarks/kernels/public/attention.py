"""vLLM's Triton attention for both of our cases of it; `recurrent.KERNELS` lists them.

vLLM 0.25.1 cuts the positions of a row into segments where it has one token, 0.33 where it has up
to 8.
"""

from collections.abc import Callable
from typing import Any

import torch

from jaxspec.regions import DecodeRegion, PrefillRegion

# From vLLM's backend (`triton_attn.py`): a row is cut into segments up to so many blocks.
_MAX_BLOCKS, _SEGMENTS = 128, 16


def paged_attention(function: Any, pool: Any, tables: Any, rows: DecodeRegion) -> Callable | None:
    """The same work, but for float32, which it would round, and pools of 8 bits."""
    kv, queries = pool
    if queries.dtype != kv.dtype or kv.dtype == torch.float32:
        return None
    queries, row_tables = queries.flatten(0, 1), tables[rows.slots]
    return _attention(function, kv, queries, row_tables, rows.num_computed, rows.query_len)


def prefill_attention(function: Any, pool: Any, tables: Any, chunks: PrefillRegion) -> Callable:
    """The same work."""
    kv, queries = pool
    query_len, row_tables = chunks.query_start.diff(), tables[chunks.slots]
    return _attention(function, kv, queries, row_tables, chunks.num_computed, query_len)


def _attention(function, kv, queries, tables, num_computed, query_len):
    """`queries` is `[tokens, heads, head_dim]`, one row's after the other's."""
    tokens, heads, dim = queries.shape
    threshold = _MAX_BLOCKS // kv.shape[4]
    length, out = num_computed + query_len, torch.empty_like(queries)
    starts = torch.nn.functional.pad(query_len.cumsum(0, dtype=torch.int32), (1, 0))
    segments = max(threshold, tokens), heads, _SEGMENTS
    new = {"dtype": torch.float32, "device": queries.device}
    options = {
        "cu_seqlens_q": starts,
        "max_seqlen_q": int(query_len.max()),
        "seqused_k": length,
        "max_seqlen_k": int(length.max()),
        "softmax_scale": dim**-0.5,
        "causal": True,
        "window_size": (-1, -1),
        "block_table": tables,
        "softcap": 0,
        **dict.fromkeys(("q_descale", "k_descale", "v_descale")),
        "seq_threshold_3D": threshold,
        "num_par_softmax_segments": _SEGMENTS,
        "softmax_segm_output": torch.empty(*segments, dim, **new),
        "softmax_segm_max": torch.empty(segments, **new),
        "softmax_segm_expsum": torch.empty(segments, **new),
    }

    def call(layer):
        function(queries, kv[layer, 0], kv[layer, 1], out, **options)
        return out

    return call
