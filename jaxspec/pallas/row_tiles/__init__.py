"""Tiles of a fixed number of rows, for deterministic engines."""

from jaxspec.pallas.row_tiles.tiles import (
    by_rows,
    carry_over_tiles,
    deterministic,
    is_deterministic,
)

__all__ = [
    "by_rows",
    "carry_over_tiles",
    "deterministic",
    "is_deterministic",
]
