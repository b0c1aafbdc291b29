"""How a matmul of e4m3 rows with published weights is tiled."""

import pytest
from published_8bit import matmuls_of_layer as sizes

from jaxspec.pallas.matmul import float8_gemm
from jaxspec.pallas.matmul.float8_gemm import Float8GemmTiling

MODELS = "qwen3.5-9b", "qwen3.5-27b"


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("terms", [2, 1])
@pytest.mark.parametrize("tokens", [9, 16, 33, 64, 100, 128, 200, 256, 512, 2048, 2050, 8192])
def test_blocks_have_every_row_and_column_and_fit(model, terms, tokens):
    for inner, outer, is_split in sizes(model):
        tiling = Float8GemmTiling.of(tokens, inner, outer, terms, is_split=is_split)
        rows, cluster = tiling.rows, tiling.cluster
        assert rows * (tiling.row_blocks - 1) < tokens <= rows * tiling.row_blocks
        assert rows % (8 * cluster) == 0 and terms * rows <= 256
        assert outer % (tiling.width * cluster) == 0
        assert 1 <= tiling.parts <= (4 if is_split else 1)
        assert tiling.blocks(outer) * rows * tiling.width == (
            tiling.parts * tiling.row_blocks * rows * outer
        )


@pytest.mark.parametrize(
    ("tokens", "inner", "outer", "terms", "is_split", "expected"),
    [
        (64, 4096, 24576, 2, False, Float8GemmTiling(64, 1, 3, 1, 2)),
        (64, 12288, 4096, 2, True, Float8GemmTiling(64, 1, 2, 4, 2)),
        (64, 17408, 5120, 2, True, Float8GemmTiling(64, 1, 2, 3, 2)),
        (2048, 4096, 24576, 1, False, Float8GemmTiling(128, 16, 2, 1, 2)),
        (10, 512, 64, 2, False, Float8GemmTiling(8, 2, 1, 1, 1)),  # a single block of columns
        (8, 2176, 5120, 2, True, Float8GemmTiling(8, 1, 2, 3, 1)),  # no rows for two blocks
        (300, 256, 192, 1, True, Float8GemmTiling(56, 6, 1, 2, 1)),
        (256, 4096, 12288, 2, False, Float8GemmTiling(64, 4, 3, 1, 2)),
    ],
)
def test_tilings(tokens, inner, outer, terms, is_split, expected):
    assert Float8GemmTiling.of(tokens, inner, outer, terms, is_split=is_split) == expected


@pytest.mark.parametrize("model", MODELS)
def test_one_constant_rules_out_clusters(monkeypatch, model):
    def clusters():
        for tokens in (16, 64, 256, 2048):
            for inner, outer, is_split in sizes(model):
                yield Float8GemmTiling.of(tokens, inner, outer, 2, is_split=is_split).cluster

    assert set(clusters()) == {2}
    monkeypatch.setattr(float8_gemm, "_MAX_CLUSTER", 1)
    assert set(clusters()) == {1}


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("terms", [2, 1])
def test_more_rows_take_no_less_time_by_the_estimate(model, terms):
    """A step of 8 rows may save a tenth, where one more block of rows fits better."""
    for inner, outer, is_split in sizes(model):
        clocks = [
            Float8GemmTiling.of(tokens, inner, outer, terms, is_split=is_split).clocks(
                inner, outer, terms
            )
            for tokens in range(16, 1024, 16)
        ]
        assert all(
            later > 0.8 * earlier for earlier, later in zip(clocks, clocks[1:], strict=False)
        )
        assert clocks[-1] > 2 * clocks[0]
