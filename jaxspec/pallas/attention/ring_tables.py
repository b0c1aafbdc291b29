"""Rings of a `WindowPool` as pages, which the kernel of paged attention reads."""

import dataclasses

import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.regions import DecodeRegion

PAGE = 16
"""Positions per page of a ring."""


def ring_length(window: int, width: int) -> int:
    """Return the positions of a slot's ring, for steps of up to `width` tokens per row.

    It has whole pages, and no two positions that a step reads are in the same row of the ring: the
    first page of a window has up to `PAGE` - 1 positions before it.
    """
    return -(-_span(window, width) // PAGE) * PAGE


def kept_length(window: int) -> int:
    """Return how many positions before the next token a ring must hold.

    These are a window's, and up to `PAGE` - 1 before it in its first page. The kernel multiplies
    the values of the latter by 0, so they must be finite: of the request, or zeros.
    """
    return window - 1 + PAGE - 1


def why_no_pages(ring: int, window: int, width: int) -> str | None:
    """Return the reason why rings are not read as pages; None if they can be."""
    if ring % PAGE or ring < _span(window, width):
        return f"rings of {ring} positions for a window of {window} and {width} tokens a row"
    return None


def in_pages(
    rows: DecodeRegion, num_slots: int, ring: int, window: int, width: int
) -> tuple[Int[Array, "rows+1 pages"], DecodeRegion]:
    """Return a page table per row, and the region of rows that use these tables.

    Positions are counted from the beginning of the page that the window of a row's first token
    begins in. Row i has table i + 1; padding has table 0.
    """
    is_live = rows.is_live(num_slots)
    computed = jnp.maximum(rows.num_computed, 0)
    first = jnp.maximum(computed - (window - 1), 0) // PAGE
    ahead = jnp.arange(-(-_span(window, width) // PAGE), dtype=jnp.int32)[None, :]
    pages = (first[:, None] + ahead) % (ring // PAGE)
    slots = jnp.where(is_live, rows.slots, 0)
    tables = jnp.pad(slots[:, None] * (ring // PAGE) + pages, ((1, 0), (0, 0)))
    number = jnp.arange(1, len(slots) + 1, dtype=jnp.int32)
    region = dataclasses.replace(
        rows, slots=jnp.where(is_live, number, 0), num_computed=computed - first * PAGE
    )
    return tables, region


def _span(window: int, width: int) -> int:
    return kept_length(window) + width
