"""Memory: what holds how much of the device's, and how many pages fit beside the rest."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxspec import device
from jaxspec.cache import HOLDERS, CacheOptions, CacheSpec, holders, state_policy
from jaxspec.config import StateConfig, StepShapes
from jaxspec.models.base import Model, Published
from jaxspec.proposers.base import Proposer
from jaxspec.runner.batch_state import EngineState, empty_state

HOLDER_WORDS = {
    **{name: f"{held.words}\n({' x '.join(held.per)})" for name, held in HOLDERS.items()},
    "weights": "weights",
    "page_tables": "page tables\n(slots)",
    "rows": "batch state\n(rows)",
    "draft_logits": "draft logits\n(slots)",
    "proposer_tables": "the proposer's tables",
    "checkpoints": "states of prefixes\n(states x layers)",
    "seen_tokens": "tokens that were seen\n(slots)",
    "bias_tables": "biases of tokens\n(slots)",
}
"""Holders of memory by what `Holdings.bytes` calls them, in words for pictures."""


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """What weights and caches may take together; a step's own arrays live in what is left."""

    device_bytes: int
    utilization: float  # the share of them
    fixed_pages: bool  # the user said how many pages; else there may be fewer than asked for
    others_bytes: int = 0  # what else is held already, such as another engine

    @staticmethod
    def of(utilization: float, num_pages: int | None) -> "MemoryBudget | None":
        """The default device's, before anything is loaded; None if it does not tell, as a CPU.

        A GPU tells what JAX may take of it: three quarters, or XLA_PYTHON_CLIENT_MEM_FRACTION.

        Raises:
            ValueError: `utilization` is not in (0, 1].
        """
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {utilization!r}.")
        stats = device.default_device().memory_stats() or {}
        if "bytes_limit" not in stats:
            return None
        in_use = stats.get("bytes_in_use", 0)
        return MemoryBudget(stats["bytes_limit"], utilization, num_pages is not None, in_use)

    @property
    def max_bytes(self) -> int:
        """The bound."""
        return int(self.device_bytes * self.utilization) - self.others_bytes


@dataclasses.dataclass(frozen=True)
class Holdings:
    """What a runner of a model holds, whatever its sizes; it tells that before there is memory."""

    weights: Any  # shapes and dtypes in place of arrays, and so the tables
    tables: Any  # the proposer's
    specs: tuple[CacheSpec, ...]
    drawn_ids: int  # of the distributions that drafts are drawn from
    vocab_size: int

    @staticmethod
    def of(
        model: Model,
        proposer: Proposer | None,
        drafter: Published | None = None,
        *,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        states: StateConfig,
    ) -> "Holdings":
        """Those of a runner for `model` and its `drafter`, whose parameters need no values."""
        options = CacheOptions(dtype, kv_dtype, jnp.dtype(states.dtype), state_policy(states))
        weights = _described(model)
        tables, drawn_ids, specs = (), 0, model.cache_specs(options)
        if proposer is not None:
            tables = nnx.eval_shape(proposer.init_tables, model, drafter)
            drawn_ids = model.vocab_size if proposer.is_probabilistic else 0
            specs += proposer.cache_specs(options)
        return Holdings(weights, tables, specs, drawn_ids, model.vocab_size)

    def empty_state(self, shapes: StepShapes) -> EngineState:
        """The state of a runner of such sizes, without requests."""
        return empty_state(shapes, self.specs, self.drawn_ids, self.vocab_size)

    def bytes(self, shapes: StepShapes) -> dict[str, int]:
        """Bytes by what holds them, in a runner of such sizes."""
        state = jax.eval_shape(lambda: self.empty_state(shapes))
        held = {"weights": self.weights, **holders(self.specs, state.pools)}
        held |= {"page_tables": state.page_tables, "rows": state.rows}
        held |= {"draft_logits": state.draft_logits, "proposer_tables": self.tables}
        held |= {"checkpoints": state.checkpoints} if state.checkpoints else {}
        held |= {"seen_tokens": state.tables.seen, "bias_tables": state.tables.bias}
        return {
            name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
            for name, pool in held.items()
        }


def _described(model: Model) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.state(model))


def fit(
    shapes: StepShapes,
    budget: MemoryBudget | None,
    held_with: Callable[[StepShapes], dict[str, int]],
) -> StepShapes:
    """`shapes`, with as many of its pages as the budget has room for; None has room for all.

    And with as many checkpoints of states beside the pages as `prefix_cache_share` says.
    `held_with`: `Holdings.bytes`.

    Raises:
        ValueError: the pages that the user asked for do not fit, or not even those of one sample.
    """

    def total(num_pages: int, num_checkpoints: int = 0) -> int:
        sizes = {"num_pages": num_pages, "num_checkpoints": num_checkpoints}
        return sum(held_with(dataclasses.replace(shapes, **sizes)).values())

    held = total(shapes.num_pages)
    page = max(1, total(shapes.num_pages + 1) - held)
    share = shapes.prefix_cache_share
    state = total(shapes.num_pages, 2) - total(shapes.num_pages, 1) if share else 0

    def fitted(num_pages: int) -> StepShapes:
        beside = num_pages * page * share / (1 - share)  # bytes of checkpoints
        count = max(2, int(beside / max(1, state))) if share else 0
        return dataclasses.replace(shapes, num_pages=num_pages, num_checkpoints=count)

    if budget is None:
        return fitted(shapes.num_pages)
    room = budget.max_bytes - (held - shapes.num_pages * page)  # for pages and checkpoints
    null = total(shapes.num_pages, 1) - held - state if share else 0  # the null checkpoint
    fitting = min(shapes.num_pages, int((room - null) * (1 - share)) // page)
    fitting = min(fitting, (room - null - fitted(max(fitting, 2)).num_checkpoints * state) // page)
    needed = shapes.num_pages if budget.fixed_pages else 1 + shapes.pages_per_seq
    if fitting < needed:
        too_big = fitted(needed)
        raise ValueError(_refusal(too_big, budget, held_with(too_big)))
    return fitted(fitting)


def _refusal(shapes: StepShapes, budget: MemoryBudget, held: dict[str, int]) -> str:
    pages = "num_pages" if budget.fixed_pages else "the pages of one sample of max_model_len"
    fewer = "num_pages, " * budget.fixed_pages
    without = "enable_prefix_caching=False, " if shapes.num_checkpoints else ""
    others = f" less {human(budget.others_bytes)} in use" if budget.others_bytes else ""
    return (
        f"Weights and caches must fit gpu_memory_utilization={budget.utilization} of the "
        f"{human(budget.device_bytes)} that JAX may use{others}, {human(budget.max_bytes)}; with "
        f"{pages} "
        f"({shapes.num_pages}) they would take\n{memory_map(held, shapes)}\n"
        f"Lower {fewer}max_num_seqs or max_model_len, or keep less with {without}"
        "state_policy='replay', state_dtype='float16' or kv_dtype='float8_e4m3fn'; or raise "
        "gpu_memory_utilization, or what JAX may use of a GPU, by XLA_PYTHON_CLIENT_MEM_FRACTION."
    )


def memory_map(held: dict[str, int], shapes: StepShapes) -> str:
    """A line for each holder in `Holdings.bytes` that holds something, by size, and a sum."""
    units = {
        "pages": f"{shapes.num_pages} pages of {shapes.page_size} tokens",
        "slots": f"{shapes.num_slots} slots",
    }
    counts = {name: units[holder.per[0]] for name, holder in HOLDERS.items()}
    counts |= {"checkpoints": f"{shapes.num_checkpoints} states of prefixes"}
    counts |= dict.fromkeys(("seen_tokens", "bias_tables", "draft_logits"), units["slots"])
    sizes = sorted((item for item in held.items() if item[1]), key=lambda item: -item[1])
    width = max(12, *(len(name) + 1 for name in held))
    lines = [
        f"  {name:<{width}}{human(size):>11}  {counts.get(name, '')}".rstrip()
        for name, size in [*sizes, ("total", sum(held.values()))]
    ]
    return "\n".join(lines)


def human(num_bytes: int) -> str:
    """So many bytes in a unit that people read: "1.5 GiB"."""
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"
