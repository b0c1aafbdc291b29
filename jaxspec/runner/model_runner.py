"""`ModelRunner`: holds the weights and the current device state, and dispatches plans."""

import contextlib
import functools
import operator
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, TypeVar

import jax
import numpy as np
from flax import nnx

from jaxspec.models.base import CheckpointModule, Model
from jaxspec.models.fingerprint import fingerprint
from jaxspec.parallel import Group
from jaxspec.plan.plan import (
    AnyProgram,
    CopyBlock,
    ExportState,
    ForwardPass,
    Program,
    StepPlan,
    WriteSampling,
    output_layout,
    plan_layout,
)
from jaxspec.proposers.base import Proposer
from jaxspec.requests.logits_processors import LogitsProcessor
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.runner.batch_state import EngineState
from jaxspec.runner.blocks import BlockCopies
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.memory import OF_WEIGHTS, PutAway
from jaxspec.runner.output import DeviceOutput, PendingOutput
from jaxspec.runner.portable_blocks import PortableBlocks
from jaxspec.runner.programs import program_cache, trace_processes
from jaxspec.runner.programs.trace_processes import EarlyTraces, TraceProcesses
from jaxspec.runner.step import jitted_step

SomeProgram = TypeVar("SomeProgram", bound=AnyProgram)
NewLeaves = Callable[[Callable[[int], jax.Array]], Iterable[tuple[int, jax.Array]]]
"""Returns indices and values of leaves; its argument returns a leaf before, by index."""


class ModelRunner:
    """Dispatches plans without waiting. Has one compiled program per `AnyProgram`.

    The current `EngineState` is donated to each program and replaced by its result.
    """

    def __init__(
        self,
        model: Model,
        blueprint: Blueprint,
        *,
        drafter: CheckpointModule | None = None,
        early: EarlyTraces | None = None,
    ):
        """Split the weights out of `model` and allocate the state; no step is compiled yet.

        Args:
            model: The model of the blueprint, with its weights.
            blueprint: The engine's programs and the shapes of its arrays.
            drafter: The model or head that the proposer drafts with, if any.
            early: Programs that other processes trace since before the weights were read.
        """
        self._blueprint, self._config = blueprint, blueprint.config
        self.shapes, proposer = blueprint.config.shapes, blueprint.config.proposer
        self._holdings, self._early = blueprint.memory_usage, early
        if early is not None:
            weakref.finalize(self, early.close)
        # Arrays, or their shapes while the weights are put away or dropped.
        self._weights: tuple[Any, ...] = tuple(jax.tree.leaves(nnx.split(model)[1]))
        self._drafter, of_drafter = nnx.split(drafter)
        leaves, self._drafter_tree = jax.tree.flatten(of_drafter)
        self._of_drafter: tuple[Any, ...] = tuple(leaves)
        self._drafter_tables: Any = ()
        if proposer is not None:
            self._renew_tables(proposer)
        self._mailbox = self._new_mailbox()
        # Shapes to lower programs with: weights and tables may change while other threads lower.
        operands = self._weights, self._tables
        self._operands = jax.tree.map(_like if self.group.size > 1 else _unplaced, operands)
        self._put_away: PutAway | None = None  # weights on the host, while they are not here
        self.num_changes = 0  # of the weights; it also grows before each and after the last
        self._digest = -1, ""  # the fingerprint after this number of changes
        self._places: dict[AnyProgram, Path | None] = {}  # files in the program cache
        self._state: EngineState | None = self._new_state()
        # Shapes to lower programs with: other threads lower while steps replace the arrays.
        self._like = jax.tree.map(_like, self._state)
        self._steps: dict[AnyProgram, jax.stages.Wrapped] = {}
        self._programs: dict[AnyProgram, jax.stages.Compiled] = {}
        self._watcher: Executor | None = None
        self.blocks = BlockCopies(self._config.specs, self.shapes, self.group)

    @property
    def group(self) -> Group:
        """Devices that run the programs."""
        return self._config.group

    def model(self) -> Model:
        """Return a model with the current weights, whose arrays it shares."""
        weights = jax.tree.unflatten(self._config.weights, self._weights)
        return nnx.merge(self._config.model, weights)

    @property
    def processors(self) -> tuple[LogitsProcessor, ...]:
        """Logits processors that programs are compiled for."""
        return self._holdings.processors

    @property
    def kv_cache(self) -> dict[str, Any]:
        """Dtype of keys and values, and whether the checkpoint's scales divide them."""
        config = self._blueprint.model_spec.config
        return {"dtype": self._holdings.options.kv_dtype.name, "is_scaled": config.scales_kv}

    def dispatch(self, plan: StepPlan) -> PendingOutput:
        """Enqueue a plan after all earlier ones, and return its pending output.

        Raises:
            KeyError: the program is not compiled.
        """
        for each in plan.before:
            self.dispatch(each)
        if plan.block is not None:
            self._state = self.blocks.dispatch(plan, self.state)
            return PendingOutput.empty(output_layout(self.shapes.num_drafts))
        return self._run(plan.program, self._programs[plan.program], plan.packed)

    def watch(self) -> contextlib.ExitStack:
        """Measure the completion times of dispatches (`done_time`) until the result is closed.

        Garbage collection of the result does not close it, since it may happen within a step.
        """
        watching = contextlib.ExitStack()
        self._watcher = watching.enter_context(ThreadPoolExecutor(1, "jaxspec-watch"))
        watching.callback(setattr, self, "_watcher", None)
        return watching

    def on_loss(self, act: Callable[[RuntimeError], object]) -> None:
        """Call `act`, in another thread, if another node is lost. This runner has the only node."""

    @property
    def state(self) -> EngineState:
        """The current state; read it before the next dispatch, which donates its arrays."""
        if self._state is None:  # after a failed step, whose exchanges may be incomplete
            self._mailbox, self._state = self._new_mailbox(), self._new_state()
        return self._state

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the model and its weights; can't be computed after `close`."""
        number, digest = self._digest
        if number != self.num_changes:
            # First, because weights may be replaced meanwhile: then it is computed again.
            number = self.num_changes
            digest = fingerprint(
                self._blueprint.model_spec,
                self._weights,
                self.group,
                is_deterministic=self._blueprint.config.is_deterministic,
            )
            self._digest = number, digest
        return digest

    @property
    def weights(self) -> tuple[jax.Array, ...]:
        """The leaves of the model, in the order of `ModelSpec.weights_of`."""
        return self._weights

    @property
    def drafter_weights(self) -> tuple[jax.Array, ...]:
        """The leaves of the drafter's own checkpoint, likewise; empty without one."""
        return self._of_drafter

    def replace_weights(self, model: NewLeaves, drafter: NewLeaves) -> None:
        """Replace leaves one by one, and then all that was computed from earlier ones.

        Steps in flight keep the old leaves. An error leaves some new and some old ones.

        Args:
            model: Returns the indices and values of new leaves of the model, given its leaves.
            drafter: The same for the drafter.
        """
        for index, value in model(lambda index: self._weights[index]):
            self.num_changes += 1
            self._weights = (*self._weights[:index], value, *self._weights[index + 1 :])
        for index, value in drafter(lambda index: self._of_drafter[index]):
            self.num_changes += 1
            self._of_drafter = (*self._of_drafter[:index], value, *self._of_drafter[index + 1 :])
        if self._config.proposer is not None:
            self._drafter_tables = ()  # frees the memory of the old ones
            self._renew_tables(self._config.proposer)
        self.num_changes += 1

    @property
    def has_weights(self) -> bool:
        """False while they are dropped or on the host."""
        leaves = *self._weights, *self._of_drafter
        return all(isinstance(leaf, jax.Array) for leaf in leaves)

    @property
    def has_put_away(self) -> bool:
        """True between `put_away` and `bring_back`."""
        return self._put_away is not None

    def put_away(self) -> None:
        """Move the weights, and what is computed from them, to host memory, if they are here.

        Other holders of the arrays keep their memory. An error changes nothing.
        """
        if self.has_weights:
            tables, self._tables_tree = jax.tree.flatten(self._drafter_tables)
            self._put_away = PutAway.of(self._weights, self._of_drafter, tuple(tables))
            self._forget_weights()

    def drop_weights(self) -> None:
        """Drop the weights, also those in host memory, until `replace_weights` has all of them."""
        self._put_away = None
        self._forget_weights()

    def bring_back(self) -> None:
        """Undo `put_away`; an error changes nothing."""
        assert self._put_away is not None
        self._weights, self._of_drafter, tables = self._put_away.on_devices()
        self._drafter_tables = jax.tree.unflatten(self._tables_tree, tables)
        self._put_away = None

    def _forget_weights(self) -> None:
        """Replace the arrays by their shapes and devices, which an update needs."""
        self._weights = tuple(map(_like, self._weights))
        self._of_drafter = tuple(map(_like, self._of_drafter))
        self._drafter_tables = ()

    @functools.cached_property
    def portable(self) -> PortableBlocks:
        """Conversions of blocks for request migration."""
        return PortableBlocks(self.blocks, self._blueprint.whole_specs(), self.group)

    def reset(self) -> None:
        """Drop the state; the next use allocates an empty one.

        By then the memory of the old state is free, and an interrupted allocation is repeated.
        """
        self._state = self._mailbox = None

    def allocate(self) -> None:
        """Allocate the state now, if it was dropped, and not at its next use."""
        self._state = self.state

    def copy_state(self) -> list[np.ndarray]:
        """Wait for the current state and return copies of its leaves on the host."""
        return [np.array(leaf) for leaf in jax.tree.leaves(self.state)]

    def restore(self, leaves: Sequence[np.ndarray]) -> None:
        """Replace the state by the leaves returned by `copy_state`.

        Raises:
            ValueError: the leaves have other shapes or dtypes than this engine's state.
        """
        now, tree = jax.tree.flatten(self.state)
        kinds = [[(leaf.shape, leaf.dtype) for leaf in each] for each in (now, leaves)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                "A state must have the arrays of this engine, and the copy has others. Restore it "
                "with the options and the version of the engine that it was copied from."
            )
        where = self.state.page_tables.sharding
        self._state, now = None, None  # frees its memory before the copy
        self._state = jax.device_put(jax.tree.unflatten(tree, leaves), where)

    def close(self) -> None:
        """Free the device memory; no plan may be dispatched after this."""
        self._state, self._weights = None, ()
        self._of_drafter = self._drafter_tables = ()
        self._mailbox = self._put_away = None
        self._steps.clear()
        self._programs.clear()
        self.blocks.close()
        if self._early is not None:
            self._early.close()

    def trace_ahead(self, programs: Sequence[SomeProgram]) -> Generator[SomeProgram]:
        """Yield the programs in the order in which they can be lowered without delay.

        Other processes trace those that the program cache lacks, if that saves time. Programs that
        they fail to trace are yielded, too: `lower` traces them.
        """
        places: dict[SomeProgram, Path | None] = {
            program: self._place(program)
            for program in programs
            if isinstance(program, Program | ForwardPass)
        }
        files = {p: file for p, file in places.items() if file and not program_cache.is_there(file)}
        answers: dict[Future[bytes | None], SomeProgram] = {}
        for program in files:
            if (answer := self._early_answer(program)) is not None:
                answers[answer] = program
        others = [program for program in files if program not in answers.values()]
        count = trace_processes.num_processes(len(others))
        with contextlib.closing(TraceProcesses(count)) as processes:
            for program in others if count else ():
                if (request := self._blueprint.request(program)) is not None:
                    answers[processes.ask(request)] = program
            asked = set(answers.values())
            yield from (program for program in programs if program not in asked)
            for answer in as_completed(answers):
                if (content := answer.result()) is not None:
                    program_cache.hand_over(files[answers[answer]], content)
                elif processes.is_closed or (self._early and self._early.is_closed):
                    return  # the interpreter exits, or the engine is closed
                yield answers[answer]

    def _early_answer(self, program: AnyProgram) -> Future[bytes | None] | None:
        return self._early and self._early.get(self._blueprint.fingerprint(program))

    def is_kept(self, program: AnyProgram) -> bool:
        """Return whether the program cache holds `program`, so that it need not be traced."""
        is_traced = isinstance(program, Program | ForwardPass)
        file = self._place(program) if is_traced else None
        return file is not None and program_cache.is_there(file)

    def lower(self, program: AnyProgram) -> jax.stages.Lowered:
        """Lower `program` for the arrays that it will be called with.

        Lowering neither copies nor donates them.
        """
        if isinstance(program, CopyBlock):
            return self.blocks.lower(program, self.state)
        args = self._args(program)
        return self._step(program, args).lower(*args)

    def warm_up(self, program: AnyProgram) -> float:
        """Compile `program` if it is not compiled, and run it three times on an empty plan.

        A GPU records its command buffers in the second run; the third run is timed.

        Returns:
            The seconds of the last run.
        """
        if isinstance(program, CopyBlock):
            self._state, seconds = self.blocks.warm_up(program, self.state)
            return seconds
        compiled = self.lower(program).compile()  # cached by JAX if another thread compiled it
        seconds = [self.run_empty(program, compiled) for _ in range(3)]
        self.install(program, compiled)
        return seconds[-1]

    def run_empty(self, program: AnyProgram, compiled: jax.stages.Compiled) -> float:
        """Run a program on an empty plan, which changes nothing, and return the seconds."""
        started = time.perf_counter()
        self._run(program, compiled, self._empty_plan(program)).result()
        return time.perf_counter() - started

    def install(self, program: AnyProgram, compiled: jax.stages.Compiled) -> None:
        """Make `program` available to `dispatch`."""
        self._programs[program] = compiled

    def is_warm(self, program: AnyProgram) -> bool:
        return program in self._programs or self.blocks.is_warm(program)

    def memory(self) -> dict[str, int]:
        """Return the bytes of each part of device memory; see `MemoryUsage.bytes`.

        Parts are 0 while they are freed.
        """
        return {
            name: size
            if (self.has_weights if name in OF_WEIGHTS else self._state is not None)
            else 0
            for name, size in self._holdings.bytes(self.shapes).items()
        }

    def _args(self, program: AnyProgram) -> tuple[Any, ...]:
        return *self._operands, self._like.of(program), self._empty_plan(program)

    def _place(self, program: AnyProgram) -> Path | None:
        """Return the program's file in the program cache."""
        if program not in self._places:
            step, args = jitted_step(self._config, program), self._args(program)
            closed_over = self._blueprint.depends, program
            self._places[program] = program_cache.place(step, args, closed_over)
        return self._places[program]

    def _step(self, program: AnyProgram, args: tuple[Any, ...]) -> jax.stages.Wrapped:
        # Stored until `close`: `jitted_step` and `kept` share only what an engine holds.
        if program not in self._steps:
            step, place = jitted_step(self._config, program), self._place(program)
            features = program.features if isinstance(program, Program) else GREEDY
            results = jax.tree.structure((args[2], DeviceOutput.structure(features)))
            options = self._config.jit_options
            self._steps[program] = program_cache.kept(place, step, args, results, options)
        return self._steps[program]

    def _run(
        self, program: AnyProgram, step: jax.stages.Compiled, packed: np.ndarray
    ) -> PendingOutput:
        state = self.state
        given = state.of(program)
        given, output = step(self._weights, self._tables, given, packed)
        self._state = state.replaced_by(given)
        return PendingOutput(output, output_layout(self.shapes.num_drafts), self._watcher)

    @property
    def _tables(self) -> Any:
        """The drafter tables, with the mailbox if the devices exchange rows by one."""
        tables, mailbox = self._drafter_tables, self._mailbox
        return tables if mailbox is None else (tables, mailbox)

    def _new_mailbox(self) -> Any:
        mailbox = self._config.mailbox
        return None if mailbox is None else mailbox.allocate(self.group)

    def _new_state(self) -> EngineState:
        """Return an empty state committed to its device like a step's outputs, to lower equally."""
        if self.group.size > 1:
            return self._allocate()
        state = self._holdings.empty_state(self.shapes)
        return jax.device_put(state, state.page_tables.sharding)

    @functools.cached_property
    def _allocate(self) -> Callable[[], EngineState]:
        return jax.jit(self.group.on_each(lambda: self._holdings.empty_state(self.shapes)))

    def _renew_tables(self, proposer: Proposer) -> None:
        if self.group.size == 1:
            self._drafter_tables = self._tables_of(proposer, self._weights, self._of_drafter)
            return
        # A program would copy the drafter's leaves.
        own = self._of_drafter if self._are_tables_the_drafter else None
        self._drafter_tables = own or self._tables_program(self._weights, self._of_drafter)

    @functools.cached_property
    def _are_tables_the_drafter(self) -> bool:
        found: list[bool] = []

        def compare(weights: Any, of_drafter: Any) -> Any:
            assert self._config.proposer is not None
            tables = self._tables_of(self._config.proposer, weights, of_drafter)
            is_tuple = isinstance(tables, tuple) and len(tables) == len(of_drafter)
            found.append(is_tuple and all(map(operator.is_, tables, of_drafter)))
            return tables

        jax.eval_shape(self.group.on_each(compare), self._weights, self._of_drafter)
        return all(found)

    @functools.cached_property
    def _tables_program(self) -> Callable[..., Any]:
        assert self._config.proposer is not None
        tables = functools.partial(self._tables_of, self._config.proposer)
        return jax.jit(self.group.on_each(tables))

    def _tables_of(self, proposer: Proposer, weights: Any, of_drafter: Any) -> Any:
        whole = nnx.merge(self._config.model, jax.tree.unflatten(self._config.weights, weights))
        own = jax.tree.unflatten(self._drafter_tree, of_drafter)
        return proposer.init_tables(whole, nnx.merge(self._drafter, own))

    def _empty_plan(self, program: AnyProgram) -> np.ndarray:
        """Return a plan that keeps all rows in place and computes, moves and writes nothing."""
        layout = plan_layout(program, self.shapes)
        packed = np.zeros(layout.size, np.int32)
        fields = layout.unpack(packed)
        if isinstance(program, WriteSampling | ExportState):
            return packed
        fields["prev_positions"][:] = np.arange(self.shapes.max_num_seqs)
        fields["new_row_index"][:] = -1
        return packed


def _unplaced(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, weak_type=leaf.weak_type)


def _like(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
    )
