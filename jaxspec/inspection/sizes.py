"""How large a model is, what it keeps for requests, and how many of them fit on the device."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable

import jax
from flax import nnx

from jaxspec.cache import CacheSpec, PoolSizes, allocate
from jaxspec.config import StepShapes
from jaxspec.loading import Settled, shapes_of
from jaxspec.models.base import Model
from jaxspec.models.layers.parameters import Placement
from jaxspec.options import EngineConfig
from jaxspec.prefixes import prefix_sizes
from jaxspec.runner.memory import MemoryBudget, fit

_LENGTHS = (2048, 8192, 32768, 131072)
_ROUTED = ".experts."  # in the names of tensors of which a token meets its chosen ones alone


@dataclasses.dataclass(frozen=True)
class Parameters:
    """Numbers of published parameters; padding and what is stored twice count for nothing."""

    total: int
    active: int  # that a token is multiplied with: no row of an embedding, no expert not chosen


@dataclasses.dataclass(frozen=True)
class CacheBytes:
    """What an engine keeps for requests, in bytes."""

    token: int  # of the pages, over all layers, those of a draft head too
    request: int  # of a slot, whatever the request's length
    request_without_drafts: int
    checkpoint: int = 0  # of a state that is kept of a prefix; 0: none are kept


@dataclasses.dataclass(frozen=True)
class Fit:
    """What requests of one length take, all of them as long as they may become."""

    max_model_len: int  # tokens, prompt and output
    request_bytes: int  # of each; on average, where states of prefixes are kept beside them
    fixed_bytes: int  # of weights and whatever else no request changes
    requests: int | None  # how many fit on this device at once; None: it does not tell its memory


def parameters(model: Model, placements: Iterable[Placement]) -> Parameters:
    """The parameters that these of the model's placements fill."""
    share = 1.0
    if (experts := model.experts) is not None:
        share = experts.routing.num_chosen / experts.routing.num_experts
    embedding = model.trunk.embedding
    published = {placement.name: placement for placement in placements}
    total, active = 0, 0.0
    for name, placement in published.items():
        size = math.prod(placement.shape)
        total += size
        if embedding is None or placement.param is not embedding.weight:
            active += size * (share if _ROUTED in name else 1)
    return Parameters(total, round(active))


def weight_bytes(model: Model) -> dict[str, int]:
    """Bytes that the parameters take on the device, padding included, by dtype."""
    num_bytes: Counter[str] = Counter()
    for leaf in jax.tree.leaves(nnx.state(model)):
        num_bytes[leaf.dtype.name] += leaf.size * leaf.dtype.itemsize
    return dict(num_bytes)


def cache_bytes(settled: Settled) -> CacheBytes:
    """What tokens and requests cost, with the drafts that were settled on and without."""
    specs, width = settled.holdings.specs, settled.shapes.width
    held = [
        sum(settled.holdings.bytes(dataclasses.replace(settled.shapes, num_checkpoints=n)).values())
        for n in (1, 2)
    ]
    least = _pool_bytes(specs, width)
    return CacheBytes(
        token=_pool_bytes(specs, width, pages=2) - least,
        request=_pool_bytes(specs, width, slots=2) - least,
        request_without_drafts=_pool_bytes(specs, 1, slots=2) - _pool_bytes(specs, 1),
        checkpoint=held[1] - held[0] if settled.shapes.prefix_cache_share else 0,
    )


def _pool_bytes(specs: tuple[CacheSpec, ...], width: int, *, pages: int = 1, slots: int = 1) -> int:
    """Bytes of all pools with so many pages of one token, for rows of so many tokens."""
    sizes = PoolSizes(pages, page_size=1, num_slots=slots, width=width)
    pools = jax.eval_shape(lambda: allocate(specs, sizes))
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pools))


def fits(
    options: EngineConfig, model: Model, settled: Settled, budget: MemoryBudget | None
) -> tuple[Fit, ...]:
    """What requests take by their length, up to the model's longest."""
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
    settled: Settled,
    budget: MemoryBudget | None,
) -> Fit:
    """All that an engine holds grows evenly with its requests, so two sizes tell of any.

    So do the states of prefixes, which are a share of the caches, but for whole states.
    """
    kept = prefix_sizes(options, settled.holdings.specs)
    other = 129 if kept.get("prefix_cache_share") else 2

    def shapes(requests: int) -> StepShapes:
        sizes = {"max_num_seqs": requests, "max_model_len": length, "num_pages": None}
        defaults = {"max_num_batched_tokens": None, "decode_buckets": None}
        asked = dataclasses.replace(options, **sizes, **defaults)
        return dataclasses.replace(shapes_of(asked, model, settled.shapes.draft_counts), **kept)

    def total(requests: int) -> int:
        held = settled.holdings.bytes
        return sum(held(fit(shapes(requests), None, held)).values())

    def has_room(requests: int, budget: MemoryBudget) -> bool:
        whole = dataclasses.replace(budget, fixed_pages=True)
        try:
            fit(shapes(requests), whole, settled.holdings.bytes)
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
