"""What an engine keeps between steps besides its rows: pools, each described by a `CacheSpec`."""

from jaxspec.cache.checkpoints import (
    BySlot,
    Kept,
    allocate_checkpoints,
    by_slot,
    export,
    restore,
    unknown,
)
from jaxspec.cache.hidden_states import HiddenStates
from jaxspec.cache.owned import Owned, owned, pools_of, with_pools_of
from jaxspec.cache.paged_kv import PagedKV, kv_dtype_of
from jaxspec.cache.policy import Replay, Snapshot, StatePolicy, state_policy
from jaxspec.cache.recurrent import Conv, PerSlot, Recurrent, RecurrentPool, Ring
from jaxspec.cache.short_conv import ShortConv
from jaxspec.cache.specs import (
    CacheOptions,
    CacheSpec,
    Holder,
    Moves,
    Pools,
    PoolSizes,
    allocate,
    copy,
    holders,
    merged,
)
from jaxspec.cache.token_history import History, TokenHistory

HOLDERS: dict[str, Holder] = {
    **PagedKV.labels,
    **Recurrent.labels,
    **ShortConv.labels,
    **TokenHistory.labels,
    **HiddenStates.labels,
}  # every kind's, for people

__all__ = [
    "HOLDERS",
    "BySlot",
    "CacheOptions",
    "CacheSpec",
    "Conv",
    "HiddenStates",
    "History",
    "Kept",
    "Moves",
    "Owned",
    "PagedKV",
    "PerSlot",
    "PoolSizes",
    "Pools",
    "Recurrent",
    "RecurrentPool",
    "Replay",
    "Ring",
    "ShortConv",
    "Snapshot",
    "StatePolicy",
    "TokenHistory",
    "allocate",
    "allocate_checkpoints",
    "by_slot",
    "copy",
    "export",
    "holders",
    "kv_dtype_of",
    "merged",
    "owned",
    "pools_of",
    "restore",
    "state_policy",
    "unknown",
    "with_pools_of",
]
