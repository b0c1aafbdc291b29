"""Checkpoints: states of rows that are kept beside the pools, for requests with the same prefix.

Keys and values need none: they lie in pages, which requests share. What lies by slot is overwritten
by the row's next token. So a spec that keeps something by slot says how a row's share of its pool
is copied into a checkpoint, and from there into the slot of another row. A checkpoint belongs to a
position, and its ring is folded in: a row that begins on it has nothing to replay.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import flax.struct
from jaxtyping import Array, Int

from jaxspec.cache.specs import CacheSpec, Pools, PoolSizes
from jaxspec.regions import DecodeRegion


@flax.struct.dataclass
class Kept:
    """A row whose state is kept, and where."""

    rows: DecodeRegion  # one row: where its state stands
    target: Int[Array, " 1"]  # the checkpoint's slot; 0 is null


@runtime_checkable
class BySlot(Protocol):
    """A `CacheSpec` that keeps something by slot. Slot 0 of the checkpoints is null, too."""

    def allocate_checkpoints(self, sizes: PoolSizes) -> Any:
        """`sizes.num_slots` checkpoints, all zeros: arrays `[layers, checkpoints, ...]`."""
        ...

    def taps_of(self, part: str) -> int | None:
        """The taps of the convolution whose inputs this array of a checkpoint has.

        They lie along its third axis, in a ring by their position. None: it has no inputs. `part`:
        the array's name in the pytree, or the last word of the spec's, if it is one array.
        """
        ...

    def export(self, pool: Any, checkpoints: Any, kept: Kept, states: Any) -> Any:
        """The checkpoints with the row's share of the pool in one of them.

        `states`: the row's recurrent states as `Model.states` gives them; None: the spec's layers
        have none.
        """
        ...

    def restore(
        self, pool: Any, checkpoints: Any, sources: Int[Array, " n"], slots: Int[Array, " n"]
    ) -> Any:
        """The pool with each of `slots` as its checkpoint says; 0 is padding."""
        ...


def by_slot(specs: Iterable[CacheSpec]) -> list[Any]:
    """Those of the specs that keep something by slot."""
    return [spec for spec in specs if isinstance(spec, BySlot)]


def unknown(specs: Iterable[CacheSpec]) -> list[str]:
    """The names of specs that neither lie in pages nor say how a state of theirs is kept."""
    return [spec.name for spec in specs if not (isinstance(spec, BySlot) or _lies_in_pages(spec))]


def _lies_in_pages(spec: CacheSpec) -> bool:
    """Whether it says so, or where its pages are (`cache.copies`)."""
    return getattr(spec, "by_page", False) or getattr(spec, "page_axis", None) is not None


def allocate_checkpoints(specs: Iterable[CacheSpec], sizes: PoolSizes, count: int) -> Pools:
    """`count` checkpoints and the null one, by the specs' names; for 0 there are no arrays.

    `sizes`: of the pools.
    """
    if count == 0:
        return {}
    sizes = dataclasses.replace(sizes, num_slots=1 + count)
    return {spec.name: spec.allocate_checkpoints(sizes) for spec in by_slot(specs)}


def export(
    specs: Sequence[CacheSpec], pools: Pools, checkpoints: Pools, kept: Kept, states: Pools
) -> Pools:
    """The checkpoints with the row in one of them; `states` by the specs' names."""
    return {
        spec.name: spec.export(
            pools[spec.name], checkpoints[spec.name], kept, states.get(spec.name)
        )
        for spec in by_slot(specs)
    }


def restore(
    specs: Sequence[CacheSpec],
    pools: Pools,
    checkpoints: Pools,
    sources: Int[Array, " n"],
    slots: Int[Array, " n"],
) -> Pools:
    """The pools with each of `slots` as its checkpoint says."""
    if not checkpoints:
        return pools
    restored = {
        spec.name: spec.restore(pools[spec.name], checkpoints[spec.name], sources, slots)
        for spec in by_slot(specs)
    }
    return pools | restored
