"""Copies of pages and checkpoints out of the pools and back, for host memory and migration.

If a spec has a `page_axis`, its pool is an array, or a pytree of arrays, with pages along that axis
and the tokens of a page along the next one. A copy has pages along its first axis, so each page of
a block is contiguous. Checkpoints of a `BySlot` have layers along the first axis, and slots along
the second.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.checkpoints import BySlot, by_slot
from jaxspec.cache.specs import CacheSpec, Pools, write_at


def paged(specs: Iterable[CacheSpec]) -> list[Any]:
    """Return the specs whose pages can be copied out."""
    return [spec for spec in specs if spec.page_axis is not None]


def uncopied(specs: Iterable[CacheSpec]) -> list[str]:
    """Return the names of specs without a `page_axis` that are not a `BySlot` either."""
    return [s.name for s in specs if s.page_axis is None and not isinstance(s, BySlot)]


def read_pages(specs: Iterable[CacheSpec], pools: Pools, pages: Int[Array, " n"]) -> Pools:
    """Return copies of `pages` of each paged pool: `[n, ...]` arrays by the specs' names."""

    def read(array: Array, axis: int) -> Array:
        return jnp.moveaxis(array[(slice(None),) * axis + (pages,)], axis, 0)

    return {
        spec.name: jax.tree.map(lambda x, axis=spec.page_axis: read(x, axis), pools[spec.name])
        for spec in paged(specs)
    }


def write_pages(
    specs: Iterable[CacheSpec],
    pools: Pools,
    copies: Pools,
    sources: Int[Array, " m"],
    targets: Int[Array, " m"],
) -> Pools:
    """Return the pools with page `sources[i]` of `copies` (`read_pages`) in page `targets[i]`.

    Targets are distinct. A target of 0 is padding.
    """

    def write(array: Array, values: Array, axis: int) -> Array:
        return write_at(array, axis, targets, jnp.moveaxis(values[sources], 0, axis))

    return pools | {
        spec.name: jax.tree.map(
            lambda x, y, axis=spec.page_axis: write(x, y, axis), pools[spec.name], copies[spec.name]
        )
        for spec in paged(specs)
    }


def read_checkpoint(specs: Iterable[CacheSpec], checkpoints: Pools, slot: Int[Array, ""]) -> Pools:
    """Return a copy of one checkpoint of each `BySlot`: `[layers, ...]` arrays by their names."""
    return {
        spec.name: jax.tree.map(lambda x: x[:, slot], checkpoints[spec.name])
        for spec in by_slot(specs)
    }


def write_checkpoint(
    specs: Iterable[CacheSpec], checkpoints: Pools, copies: Pools, slot: Int[Array, ""]
) -> Pools:
    """Return the checkpoints with `copies` (`read_checkpoint`) in a slot; slot 0 is padding."""
    return checkpoints | {
        spec.name: jax.tree.map(
            lambda x, y: write_at(x, 1, slot, y), checkpoints[spec.name], copies[spec.name]
        )
        for spec in by_slot(specs)
    }
