"""Pools: the arrays that an engine keeps between steps besides its rows; see `CacheSpec`."""

from jaxspec.cache.checkpoints import (
    BySlot,
    SavedState,
    allocate_checkpoints,
    by_slot,
    export,
    restore,
    unknown,
)
from jaxspec.cache.hidden_states import HiddenStates
from jaxspec.cache.paged_kv import PagedKV, PagedVectors, kv_dtype_of
from jaxspec.cache.policy import Replay, Snapshot, StatePolicy, state_policy
from jaxspec.cache.recurrent import Conv, PerSlot, Recurrent, RecurrentPool, Ring
from jaxspec.cache.routed_experts import RoutedExperts
from jaxspec.cache.short_conv import ShortConv
from jaxspec.cache.specs import (
    CacheOptions,
    CacheSpec,
    MemoryLabel,
    Moves,
    Pools,
    PoolSizes,
    allocate,
    copy,
    holders,
    merged,
    namespaced,
    pools_of,
    with_pools_of,
)
from jaxspec.cache.token_history import History, TokenHistory
from jaxspec.cache.window_kv import WindowKV

_KINDS = PagedKV, PagedVectors, WindowKV, Recurrent, ShortConv
_KINDS += TokenHistory, HiddenStates, RoutedExperts
MEMORY_LABELS: dict[str, MemoryLabel] = {
    name: label for kind in _KINDS for name, label in kind.labels.items()
}

__all__ = [
    "MEMORY_LABELS",
    "BySlot",
    "CacheOptions",
    "CacheSpec",
    "Conv",
    "HiddenStates",
    "History",
    "SavedState",
    "Moves",
    "PagedKV",
    "PagedVectors",
    "PerSlot",
    "PoolSizes",
    "Pools",
    "Recurrent",
    "RecurrentPool",
    "Replay",
    "Ring",
    "RoutedExperts",
    "ShortConv",
    "Snapshot",
    "StatePolicy",
    "TokenHistory",
    "WindowKV",
    "allocate",
    "allocate_checkpoints",
    "by_slot",
    "copy",
    "export",
    "holders",
    "kv_dtype_of",
    "merged",
    "namespaced",
    "pools_of",
    "restore",
    "state_policy",
    "unknown",
    "with_pools_of",
]
