"""How a matmul of many e4m3 rows with published weights is tiled."""

import pytest
from published_8bit import matmuls_of_layer

from jaxspec.pallas.matmul import float8_many_rows
from jaxspec.pallas.matmul.float8_gemm import Float8GemmTiling
from jaxspec.pallas.matmul.float8_many_rows import CHUNK, COLUMNS, ROWS, Float8ManyRowsTiling

MODELS = "qwen3.5-9b", "qwen3.5-27b"


def tiling_of(*args, **named):
    tiling = Float8ManyRowsTiling.of(*args, **named)
    assert tiling is not None
    return tiling


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [128, 200, 256, 512, 2048, 2050, 8192])
@pytest.mark.parametrize("cluster", [(1, 1), (1, 2), (2, 1), (2, 2)])
def test_blocks_have_every_row_and_column(monkeypatch, model, terms, tokens, cluster):
    monkeypatch.setattr(float8_many_rows, "_CLUSTER", cluster)
    for inner, outer, is_split in matmuls_of_layer(model):
        tiling = tiling_of(tokens, inner, outer, terms, is_split=is_split)
        assert ROWS * (tiling.row_blocks - cluster[0]) < tokens <= ROWS * tiling.row_blocks
        assert tiling.row_blocks % cluster[0] == outer // COLUMNS % cluster[1] == 0
        assert tiling.cluster == cluster
        assert 1 <= tiling.parts <= (4 if is_split else 1)
        assert inner // CHUNK * terms % (2 * tiling.parts) == 0  # pairs of products
        assert tiling.blocks(outer) * ROWS * COLUMNS == (
            tiling.parts * tiling.row_blocks * ROWS * outer
        )


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "terms", "is_split", "expected"),
    [
        (256, 4096, 24576, 1, False, Float8ManyRowsTiling(2, 1, (1, 2))),
        (256, 12288, 4096, 2, True, Float8ManyRowsTiling(2, 2, (1, 2))),
        (128, 17408, 5120, 2, True, Float8ManyRowsTiling(1, 2, (1, 2))),  # 136 chunks: not 3 parts
        (300, 256, 384, 1, False, Float8ManyRowsTiling(3, 1, (1, 1))),  # 3 blocks of columns
        (127, 4096, 4096, 1, True, None),
        (128, 4096, 4160, 1, True, None),  # half a block of columns
        (128, 2176, 5120, 1, True, None),  # 17 chunks are no pairs
        (128, 2176, 5120, 2, True, Float8ManyRowsTiling(1, 1, (1, 2))),
    ],
)
def test_tilings(tokens, inner, outer, terms, is_split, expected):
    assert Float8ManyRowsTiling.of(tokens, inner, outer, terms, is_split=is_split) == expected


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize(
    ("tokens", "is_chosen"), [(128, True), (136, None), (256, True), (8192, True)]
)
def test_rows_that_fill_blocks_choose_this_kernel(model, terms, tokens, is_chosen):
    for inner, outer, is_split in matmuls_of_layer(model):
        sizes = inner, outer, terms
        few = Float8GemmTiling.of(tokens, *sizes, is_split=is_split).clocks(*sizes)
        many = tiling_of(tokens, *sizes, is_split=is_split).clocks(*sizes)
        assert is_chosen is None or (many < few) == is_chosen
