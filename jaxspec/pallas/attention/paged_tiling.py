"""Tiling of `paged_attention`: the sizes of tiles, rings and splits."""

import dataclasses

import jax.numpy as jnp

from jaxspec.pallas.gpu import device

MERGED_AT_ONCE = 8  # splits that the merge kernel reads at once
_WGMMA_ROWS = 64  # queries per 16-bit wgmma; rows after the real ones are idle
_MAX_SPLITS = 64


@dataclasses.dataclass(frozen=True)
class Tiling:
    block_kv: int  # positions per tile
    stages: int  # tiles in the shared-memory ring
    splits: int  # blocks that share the positions of a row (split-KV)


def max_query_rows(dtype: jnp.dtype, head_dim: int) -> int:
    """Return the maximum number of queries per tile, over a pool of `dtype`.

    In bfloat16 these are the rows of a wgmma; otherwise registers limit the accumulators.
    """
    if dtype == jnp.bfloat16:
        return _WGMMA_ROWS
    if dtype == jnp.float8_e4m3fn:
        return {64: 64, 128: 48, 256: 32}[head_dim]
    return 8 if head_dim == 256 else 16


def choose_tiling(
    blocks: int, context: int, head_dim: int, itemsize: int, query_rows: int
) -> Tiling:
    """Return the tiling for rows of up to `context` positions, as measured on an H200.

    `blocks` is the number of blocks per split, each with `query_rows` queries; `itemsize` is that
    of the pool. Two blocks per multiprocessor hide each other's waits better than a longer ring
    does, so rings with heads of 256 have one stage where two blocks may fit; with an 8-bit pool one
    more block fits. Splits are merged eight at a time, so up to eight cost as much as two, provided
    that each has a tile.
    """
    resident = (1 if head_dim == 256 else 2) + (itemsize == 1)  # blocks per multiprocessor
    block_kv = 32 if itemsize == 4 else 128 if head_dim == 64 else 64
    merged_kv = MERGED_AT_ONCE * block_kv
    useful_splits = max(MERGED_AT_ONCE * (context // merged_kv), context // 256)
    free_splits = resident * device.MULTIPROCESSORS // blocks
    splits = max(1, min(free_splits, useful_splits, _MAX_SPLITS))
    # Rows in shared memory: queries as copied (in eights) and as wgmma reads them, keys, values.
    smem_rows = -(-query_rows // 8) * 8 + _WGMMA_ROWS + 2 * block_kv
    two_fit = 2 * head_dim * smem_rows <= device.room(splits * blocks)
    wants_two = head_dim == 256 and itemsize == 2 and splits * blocks > device.MULTIPROCESSORS
    return Tiling(block_kv, stages=1 if wants_two and two_fit else 2, splits=splits)
