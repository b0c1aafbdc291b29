"""ModelRunner: holds the weights and the newest state, and dispatches plans without waiting."""

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from jaxspec.config import Buckets, StateConfig
from jaxspec.models.base import Model
from jaxspec.models.cache import CacheSizes, fork_slots, init_cache
from jaxspec.pallas.recurrent.replay import default_window
from jaxspec.plan import Fork, Program, StepPlan, output_layout, plan_layout
from jaxspec.proposers.base import Proposer
from jaxspec.runner.batch_state import EngineState, empty_rows
from jaxspec.runner.memory import MemoryBudget, bytes_held, fit
from jaxspec.runner.output import PendingOutput
from jaxspec.runner.programs.program_cache import kept
from jaxspec.runner.step import StepConfig, jitted_step
from jaxspec.sampling import Verifier


class ModelRunner:
    """One jitted, donated step per `Program`; the newest `EngineState` is its only state."""

    def __init__(
        self,
        model: Model,
        buckets: Buckets,
        proposer: Proposer | None,
        *,
        dtype: jnp.dtype,
        verifier: Verifier,
        states: StateConfig,
        kv_dtype: jnp.dtype | None = None,
        budget: MemoryBudget | None = None,
    ):
        """Split the weights out of `model` and allocate the state; no step is compiled yet.

        `kv_dtype`: of the cached keys and values; None: `dtype`. `budget`: what there is room for;
        `buckets` has fewer pages then, or a ValueError says what does not fit. None: all fits.
        """
        graph, weights = nnx.split(model)
        leaves, tree = jax.tree.flatten(weights)
        self._shape = model.cache_shape()
        self._dtypes = dtype, jnp.dtype(states.dtype), kv_dtype
        self._states = states
        self._weights = tuple(leaves)
        self._proposer, self._vocab_size = proposer, model.vocab_size
        self._tables = proposer.init_tables(model) if proposer else ()
        self.buckets = buckets if budget is None else fit(buckets, budget, self._held_with)
        self._config = StepConfig(
            buckets=self.buckets,
            model=graph,
            weights=tree,
            proposer=proposer,
            verifier=verifier,
            # A GPU would otherwise multiply float32 in TF32.
            matmul_precision="highest" if dtype == jnp.float32 else None,
        )
        self._state = self._new_state()
        self._steps: dict[Program, jax.stages.Wrapped] = {}
        self._programs: dict[Program, jax.stages.Compiled] = {}
        self._fork: jax.stages.Compiled | None = None
        self._watcher: Executor | None = None

    def dispatch(self, plan: StepPlan) -> PendingOutput:
        """Enqueue `plan` behind all earlier ones; its output will come later.

        Raises:
            KeyError: the program was not warmed up.
            RuntimeError: the plan has forks, and the copy of states was not warmed up.
        """
        if plan.forks:
            if self._fork is None:
                raise RuntimeError(
                    "A plan whose samples share a prompt needs the copy of states, which is not "
                    "compiled. Call `warm_up_fork` first."
                )
            self._run_fork(self._fork, plan.forks)
        return self._run(self._programs[plan.program], plan.packed)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Outputs dispatched inside know when the device was done with them (`done_time`)."""
        with ThreadPoolExecutor(1, "jaxspec-watch") as self._watcher:
            try:
                yield
            finally:
                self._watcher = None

    @property
    def state(self) -> EngineState:
        """The newest state. Read it before the next dispatch, which takes its memory."""
        return self._state

    def reset(self) -> None:
        """Start again from an empty state, whatever became of the last one."""
        del self._state  # its memory goes first
        self._state = self._new_state()

    def lower(self, program: Program) -> jax.stages.Lowered:
        """`program` as XLA's compiler takes it, for exactly the arrays that it will be called with.

        Lowering neither copies nor donates them.
        """
        args = self._weights, self._tables, self._state, self._empty_plan(program)
        return self._step(program, args).lower(*args)

    def warm_up(self, program: Program) -> None:
        """Run `program` on an empty plan, which changes nothing; it is compiled if it was not.

        Twice: a GPU records its command buffers in the second run. JAX keeps what it compiled with
        what it lowered, so what another thread made of `lower(program)` is found here.
        """
        step = self.lower(program).compile()
        for _ in range(2):
            self._run(step, self._empty_plan(program)).result()
        self._programs[program] = step

    def lower_fork(self) -> jax.stages.Lowered:
        """The copy of states that samples of one prompt start from, as XLA's compiler takes it."""
        args = self._state, self._pack_forks(())
        results = jax.tree.structure(self._state)
        return kept(_copy_states, args, results, donated=0, closed_over=None).lower(*args)

    def warm_up_fork(self) -> None:
        """Run the copy of states, without a copy; it is compiled if it was not."""
        fork = self.lower_fork().compile()
        self._run_fork(fork, ())
        jax.block_until_ready(self._state.page_tables)
        self._fork = fork

    def is_warm(self, program: Program) -> bool:
        """Whether `program` is compiled."""
        return program in self._programs

    @property
    def is_fork_warm(self) -> bool:
        """Whether the copy of states is compiled, or never needed: one row has no samples."""
        return self._fork is not None or self.buckets.max_num_seqs == 1

    def memory(self) -> dict[str, int]:
        """Bytes on the device, by what holds them."""
        return bytes_held(self._weights, self._tables, self._state)

    def _held_with(self, buckets: Buckets) -> dict[str, int]:
        state = jax.eval_shape(lambda: self._init_state(buckets))
        return bytes_held(self._weights, self._tables, state)

    def _step(self, program: Program, args: tuple[Any, ...]) -> jax.stages.Wrapped:
        # Kept here too: the cache that engines share may have dropped it between two calls.
        if program not in self._steps:
            step, depends = jitted_step(self._config, program), (self._config, program)
            results = jax.tree.structure((self._state, 0))
            self._steps[program] = kept(step, args, results, donated=2, closed_over=depends)
        return self._steps[program]

    def _run(self, step: jax.stages.Compiled, packed: np.ndarray) -> PendingOutput:
        self._state, output = step(self._weights, self._tables, self._state, packed)
        return PendingOutput(output, output_layout(self.buckets.num_drafts), self._watcher)

    def _run_fork(self, fork: jax.stages.Compiled, forks: tuple[Fork, ...]) -> None:
        self._state = fork(self._state, self._pack_forks(forks))

    def _new_state(self) -> EngineState:
        """Committed to its device, as a step's outputs are: both lower to the same program."""
        state = self._init_state(self.buckets)
        return jax.device_put(state, state.page_tables.sharding)

    def _init_state(self, buckets: Buckets) -> EngineState:
        b, states, window, logits = buckets, self._states, 0, None
        if states.policy == "replay":
            window = states.window or default_window(jnp.dtype(states.dtype).itemsize)
        sizes = CacheSizes(b.num_pages, b.page_size, b.num_slots, b.num_drafts, window)
        if self._proposer is not None and self._proposer.is_probabilistic:
            logits = jnp.zeros((b.num_slots, b.num_drafts, self._vocab_size), jnp.float32)
        return EngineState(
            rows=empty_rows(b.max_num_seqs, b.num_drafts),
            page_tables=jnp.zeros((b.num_slots, b.pages_per_seq), jnp.int32),
            cache=init_cache(self._shape, sizes, *self._dtypes),
            draft_logits=logits,
        )

    def _empty_plan(self, program: Program) -> np.ndarray:
        """A plan that keeps every row where it is and gives none of them tokens."""
        layout = plan_layout(program, self.buckets)
        packed = np.zeros(layout.size, np.int32)
        fields = layout.unpack(packed)
        fields["prev_positions"][:] = np.arange(self.buckets.max_num_seqs)
        fields["new_row_index"][:] = -1
        return packed

    def _pack_forks(self, forks: tuple[Fork, ...]) -> np.ndarray:
        packed = np.zeros((self.buckets.max_new_rows, 5), np.int32)
        for entry, f in enumerate(forks):
            packed[entry] = (
                f.source_slot,
                f.target_slot,
                f.source_page,
                f.target_page,
                f.last_index,
            )
        return packed


@functools.partial(jax.jit, donate_argnums=0)
def _copy_states(state: EngineState, packed: jax.Array) -> EngineState:
    """Give each target slot its source's page table, states and a copy of its partial page."""
    source, target, source_page, target_page, last_index = packed.T
    tables = state.page_tables
    slots = jnp.where(target > 0, target, tables.shape[0])
    # Pages behind the shared ones are the leader's alone; the child's own come with the plan.
    column = jnp.arange(tables.shape[1])[None, :]
    own = jnp.where(column == last_index[:, None], target_page[:, None], 0)
    rows = jnp.where(column < last_index[:, None], tables[source], own)
    tables = tables.at[slots].set(rows, mode="drop")
    cache = fork_slots(state.cache, source, target, source_page, target_page)
    return dataclasses.replace(state, page_tables=tables, cache=cache)
