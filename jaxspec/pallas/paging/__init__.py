"""Paged keys and values: slot mapping, KV writes, and the page copies that kernels share."""

from jaxspec.pallas.paging.kv_write import kv_write, vector_write
from jaxspec.pallas.paging.slot_mapping import slot_mapping

__all__ = [
    "kv_write",
    "slot_mapping",
    "vector_write",
]
