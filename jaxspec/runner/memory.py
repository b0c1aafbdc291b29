"""Device memory: its use by weights, pools and tables, the pages that fit, weights put away."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Sharding

from jaxspec.cache import MEMORY_LABELS, CacheOptions, CacheSpec, holders, state_policy
from jaxspec.models.base import CheckpointModule, ForwardOutput, Model
from jaxspec.pallas.norm.mailbox import Mailbox
from jaxspec.parallel import ALONE, Group
from jaxspec.plan.step_shapes import StateConfig, StepShapes
from jaxspec.proposers.base import Proposer
from jaxspec.requests.logits_processors import LogitsProcessor
from jaxspec.runner.batch_state import EngineState, empty_state

Leaves = tuple[jax.Array, ...]
HOLDER_WORDS = {
    **{name: f"{held.words}\n({' x '.join(held.per)})" for name, held in MEMORY_LABELS.items()},
    "weights": "weights",
    "page_tables": "page tables\n(slots)",
    "rows": "batch state\n(rows)",
    "draft_logits": "draft logits\n(slots)",
    "proposer_tables": "the proposer's tables",
    "checkpoints": "states of prefixes\n(states x layers)",
    "seen_tokens": "tokens that were seen\n(slots)",
    "bias_tables": "biases of tokens\n(slots)",
    "automata": "automata of grammars",
    "forward_output": "hidden states between\nhalves of a step",
    "logits_processors": "arguments of logits processors\n(slots)",
    "mailboxes": "mailboxes for the\nother devices",
}
"""Labels in plots for the keys of `MemoryUsage.bytes`."""
OF_WEIGHTS = frozenset({"weights", "proposer_tables"})
"""Keys of `MemoryUsage.bytes` that are no part of the state."""


@dataclasses.dataclass(frozen=True)
class MemoryBudget:
    """Limit for weights and caches together; a step's temporaries use the rest of the device."""

    device_bytes: int
    utilization: float  # fraction of `device_bytes` to use
    fixed_pages: bool  # the user set num_pages; otherwise fewer pages are allowed
    others_bytes: int = 0  # bytes in use before loading, for example by another engine

    @staticmethod
    def of(
        utilization: float, num_pages: int | None, group: Group = ALONE
    ) -> "MemoryBudget | None":
        """Return the budget of each device of this node; call it before anything is loaded.

        A GPU reports the memory that JAX may use: three quarters of it, or the fraction
        XLA_PYTHON_CLIENT_MEM_FRACTION.

        Returns:
            The budget, or None if the device does not report its memory (CPU).

        Raises:
            ValueError: `utilization` is not in (0, 1].
        """
        if not 0 < utilization <= 1:
            raise ValueError(f"gpu_memory_utilization must be in (0, 1], got {utilization!r}.")
        own = (there for rank, there in enumerate(group.devices) if rank in group.own_ranks)
        of_devices = [there.memory_stats() or {} for there in own]
        if any("bytes_limit" not in stats for stats in of_devices):
            return None
        budgets = (
            MemoryBudget(
                stats["bytes_limit"],
                utilization,
                num_pages is not None,
                stats.get("bytes_in_use", 0),
            )
            for stats in of_devices
        )
        return min(budgets, key=lambda budget: budget.max_bytes)

    @property
    def max_bytes(self) -> int:
        return int(self.device_bytes * self.utilization) - self.others_bytes

    def at_most(self, num_bytes: int) -> "MemoryBudget":
        """Return the budget, lowered to the `num_bytes` that another node has."""
        others = self.others_bytes + max(0, self.max_bytes - num_bytes)
        return dataclasses.replace(self, others_bytes=others)


@dataclasses.dataclass(frozen=True)
class MemoryUsage:
    """Arrays of a model's runner on each device, as a function of its shapes, before allocation."""

    weights: Any  # shapes and dtypes, as in `tables`
    tables: Any  # the drafter tables
    options: CacheOptions
    specs: tuple[CacheSpec, ...]  # of the pools with these options
    drawn_ids: int  # size of the distributions that drafts are sampled from; 0 if greedy
    vocab_size: int
    forward: Any  # `ForwardOutput` of one token
    processors: tuple[LogitsProcessor, ...] = ()
    mailbox: Mailbox | None = None  # None if all-reduces sum over the devices, or there is one

    @staticmethod
    def of(
        model: Model,
        proposer: Proposer | None,
        drafter: CheckpointModule | None = None,
        *,
        dtype: jnp.dtype,
        kv_dtype: jnp.dtype,
        states: StateConfig,
        group: Group = ALONE,
        processors: tuple[LogitsProcessor, ...] = (),
        routes: bool = False,
    ) -> "MemoryUsage":
        """Return the memory use for a model and its drafter; their parameters may be abstract.

        It is that of each device of the group that shares the model. With `routes` the experts of
        each token are recorded.
        """
        state_dtype = jnp.dtype(states.dtype)
        options = CacheOptions(dtype, kv_dtype, state_dtype, state_policy(states), routes)
        weights = _described(model)
        tables, drawn_ids, specs = (), 0, specs_of(model, proposer, options)
        if proposer is not None:
            tables = _tables(model, proposer, drafter, group)
            drawn_ids = model.vocab_size if proposer.is_probabilistic else 0
        shares_head = model.vocab_size % group.size == 0  # see `norm.mailbox` for the reason
        mailbox = Mailbox.of(group, model.config.hidden_size) if shares_head else None
        forward = _output_of_one_token(model, proposer, dtype)
        sizes = drawn_ids, model.vocab_size
        return MemoryUsage(weights, tables, options, specs, *sizes, forward, processors, mailbox)

    @property
    def step_args(self) -> Any:
        """Arguments of steps besides weights and state: `tables`, and the mailbox, if any."""
        return self.tables if self.mailbox is None else (self.tables, self.mailbox.like())

    def empty_state(self, shapes: StepShapes) -> EngineState:
        sizes = self.drawn_ids, self.vocab_size
        return empty_state(shapes, self.specs, *sizes, self.forward, self.processors)

    def bytes(self, shapes: StepShapes) -> dict[str, int]:
        """Return the bytes of each part of a runner with these shapes."""
        state = jax.eval_shape(lambda: self.empty_state(shapes))
        held = {"weights": self.weights, **holders(self.specs, state.pools)}
        held |= {"page_tables": state.page_tables, "rows": state.rows}
        held |= {"draft_logits": state.draft_logits, "proposer_tables": self.tables}
        held |= {"checkpoints": state.checkpoints} if state.checkpoints else {}
        held |= {"seen_tokens": state.tables.seen, "bias_tables": state.tables.bias}
        held |= {"automata": state.tables.automata, "forward_output": state.forward}
        held |= {"logits_processors": state.tables.processors} if self.processors else {}
        held |= {"mailboxes": self.mailbox.like()} if self.mailbox else {}
        return {
            name: sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(pool))
            for name, pool in held.items()
        }


def specs_of(
    model: Model, proposer: Proposer | None, options: CacheOptions
) -> tuple[CacheSpec, ...]:
    """Return the specs of all pools, the proposer's last."""
    own = () if proposer is None else proposer.cache_specs(options)
    routes = (model.routes_spec(),) if options.routes else ()
    return *model.cache_specs(options), *routes, *own


def _tables(
    model: Model, proposer: Proposer, drafter: CheckpointModule | None, group: Group
) -> Any:
    if group.size == 1:
        return nnx.eval_shape(proposer.init_tables, model, drafter)
    (graph, weights), (other, own) = nnx.split(model), nnx.split(drafter)

    def tables(weights: Any, own: Any) -> Any:
        return proposer.init_tables(nnx.merge(graph, weights), nnx.merge(other, own))

    return group.local(tables, weights, own)


def _output_of_one_token(model: Model, proposer: Proposer | None, dtype: jnp.dtype) -> Any:
    size, taps = model.config.hidden_size, () if proposer is None else proposer.taps
    hidden = jax.ShapeDtypeStruct((1, size), dtype)
    aux_hidden = jax.ShapeDtypeStruct((1, len(taps) * size), dtype) if taps else None
    return jax.eval_shape(lambda *arrays: ForwardOutput(*arrays), hidden, aux_hidden)


def _described(model: Model) -> Any:
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), nnx.state(model))


def fit(
    shapes: StepShapes,
    prefix_cache_share: float,
    budget: MemoryBudget | None,
    held_with: Callable[[StepShapes], dict[str, int]],
) -> StepShapes:
    """Reduce `num_pages` to what fits, and set `num_checkpoints` by `prefix_cache_share`.

    Args:
        shapes: Shapes with the wanted number of pages.
        prefix_cache_share: As in `SchedulerLimits`.
        budget: Memory to use; None means unlimited.
        held_with: Returns the bytes of a runner with given shapes: `MemoryUsage.bytes`.

    Raises:
        ValueError: the number of pages set by the user, or that of one sample of `max_model_len`
            tokens, does not fit.
    """

    def total(num_pages: int, num_checkpoints: int = 0) -> int:
        sizes = {"num_pages": num_pages, "num_checkpoints": num_checkpoints}
        return sum(held_with(dataclasses.replace(shapes, **sizes)).values())

    held = total(shapes.num_pages)
    page = max(1, total(shapes.num_pages + 1) - held)
    share = prefix_cache_share
    state = total(shapes.num_pages, 2) - total(shapes.num_pages, 1) if share else 0

    def fitted(num_pages: int) -> StepShapes:
        beside = num_pages * page * share / (1 - share)  # bytes for checkpoints
        count = max(2, int(beside / max(1, state))) if share else 0
        return dataclasses.replace(shapes, num_pages=num_pages, num_checkpoints=count)

    if budget is None:
        return fitted(shapes.num_pages)
    room = budget.max_bytes - (held - shapes.num_pages * page)  # bytes for pages and checkpoints
    null = total(shapes.num_pages, 1) - held - state if share else 0  # bytes of the null checkpoint
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
    """Format `MemoryUsage.bytes`: a line per non-empty part, largest first, and the total."""
    units = {
        "pages": f"{shapes.num_pages} pages of {shapes.page_size} tokens",
        "slots": f"{shapes.num_slots} slots",
    }
    counts = {name: units[holder.per[0]] for name, holder in MEMORY_LABELS.items()}
    counts |= {"checkpoints": f"{shapes.num_checkpoints} states of prefixes"}
    counts |= dict.fromkeys(("seen_tokens", "bias_tables", "draft_logits"), units["slots"])
    counts |= {"logits_processors": units["slots"]}
    sizes = sorted((item for item in held.items() if item[1]), key=lambda item: -item[1])
    width = max(12, *(len(name) + 1 for name in held))
    lines = [
        f"  {name:<{width}}{human(size):>11}  {counts.get(name, '')}".rstrip()
        for name, size in [*sizes, ("total", sum(held.values()))]
    ]
    return "\n".join(lines)


def human(num_bytes: int) -> str:
    """Format a number of bytes with a unit, such as "1.5 GiB"."""
    size, unit = num_bytes / 1024, "KiB"
    for larger in ("MiB", "GiB"):
        if size >= 1024:
            size, unit = size / 1024, larger
    return f"{size:.1f} {unit}"


class PutAway(NamedTuple):
    """Copies of several tuples of leaves in pinned host memory, while devices are used otherwise.

    A leaf that is in several places is copied once, and is one array again afterwards.
    """

    copies: dict[int, jax.Array]  # by id of the leaf
    shardings: dict[int, Sharding]  # of the leaves on their devices
    places: tuple[tuple[int, ...], ...]  # the id of each leaf of each tuple

    @staticmethod
    def of(*tuples: Leaves) -> "PutAway":
        """Copy leaves, and wait for the copies."""
        leaves = {id(leaf): leaf for each in tuples for leaf in each}
        copies = {
            number: jax.device_put(leaf, leaf.sharding.with_memory_kind("pinned_host"))
            for number, leaf in leaves.items()
        }
        shardings = {number: leaf.sharding for number, leaf in leaves.items()}
        places = tuple(tuple(map(id, each)) for each in tuples)
        return PutAway(jax.block_until_ready(copies), shardings, places)

    def on_devices(self) -> list[Leaves]:
        """Return copies of the tuples on the devices of the leaves, and wait for them."""
        there = jax.block_until_ready(jax.device_put(self.copies, self.shardings))
        return [tuple(there[number] for number in numbers) for numbers in self.places]
