"""How paged attention cuts its work, on an H200."""

import pytest

from jaxspec.pallas.attention.paged_tiling import Tiling, choose_tiling


@pytest.mark.parametrize(
    ("blocks", "context", "head_dim", "itemsize", "query_rows", "tiling"),
    [
        (16, 1312, 256, 2, 16, (64, 2, 8)),
        (32, 1312, 256, 2, 16, (64, 2, 4)),
        (2, 511, 256, 2, 16, (64, 2, 1)),
        (2, 1312, 256, 2, 16, (64, 2, 16)),
        (4, 32768, 256, 2, 16, (64, 2, 33)),
        (256, 1312, 256, 2, 16, (64, 1, 1)),  # two blocks on a multiprocessor
        (256, 1312, 256, 2, 24, (64, 1, 1)),
        (256, 1312, 256, 2, 25, (64, 2, 1)),  # their queries leave no room for a second block
        (256, 1312, 256, 1, 16, (64, 2, 1)),
        (256, 1312, 256, 4, 8, (32, 2, 1)),
        (64, 8192, 128, 2, 16, (64, 2, 4)),
        (8, 800, 64, 2, 16, (128, 2, 3)),
    ],
)
def test_a_row_is_split_as_far_as_there_are_multiprocessors_and_positions(
    blocks, context, head_dim, itemsize, query_rows, tiling
):
    block_kv, stages, splits = tiling
    chosen = choose_tiling(blocks, context, head_dim, itemsize, query_rows)
    assert chosen == Tiling(block_kv=block_kv, stages=stages, splits=splits)
