"""Pools of a second model beside the target's, in a namespace: "draft/kv" beside "kv"."""

import dataclasses
from collections.abc import Iterable

from jaxspec.cache.specs import CacheSpec, Pools


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
