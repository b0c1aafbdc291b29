"""vLLM's Triton attention for both of our cases of it; `public_kernels.KERNELS` lists them.

0.25.1 cuts the positions of a row into segments where it has one token, 0.33 where it has up to 8.
"""

from collections.abc import Callable
from typing import Any

import torch

# As vLLM's backend (`triton_attn.py`) has them: up to so many blocks a row is cut into segments.
_BLOCKS, _SEGMENTS = 128, 16


def paged_attention(
    function: Any, pool: Any, tables: Any, slots: Any, start: Any, count: Any
) -> Callable | None:
    """The same work. float32, which it would round, and pools of 8 bits it is not asked for."""
    kv, queries = pool
    if queries.dtype != kv.dtype or kv.dtype == torch.float32:
        return None
    return _attention(function, kv, queries.flatten(0, 1), tables[slots], start, count)


def prefill_attention(
    function: Any, pool: Any, tables: Any, slots: Any, before: Any, start: Any
) -> Callable:
    """The same work."""
    return _attention(function, *pool, tables[slots], before, start.diff())


def _attention(function, kv, queries, tables, before, count):
    """`queries` `[tokens, heads, head_dim]`, a row's behind the other's."""
    tokens, heads, dim = queries.shape
    threshold = _BLOCKS // kv.shape[4]
    length, out = before + count, torch.empty_like(queries)
    starts = torch.nn.functional.pad(count.cumsum(0, dtype=torch.int32), (1, 0))
    segments = max(threshold, tokens), heads, _SEGMENTS
    new = {"dtype": torch.float32, "device": queries.device}
    options = {
        "cu_seqlens_q": starts,
        "max_seqlen_q": int(count.max()),
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
