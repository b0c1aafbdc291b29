"""Sizes of a model and of its caches, and the number of requests that fit on the device."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

import jax
from flax import nnx

from jaxspec.api.settling import ResolvedOptions, sizes_of
from jaxspec.cache import CacheSpec, PoolSizes, allocate
from jaxspec.models.base import Model
from jaxspec.models.layers.parameters import Placement
from jaxspec.options.engine_options import EngineConfig
from jaxspec.plan.step_shapes import StepShapes
from jaxspec.runner.memory import MemoryBudget, fit

_LENGTHS = (2048, 8192, 32768, 131072)
_ROUTED = ".experts."  # in names of tensors of which each token uses only its chosen experts


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of parameters in the checkpoint, without padding and duplicates."""

    total: int
    active: int  # multiplied with each token: no embedding rows, only chosen experts


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """Memory of requests, in bytes."""

    token: int  # bytes per token in pages, all layers including a draft head's
    request: int  # bytes per slot, independent of the request's length
    request_without_drafts: int
    checkpoint: int = 0  # bytes per cached state of a prefix; 0 if none are cached


@dataclasses.dataclass(frozen=True)
class Fit:
    """Memory of requests of one length, all of them at their maximum length."""

    max_model_len: int  # prompt and output tokens
    request_bytes: int  # per request; an average if states of prefixes are cached
    fixed_bytes: int  # weights and all else that is independent of requests
    requests: int | None  # number that fits at once; None if the device reports no memory


def parameters(model: Model, placements: Iterable[Placement]) -> Parameters:
    """Count the parameters that are filled by these placements of the model."""
    share = 1.0
    if (experts := model.experts) is not None:
        share = experts.routing.num_chosen / experts.routing.num_experts
    tables = [table.weight for table in model.trunk.lookups]
    published = {placement.name: placement for placement in placements}
    total, active = 0, 0.0
    for name, placement in published.items():
        size = math.prod(placement.shape)
        total += size
        if all(placement.param is not table for table in tables):
            active += size * (share if _ROUTED in name else 1)
    return Parameters(total, round(active))


def weight_bytes(model: Model) -> dict[str, int]:
    """Return the bytes of the parameters on the device by dtype, padding included."""
    num_bytes: Counter[str] = Counter()
    for leaf in jax.tree.leaves(nnx.state(model)):
        num_bytes[leaf.dtype.name] += leaf.size * leaf.dtype.itemsize
    return dict(num_bytes)


def cache_bytes(settled: ResolvedOptions) -> CacheBytes:
    """Return the bytes per token and per request, with the settled drafts and without."""
    specs, width = settled.memory_usage.specs, settled.shapes.width
    held = [
        sum(
            settled.memory_usage.bytes(
                dataclasses.replace(settled.shapes, num_checkpoints=n)
            ).values()
        )
        for n in (1, 2)
    ]
    least = _pool_bytes(specs, width)
    return CacheBytes(
        token=_pool_bytes(specs, width, pages=2) - least,
        request=_pool_bytes(specs, width, slots=2) - least,
        request_without_drafts=_pool_bytes(specs, 1, slots=2) - _pool_bytes(specs, 1),
        checkpoint=held[1] - held[0] if settled.limits.prefix_cache_share else 0,
    )


def _pool_bytes(specs: tuple[CacheSpec, ...], width: int, *, pages: int = 1, slots: int = 1) -> int:
    """Return the bytes of all pools, with pages of one token and rows of `width` tokens."""
    sizes = PoolSizes(pages, page_size=1, num_slots=slots, width=width)
    pools = jax.eval_shape(lambda: allocate(specs, sizes))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))


def fits(
    options: EngineConfig, model: Model, settled: ResolvedOptions, budget: MemoryBudget | None
) -> tuple[Fit, ...]:
    """Return the memory of requests by their length, up to the model's maximum."""
    longest = model.max_position_embeddings
    lengths = {settled.shapes.max_model_len, longest, *_LENGTHS}
    return tuple(
        _fit(options, length, model, settled, budget)
        for length in sorted(lengths)
        if length <= longest
    )


def _fit(
    options: EngineConfig,
    length: int,
    model: Model,
    settled: ResolvedOptions,
    budget: MemoryBudget | None,
) -> Fit:
    """Return the memory of requests of one length, extrapolated from two numbers of requests.

    The memory of an engine grows linearly with its requests. The cached states of prefixes are a
    share of the caches rounded to whole states, so with them the two numbers are further apart and
    the result is corrected.
    """
    share = settled.limits.prefix_cache_share
    other = 129 if share else 2

    def shapes(requests: int) -> StepShapes:
        sizes = {"max_num_seqs": requests, "max_model_len": length, "num_pages": None}
        defaults = {"max_num_batched_tokens": None, "decode_buckets": None}
        asked = dataclasses.replace(options, **sizes, **defaults)
        found, _ = sizes_of(asked, model, settled.shapes.draft_buckets)
        return found

    def total(requests: int) -> int:
        held = settled.memory_usage.bytes
        return sum(held(fit(shapes(requests), share, None, held)).values())

    def has_room(requests: int, budget: MemoryBudget) -> bool:
        whole = dataclasses.replace(budget, fixed_pages=True)
        try:
            fit(shapes(requests), share, whole, settled.memory_usage.bytes)
        except ValueError:
            return False
        return True

    least = total(1)
    each = (total(other) - least) // (other - 1)
    fixed = least - each
    if budget is None:
        return Fit(length, each, fixed, None)
    requests = max(0, (budget.max_bytes - fixed) // each)
    while other > 2 and requests and not has_room(requests, budget):
        requests -= 1
    while other > 2 and has_room(requests + 1, budget):
        requests += 1
    return Fit(length, each, fixed, requests)
