"""Checkpoints: cached states of rows, stored beside the pools for requests with the same prefix.

Keys and values need none: their pages are shared by requests. Data stored by slot is overwritten by
the row's next token, so a `BySlot` defines how a row's part of the pool is copied to a checkpoint,
and from there to the slot of another row. A checkpoint belongs to one position, and its replay ring
is folded in: a row that starts from it has nothing to replay.
"""

import abc
import dataclasses
from collections.abc import Iterable, Sequence
from typing import Any

import flax.struct
from jaxtyping import Array, Int

from jaxspec.cache.specs import CacheSpec, Pools, PoolSizes
from jaxspec.regions import DecodeRegion


@flax.struct.dataclass
class SavedState:
    """A row whose state is saved, and the checkpoint that receives it."""

    rows: DecodeRegion  # one row, which locates its state
    target: Int[Array, " 1"]  # slot of the checkpoint; 0 is null


class BySlot(CacheSpec):
    """Spec of a pool with data stored by slot. Slot 0 of the checkpoints is null, too."""

    @abc.abstractmethod
    def allocate_checkpoints(self, sizes: PoolSizes) -> Any:
        """Return `sizes.num_slots` checkpoints, all zeros: arrays `[layers, checkpoints, ...]`."""

    @abc.abstractmethod
    def export(self, pool: Any, checkpoints: Any, saved: SavedState, states: Any) -> Any:
        """Return the checkpoints with the row's part of the pool written to one of them.

        Args:
            pool: Pool of this spec.
            checkpoints: Checkpoints of this spec.
            saved: The row, and the checkpoint to write.
            states: The row's recurrent states, as returned by `Model.states`; None if the layers
                have no recurrent states.
        """

    @abc.abstractmethod
    def restore(
        self, pool: Any, checkpoints: Any, sources: Int[Array, " n"], slots: Int[Array, " n"]
    ) -> Any:
        """Return the pool with checkpoint `sources[i]` in slot `slots[i]`; slot 0 is padding."""

    def taps_of(self, part: str) -> int | None:
        """Return the taps of the convolution whose inputs are stored in an array of a checkpoint.

        The inputs are a ring along the third axis: the input at position p is in row p modulo the
        ring's length. None means that the array contains no such inputs.

        Args:
            part: Name of the array in the pytree; for a single array, the last part of the spec's
                name.
        """
        return None


def by_slot(specs: Iterable[CacheSpec]) -> list[BySlot]:
    """Return the specs with data stored by slot."""
    return [spec for spec in specs if isinstance(spec, BySlot)]


def unknown(specs: Iterable[CacheSpec]) -> list[str]:
    """Return the names of specs that are neither stored in pages nor a `BySlot`."""
    return [
        spec.name
        for spec in specs
        if not (spec.by_page or spec.page_axis is not None or isinstance(spec, BySlot))
    ]


def allocate_checkpoints(specs: Iterable[CacheSpec], sizes: PoolSizes, count: int) -> Pools:
    """Return `count` checkpoints and the null one by the specs' names; no arrays if `count` is 0.

    `sizes` are those of the pools.
    """
    if count == 0:
        return {}
    sizes = dataclasses.replace(sizes, num_slots=1 + count)
    return {spec.name: spec.allocate_checkpoints(sizes) for spec in by_slot(specs)}


def export(
    specs: Sequence[CacheSpec], pools: Pools, checkpoints: Pools, saved: SavedState, states: Pools
) -> Pools:
    """Return the checkpoints with the row saved in one of them; `states` by the specs' names."""
    return {
        spec.name: spec.export(
            pools[spec.name], checkpoints[spec.name], saved, states.get(spec.name)
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
    """Return the pools with checkpoint `sources[i]` in slot `slots[i]`; slot 0 is padding."""
    if not checkpoints:
        return pools
    restored = {
        spec.name: spec.restore(pools[spec.name], checkpoints[spec.name], sources, slots)
        for spec in by_slot(specs)
    }
    return pools | restored
