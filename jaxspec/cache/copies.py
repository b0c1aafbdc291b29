"""Copies of pages and checkpoints out of the pools and back: for the host's memory, and for travel.

A pool whose spec has a `page_axis` is an array, or a pytree of arrays, with pages along that axis
and the tokens of a page along the next one. A copy has pages along its first axis, so that the
pages of a piece are rows of it. The checkpoints of a `BySlot` have layers first, and then slots.
"""

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.checkpoints import BySlot, by_slot
from jaxspec.cache.specs import CacheSpec, Pools


def page_axis(spec: CacheSpec) -> int | None:
    """The axis of pages in the spec's pool; None: it does not say, or has none."""
    return getattr(spec, "page_axis", None)


def paged(specs: Iterable[CacheSpec]) -> list[Any]:
    """Those of the specs whose pages can be copied out."""
    return [spec for spec in specs if page_axis(spec) is not None]


def uncopied(specs: Iterable[CacheSpec]) -> list[str]:
    """The names of specs that say neither where their pages are nor how a slot is kept."""
    return [s.name for s in specs if page_axis(s) is None and not isinstance(s, BySlot)]


def read_pages(specs: Iterable[CacheSpec], pools: Pools, pages: Int[Array, " n"]) -> Pools:
    """Copies of `pages` of every pool that has some: `[n, ...]` arrays by the specs' names."""

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
    """The pools with page `sources[i]` of `copies` (`read_pages`) in page `targets[i]`; 0: nowhere.

    Targets do not repeat, but for 0.
    """

    def write(array: Array, values: Array, axis: int) -> Array:
        where = jnp.where(targets > 0, targets, array.shape[axis])
        values = jnp.moveaxis(values[sources], 0, axis)
        return array.at[(slice(None),) * axis + (where,)].set(values, mode="drop")

    return pools | {
        spec.name: jax.tree.map(
            lambda x, y, axis=spec.page_axis: write(x, y, axis), pools[spec.name], copies[spec.name]
        )
        for spec in paged(specs)
    }


def read_checkpoint(specs: Iterable[CacheSpec], checkpoints: Pools, slot: Int[Array, ""]) -> Pools:
    """A copy of one checkpoint of every `BySlot`: `[layers, ...]` arrays by the specs' names."""
    return {
        spec.name: jax.tree.map(lambda x: x[:, slot], checkpoints[spec.name])
        for spec in by_slot(specs)
    }


def write_checkpoint(
    specs: Iterable[CacheSpec], checkpoints: Pools, copies: Pools, slot: Int[Array, ""]
) -> Pools:
    """The checkpoints with `copies` (`read_checkpoint`) in a slot; 0: nowhere."""

    def write(array: Array, values: Array) -> Array:
        where = jnp.where(slot > 0, slot, array.shape[1])
        return array.at[:, where].set(values, mode="drop")

    return checkpoints | {
        spec.name: jax.tree.map(write, checkpoints[spec.name], copies[spec.name])
        for spec in by_slot(specs)
    }
