"""`CacheSpec`, the description of one pool, and operations on all pools of an engine.

A new kind of state is a further module here with a subclass of `CacheSpec`, returned by
`cache_specs` of the mixers that use it. `Model.cache_specs` merges those of the trunk and the draft
head. The engine treats all kinds alike and never looks inside a pool; only the layers that own it
do.
"""

import abc
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any, ClassVar, NamedTuple

import flax.struct
import jax.numpy as jnp
from jaxtyping import Array, Int, Shaped

from jaxspec.cache.policy import StatePolicy

Pools = dict[str, Any]  # by `CacheSpec.name`; a mixer returns `pools | {self.pool: kv}`


@dataclasses.dataclass(frozen=True)
class PoolSizes:
    """Sizes of an engine's pools. The null page and the null slot are included."""

    num_pages: int
    page_size: int  # tokens
    num_slots: int
    width: int  # tokens of the widest decode row: 1 + drafts


@dataclasses.dataclass(frozen=True)
class CacheOptions:
    """The user's choices, which `Model.cache_specs` puts into each spec."""

    dtype: jnp.dtype  # the model's
    kv_dtype: jnp.dtype
    state_dtype: jnp.dtype
    states: StatePolicy
    routes: bool = False  # record the experts of each token (`RoutedExperts`)


@flax.struct.dataclass
class Moves:
    """Copies of whole slots and whole pages inside the pools.

    They run after all earlier plans and before the next one, so a source is read as the earlier
    plans left it. A target of 0, the null slot or page, is padding. Targets are distinct.
    """

    source_slots: Int[Array, " slots"]
    target_slots: Int[Array, " slots"]
    source_pages: Int[Array, " pages"]
    target_pages: Int[Array, " pages"]


class MemoryLabel(NamedTuple):
    """Description of a part of a pool in memory reports."""

    words: str
    per: tuple[str, ...]  # its bytes are proportional to these; the first is "pages" or "slots"


@dataclasses.dataclass(frozen=True)
class CacheSpec(abc.ABC):
    """Description of one pool; frozen and hashable, because programs are compiled for it.

    A pool is an array or a pytree of arrays. Steps donate the arrays and write them in place. Each
    further leaf costs about 4 us per step. Slot 0 and page 0 are null: padding may write there,
    and nothing reads them.

    The spec of a pool stored in pages sets `page_axis`, or `by_page` if the pages are not along one
    axis; then they cannot be copied to the host. The spec of a pool stored by slot extends
    `BySlot`. Prefixes are cached only if each spec does one of these.
    """

    name: str  # the pool's key in `Pools`
    layers: int  # number of layers that share the pool

    by_page: ClassVar[bool] = False  # True if all data is in pages
    page_axis: ClassVar[int | None] = None  # of pages in each array; the next axis is their tokens
    labels: ClassVar[Mapping[str, MemoryLabel]] = {}  # of `holders`, without a namespace

    @abc.abstractmethod
    def allocate(self, sizes: PoolSizes) -> Any:
        """Return the pool, all zeros; it is also evaluated for shapes alone, to count bytes."""

    @abc.abstractmethod
    def copy(self, pool: Any, moves: Moves) -> Any:
        """Return the pool with each source copied to its target."""

    def segments_of(self, part: str) -> tuple[int, ...] | None:
        """Return the sizes of the segments of an array's last axis that devices share one by one.

        None means that each axis is one segment (`parallel.held`).

        Args:
            part: Name of the array, as in `BySlot.taps_of`.
        """
        return None

    def holders(self, pool: Any) -> dict[str, Any]:
        """Return the pool's parts by the names under which their bytes are reported."""
        return {self.name: pool}


def write_at(array: Array, axis: int, indices: Int[Array, "..."], values: Array) -> Array:
    """Return the array with `values` at distinct `indices` along an axis; index 0 is skipped."""
    where = jnp.where(indices > 0, indices, array.shape[axis])  # beyond the end, so dropped
    return array.at[(slice(None),) * axis + (where,)].set(values, mode="drop")


def write_tokens(
    pool: Array, kv_slots: Int[Array, " tokens"], values: Shaped[Array, "tokens ..."]
) -> Array:
    """Return a pool `[pages, page_size, ...]` with the `values` of tokens written at `kv_slots`.

    A KV slot is page * page_size + offset, int32; -1 is padding.
    """
    num_pages, page_size, *one = pool.shape
    rows = pool.reshape(num_pages * page_size, *one)
    where = jnp.where(kv_slots < 0, rows.shape[0], kv_slots)
    return rows.at[where].set(values.astype(pool.dtype), mode="drop").reshape(pool.shape)


def merged(specs: Iterable[CacheSpec]) -> tuple[CacheSpec, ...]:
    """Return one spec per name in `specs`, with the layers of all specs of that name.

    Raises:
        ValueError: two specs of one name differ in more than their layers.
    """
    by_name: dict[str, CacheSpec] = {}
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
    """Return the pools of all specs, all zeros."""
    return {spec.name: spec.allocate(sizes) for spec in specs}


def copy(specs: Iterable[CacheSpec], pools: Pools, moves: Moves) -> Pools:
    """Return the pools after `moves`."""
    return pools | {spec.name: spec.copy(pools[spec.name], moves) for spec in specs}


def holders(specs: Iterable[CacheSpec], pools: Pools) -> dict[str, Any]:
    """Return the parts of all pools by the names under which their bytes are reported."""
    parts: dict[str, Any] = {}
    for spec in specs:
        parts |= spec.holders(pools[spec.name])
    return parts


# Pools of a second model beside the target's, in a namespace: "draft/kv" beside "kv"


def namespaced(owner: str, specs: Iterable[CacheSpec]) -> tuple[CacheSpec, ...]:
    """Return the specs with names in the owner's namespace."""
    return tuple(dataclasses.replace(spec, name=f"{owner}/{spec.name}") for spec in specs)


def pools_of(owner: str, pools: Pools) -> Pools:
    """Return the owner's pools by their names without the namespace."""
    prefix = f"{owner}/"
    return {
        name.removeprefix(prefix): pool for name, pool in pools.items() if name.startswith(prefix)
    }


def with_pools_of(owner: str, pools: Pools, own: Pools) -> Pools:
    """Return all pools with those of the owner replaced by `own`, named as in `pools_of`."""
    return pools | {f"{owner}/{name}": pool for name, pool in own.items()}
