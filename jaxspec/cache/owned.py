"""Owned: pools of a second model, a drafter's, beside those of the first."""

import dataclasses
from collections.abc import Iterable
from typing import Any

from jaxtyping import Array, Int

from jaxspec.cache.checkpoints import BySlot, Kept
from jaxspec.cache.specs import CacheSpec, Moves, Pools, PoolSizes


@dataclasses.dataclass(frozen=True)
class Owned:
    """A `CacheSpec` under another name: two models keep pools of the same kind apart."""

    owner: str
    spec: CacheSpec

    @property
    def name(self) -> str:
        """ "draft/kv" for the pool "kv" of the owner "draft"."""
        return f"{self.owner}/{self.spec.name}"

    @property
    def by_page(self) -> bool:
        """Whether it lies in pages alone."""
        return getattr(self.spec, "by_page", False)

    @property
    def page_axis(self) -> int | None:
        """See `jaxspec.cache.copies`."""
        return getattr(self.spec, "page_axis", None)

    @property
    def layers(self) -> int:
        """The owner's layers that share the pool."""
        return self.spec.layers

    def allocate(self, sizes: PoolSizes) -> Any:
        """See `CacheSpec`."""
        return self.spec.allocate(sizes)

    def copy(self, pool: Any, moves: Moves) -> Any:
        """See `CacheSpec`."""
        return self.spec.copy(pool, moves)

    def holders(self, pool: Any) -> dict[str, Any]:
        """See `CacheSpec`."""
        return {f"{self.owner}/{name}": part for name, part in self.spec.holders(pool).items()}

    def partition(self) -> dict[str, int]:
        """See `CacheSpec`."""
        return {f"{self.owner}/{name}": axis for name, axis in self.spec.partition().items()}


@dataclasses.dataclass(frozen=True)
class OwnedBySlot(Owned):
    """One of a `BySlot`."""

    spec: Any

    def taps_of(self, part: str) -> int | None:
        """See `BySlot`."""
        return self.spec.taps_of(part)

    def allocate_checkpoints(self, sizes: PoolSizes) -> Any:
        """See `BySlot`."""
        return self.spec.allocate_checkpoints(sizes)

    def export(self, pool: Any, checkpoints: Any, kept: Kept, states: Any) -> Any:
        """See `BySlot`."""
        return self.spec.export(pool, checkpoints, kept, states)

    def restore(
        self, pool: Any, checkpoints: Any, sources: Int[Array, " n"], slots: Int[Array, " n"]
    ) -> Any:
        """See `BySlot`."""
        return self.spec.restore(pool, checkpoints, sources, slots)


def owned(owner: str, specs: Iterable[CacheSpec]) -> tuple[CacheSpec, ...]:
    """Every spec under the owner's name."""
    return tuple(
        (OwnedBySlot if isinstance(spec, BySlot) else Owned)(owner, spec) for spec in specs
    )


def pools_of(owner: str, pools: Pools) -> Pools:
    """The owner's pools, by the names that it knows them under."""
    prefix = f"{owner}/"
    return {
        name.removeprefix(prefix): pool for name, pool in pools.items() if name.startswith(prefix)
    }


def with_pools_of(owner: str, pools: Pools, own: Pools) -> Pools:
    """All pools, with the owner's replaced."""
    return pools | {f"{owner}/{name}": pool for name, pool in own.items()}
