"""The protocol of a pool: who allocates it, copies inside it, counts it, and where a mesh cuts it.

A new kind of state is one more file here with a `CacheSpec`, which the mixers that keep it name.
`Model.cache_specs` gives those of the trunk and of the draft head together. The engine treats all
kinds alike and never looks inside a pool; the layers that own it do.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, NamedTuple, Protocol

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int

from jaxspec.cache.policy import StatePolicy

Pools = dict[str, Any]  # by `CacheSpec.name`; a mixer returns `pools | {self.pool: kv}`


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """How much an engine keeps. The null page and the null slot are counted in."""

    num_pages: int
    page_size: int  # tokens
    num_slots: int
    width: int  # tokens of the widest decode row: 1 + drafts


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """What the user chose; `Model.cache_specs` puts it into each spec."""

    dtype: jnp.dtype  # the model's
    kv_dtype: jnp.dtype
    state_dtype: jnp.dtype
    states: StatePolicy


@flax.struct.dataclass
class Moves:
    """Copies inside the pools: whole slots, and whole pages.

    They run after all earlier plans and before the next one, so a source holds what was planned for
    it. A target of 0, the null slot or page, is padding. Targets do not repeat.
    """

    source_slots: Int[Array, " slots"]
    target_slots: Int[Array, " slots"]
    source_pages: Int[Array, " pages"]
    target_pages: Int[Array, " pages"]


class Holder(NamedTuple):
    """How people are told of a part of a pool."""

    words: str
    per: tuple[str, ...]  # what it has one of for each of; the first is "pages" or "slots"


class CacheSpec(Protocol):
    """One pool, as sizes: frozen and hashable, because programs are compiled for it.

    A pool is an array or a pytree of arrays that never move; a step writes them in place, for they
    are donated. Each further leaf costs about 4 us a step. Slot 0 and page 0 are null: padding may
    point there, and nothing reads what it leaves.
    """

    @property
    def name(self) -> str:
        """The pool's key in `Pools`."""
        ...

    @property
    def layers(self) -> int:
        """Layers that share the pool: its first axis."""
        ...

    def allocate(self, sizes: PoolSizes) -> Any:
        """The pool, all zeros. `jax.eval_shape` of it tells the bytes without holding them."""
        ...

    def copy(self, pool: Any, moves: Moves) -> Any:
        """The pool with each target holding what its source holds."""
        ...

    def holders(self, pool: Any) -> dict[str, Any]:
        """The pool's parts by the names under which their bytes are reported (`HOLDERS`)."""
        ...

    def partition(self) -> dict[str, int]:
        """The axis of each of `holders` that has the heads: where a mesh of devices would cut."""
        ...


def merged(specs: Iterable[Any]) -> tuple[CacheSpec, ...]:
    """One `CacheSpec` for each name among `specs`, with the layers of all that have it.

    Raises:
        ValueError: two specs of one name differ in more than their layers.
    """
    by_name: dict[str, Any] = {}
    for spec in specs:
        known = by_name.setdefault(spec.name, dataclasses.replace(spec, layers=0))
        if dataclasses.replace(spec, layers=known.layers) != known:
            raise ValueError(
                f"Layers that share the pool {spec.name!r} must keep the same, got {spec} and "
                f"{known}. Give one of them a pool of another name."
            )
        by_name[spec.name] = dataclasses.replace(known, layers=known.layers + spec.layers)
    return tuple(by_name.values())


def allocate(specs: Iterable[CacheSpec], sizes: PoolSizes) -> Pools:
    """Every spec's pool, all zeros."""
    return {spec.name: spec.allocate(sizes) for spec in specs}


def copy(specs: Iterable[CacheSpec], pools: Pools, moves: Moves) -> Pools:
    """The pools after `moves`."""
    return pools | {spec.name: spec.copy(pools[spec.name], moves) for spec in specs}


def holders(specs: Iterable[CacheSpec], pools: Pools) -> dict[str, Any]:
    """The parts of all pools, by the names under which their bytes are reported."""
    parts: dict[str, Any] = {}
    for spec in specs:
        parts |= spec.holders(pools[spec.name])
    return parts
