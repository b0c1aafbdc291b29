"""ModelRunner: holds the weights and the newest state, and dispatches plans without waiting."""

import contextlib
import functools
import time
import weakref
from collections.abc import Generator, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import nnx

from jaxspec.handover.fingerprint import fingerprint
from jaxspec.models.base import Model, Published
from jaxspec.plan import EXPORT, PIECES, TABLES, Program, StepPlan, output_layout, plan_layout
from jaxspec.runner.batch_state import EngineState
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.output import DeviceOutput, PendingOutput
from jaxspec.runner.pieces import Pieces
from jaxspec.runner.programs import program_cache, trace_processes
from jaxspec.runner.programs.trace_processes import EarlyTraces, TraceProcesses
from jaxspec.runner.step import jitted_step


class ModelRunner:
    """One jitted, donated step per `Program`; the newest `EngineState` is its only state."""

    def __init__(
        self,
        model: Model,
        blueprint: Blueprint,
        *,
        drafter: Published | None = None,
        early: EarlyTraces | None = None,
    ):
        """Split the weights out of `model` and allocate the state; no step is compiled yet.

        Args:
            model: The model of the blueprint, with its weights.
            blueprint: The engine's programs and the shapes of its arrays.
            drafter: The checkpoint that the proposer was made for, if any.
            early: Programs that other processes began to trace before the weights were read.
        """
        self._blueprint, self._config = blueprint, blueprint.config
        self.shapes, proposer = blueprint.config.shapes, blueprint.config.proposer
        self._holdings, self._early = blueprint.holdings, early
        if early is not None:
            weakref.finalize(self, early.close)
        self._weights = tuple(jax.tree.leaves(nnx.split(model)[1]))
        self._tables = proposer.init_tables(model, drafter) if proposer else ()
        self._places: dict[Program, Path | None] = {}  # on disk
        self._state: EngineState | None = self._new_state()
        # The arrays that a program is lowered for: other threads lower while steps replace them.
        self._like = jax.tree.map(_like, self._state)
        self._steps: dict[Program, jax.stages.Wrapped] = {}
        self._programs: dict[Program, jax.stages.Compiled] = {}
        self._watcher: Executor | None = None
        self.pieces = Pieces(self._config.specs, self.shapes)

    def dispatch(self, plan: StepPlan) -> PendingOutput:
        """Enqueue `plan` behind all earlier ones; its output will come later.

        Raises:
            KeyError: the program was not warmed up.
        """
        for each in plan.before:
            self.dispatch(each)
        if plan.piece is not None:
            self._state = self.pieces.dispatch(plan, self.state)
            return PendingOutput.empty(output_layout(self.shapes.num_drafts))
        return self._run(plan.program, self._programs[plan.program], plan.packed)

    def watch(self) -> contextlib.ExitStack:
        """From now until that is closed, outputs know when the device was done (`done_time`).

        Nothing happens when it is dropped: the garbage collector might do so within a step.
        """
        watching = contextlib.ExitStack()
        self._watcher = watching.enter_context(ThreadPoolExecutor(1, "jaxspec-watch"))
        watching.callback(setattr, self, "_watcher", None)
        return watching

    @property
    def state(self) -> EngineState:
        """The newest state. Read it before the next dispatch, which takes its memory."""
        if self._state is None:
            self._state = self._new_state()
        return self._state

    @functools.cached_property
    def fingerprint(self) -> str:
        """That of the model and its weights (`handover.fingerprint`).

        It can't be computed after `close`.
        """
        return fingerprint(self._blueprint.recipe.config, self._weights)

    def reset(self) -> None:
        """Start again from an empty state, whatever became of the last one.

        It is made when it is needed: by then the old one's memory is free, and an interrupt of the
        making is made good by the next try.
        """
        self._state = None

    def copy_state(self) -> list[np.ndarray]:
        """The leaves of the newest state, copied to the host once the device is done with it."""
        return [np.array(leaf) for leaf in jax.tree.leaves(self.state)]

    def restore(self, leaves: Sequence[np.ndarray]) -> None:
        """Go on from the state that `copy_state` gave.

        Raises:
            ValueError: the leaves are of another engine's state.
        """
        now, tree = jax.tree.flatten(self.state)
        kinds = [[(leaf.shape, leaf.dtype) for leaf in each] for each in (now, leaves)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                "A state must have the arrays of this engine, and the copy has others. Restore it "
                "with the options and the version of the engine that it was copied from."
            )
        where = self.state.page_tables.sharding
        self._state, now = None, None  # its memory goes first
        self._state = jax.device_put(jax.tree.unflatten(tree, leaves), where)

    def close(self) -> None:
        """Give the device's memory back; nothing may be dispatched any more."""
        self._state, self._weights, self._tables = None, (), ()
        self._steps.clear()
        self._programs.clear()
        self.pieces.close()
        if self._early is not None:
            self._early.close()

    def trace_ahead(self, programs: Sequence[Program]) -> Generator[Program]:
        """The programs, in the order in which each can be lowered at once.

        Processes of their own trace those that no file holds, where that is quicker. What such a
        process fails to trace, `lower` traces.
        """
        places = {program: self._place(program) for program in programs if program.num_steps}
        files = {p: file for p, file in places.items() if file and not program_cache.is_there(file)}
        answers: dict[Future[bytes | None], Program] = {}
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
                    return  # Python ends
                yield answers[answer]

    def _early_answer(self, program: Program) -> Future[bytes | None] | None:
        return self._early and self._early.get(self._blueprint.fingerprint(program))

    def is_kept(self, program: Program) -> bool:
        """Return whether `program` need not be traced, because this or another process did so."""
        file = self._place(program) if program.num_steps else None
        return file is not None and program_cache.is_there(file)

    def lower(self, program: Program) -> jax.stages.Lowered:
        """`program` as XLA's compiler takes it, for exactly the arrays that it will be called with.

        Lowering neither copies nor donates them.
        """
        if program in PIECES:
            return self.pieces.lower(program, self.state)
        args = self._args(program)
        return self._step(program, args).lower(*args)

    def warm_up(self, program: Program) -> float:
        """Compile `program` if it is not compiled, and run it on an empty plan.

        Three times: a GPU records its command buffers in the second run, and the third is timed.

        Returns:
            The seconds of the last run.
        """
        if program in PIECES:
            self._state, seconds = self.pieces.warm_up(program, self.state)
            return seconds
        compiled = self.lower(program).compile()  # JAX keeps what another thread compiled of this
        seconds = [self.run_empty(program, compiled) for _ in range(3)]
        self.install(program, compiled)
        return seconds[-1]

    def run_empty(self, program: Program, compiled: jax.stages.Compiled) -> float:
        """Run a step on an empty plan, which changes nothing, and return its seconds."""
        started = time.perf_counter()
        self._run(program, compiled, self._empty_plan(program)).result()
        return time.perf_counter() - started

    def install(self, program: Program, compiled: jax.stages.Compiled) -> None:
        """Let plans name `program`."""
        self._programs[program] = compiled

    def is_warm(self, program: Program) -> bool:
        """Whether `program` is compiled."""
        return program in self._programs or self.pieces.is_warm(program)

    def memory(self) -> dict[str, int]:
        """Bytes on the device, by what holds them."""
        return self._holdings.bytes(self.shapes)

    def _args(self, program: Program) -> tuple[Any, ...]:
        return self._weights, self._tables, self._like.of(program), self._empty_plan(program)

    def _place(self, program: Program) -> Path | None:
        """Where the program is kept on disk."""
        if program not in self._places:
            step, args = jitted_step(self._config, program), self._args(program)
            closed_over = self._blueprint.depends, program
            self._places[program] = program_cache.place(step, args, closed_over)
        return self._places[program]

    def _step(self, program: Program, args: tuple[Any, ...]) -> jax.stages.Wrapped:
        # Kept here too: the cache that engines share may have dropped it between two calls.
        if program not in self._steps:
            step, place = jitted_step(self._config, program), self._place(program)
            output = DeviceOutput.structure(program.sampler)
            results = jax.tree.structure((args[2], output))
            self._steps[program] = program_cache.kept(place, step, args, results, donated=2)
        return self._steps[program]

    def _run(
        self, program: Program, step: jax.stages.Compiled, packed: np.ndarray
    ) -> PendingOutput:
        state = self.state
        given = state.of(program)
        given, output = step(self._weights, self._tables, given, packed)
        self._state = state.replaced_by(given)
        return PendingOutput(output, output_layout(self.shapes.num_drafts), self._watcher)

    def _new_state(self) -> EngineState:
        """Committed to its device, as a step's outputs are: both lower to the same program."""
        state = self._holdings.empty_state(self.shapes)
        return jax.device_put(state, state.page_tables.sharding)

    def _empty_plan(self, program: Program) -> np.ndarray:
        """A plan that keeps every row where it is, gives none of them tokens, and moves nothing."""
        layout = plan_layout(program, self.shapes)
        packed = np.zeros(layout.size, np.int32)
        fields = layout.unpack(packed)
        if program in (TABLES, EXPORT):
            return packed
        fields["prev_positions"][:] = np.arange(self.shapes.max_num_seqs)
        fields["new_row_index"][:] = -1
        return packed


def _like(leaf: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(
        leaf.shape, leaf.dtype, sharding=leaf.sharding, weak_type=leaf.weak_type
    )
