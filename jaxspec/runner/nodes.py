"""Runners of a group on several nodes: node 0 sends its launches, and the others repeat them."""

import contextlib
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any

import jax
import numpy as np

from jaxspec.models.base import CheckpointModule, Model
from jaxspec.nodes import NodeError
from jaxspec.nodes.follower import Follower
from jaxspec.nodes.handshake import differences
from jaxspec.nodes.leader import Leader
from jaxspec.nodes.wire import Frame
from jaxspec.plan.plan import AnyProgram, StepOutput, entry_of, plan_layout, program_of
from jaxspec.requests.logits_processors import place_of, source_digest
from jaxspec.runner.blueprint import Blueprint
from jaxspec.runner.memory import MemoryBudget
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.output import PendingOutput
from jaxspec.runner.programs.trace_processes import EarlyTraces, num_cores


class LeaderRunner(ModelRunner):
    """Runner of node 0. All nodes launch the same programs on the same plans, in one order.

    A launch and its frame are one call of `Leader.call`. Waiting for an output raises `NodeError`
    when a node is lost.
    """

    def __init__(
        self,
        leader: Leader,
        model: Model,
        blueprint: Blueprint,
        *,
        drafter: CheckpointModule | None = None,
        early: EarlyTraces | None = None,
    ):
        """Create a `ModelRunner` whose launches are sent to the followers of `leader`."""
        self._leader = leader
        super().__init__(model, blueprint, drafter=drafter, early=early)

    def on_loss(self, act: Callable[[NodeError], object]) -> None:
        self._leader.on_loss = act

    def copy_state(self) -> list[np.ndarray]:
        raise ValueError(
            "The state of a group on several nodes can't be copied to one of them. Use nnodes=1."
        )

    def lower(self, program: AnyProgram) -> jax.stages.Lowered:
        # So that all nodes compile at the same time.
        self._send(Frame("compile", {"program": entry_of(program)}))
        return super().lower(program)

    def reset(self) -> None:
        with contextlib.suppress(NodeError):
            self._send(Frame("reset"))
        super().reset()

    def close(self) -> None:
        super().close()
        end_group(self._leader)

    def _run(
        self, program: AnyProgram, step: jax.stages.Compiled, packed: np.ndarray
    ) -> PendingOutput:
        frame = Frame("run", {"program": entry_of(program)}, packed)

        def launch() -> PendingOutput:
            self._leader.send(frame)
            return super(LeaderRunner, self)._run(program, step, packed)

        return _Awaited(self._leader.call(launch), self._leader)

    def _send(self, frame: Frame) -> None:
        self._leader.call(lambda: self._leader.send(frame))


class _Awaited(PendingOutput):
    """Output that is awaited by the thread of the leader."""

    def __init__(self, pending: PendingOutput, leader: Leader):
        self._pending, self._leader = pending, leader

    def result(self) -> StepOutput:
        return self._leader.call(self._pending.result)

    def done_time(self) -> float | None:
        return self._pending.done_time()


def end_group(leader: Leader) -> None:
    """End the followers and JAX's connection to them; nothing if the group has ended."""
    if leader.end():
        jax.distributed.shutdown()


class FollowerRunner(ModelRunner):
    """Runner of another node, which repeats the launches of node 0."""

    def __init__(
        self,
        follower: Follower,
        model: Model,
        blueprint: Blueprint,
        *,
        drafter: CheckpointModule | None = None,
        early: EarlyTraces | None = None,
    ):
        """Create a `ModelRunner` that `run_launches` dispatches to."""
        self._follower = follower
        self._tracing = threading.Lock()
        super().__init__(model, blueprint, drafter=drafter, early=early)

    def run_launches(self) -> None:
        """Launch what node 0 launches until it ends the group, then free the device memory.

        A program is compiled when node 0 begins to compile it; a launch waits for its program.

        Raises:
            ValueError: a frame is malformed.
        """
        compiling = dict[AnyProgram, Future[jax.stages.Compiled]]()
        pool = ThreadPoolExecutor(num_cores(), "jaxspec-compile")
        with self._follower.loading():
            try:
                while (frame := self._follower.receive()).kind != "end":
                    if frame.kind == "reset":
                        self.reset()
                        continue
                    program = _program(frame)
                    if program not in compiling:
                        compiling[program] = pool.submit(self._compiled, program)
                    if frame.kind == "run":
                        if not self.is_warm(program):
                            self.install(program, compiling[program].result())
                        self._run(program, self._programs[program], self._checked(program, frame))
            finally:
                pool.shutdown(wait=False, cancel_futures=True)
        jax.distributed.shutdown()  # node 0 waits for it
        self.close()

    def _compiled(self, program: AnyProgram) -> jax.stages.Compiled:
        with self._tracing:
            lowered = self.lower(program)
        return lowered.compile()

    def _checked(self, program: AnyProgram, frame: Frame) -> np.ndarray:
        if frame.values.size != plan_layout(program, self.shapes).size:
            raise ValueError(f"Node 0 sent a malformed plan of {frame.values.size} values.")
        return frame.values


class Node:
    """A process that holds a part of the model; this class is the only one of its group."""

    def loading(self) -> AbstractContextManager[None]:
        """Return a context in which the model is loaded; an error in it ends all nodes."""
        return contextlib.nullcontext()

    def agreed(self, budget: MemoryBudget | None) -> MemoryBudget | None:
        """Return the smallest budget of all nodes."""
        return budget

    def runner(self, *args: Any, **parts: Any) -> ModelRunner:
        """Return the runner of this node, with the arguments of `ModelRunner`."""
        return ModelRunner(*args, **parts)


class LeaderNode(Node):
    """Node 0."""

    def __init__(self, leader: Leader):
        self._leader = leader

    def loading(self) -> AbstractContextManager[None]:
        return self._leader.loading()

    def agreed(self, budget: MemoryBudget | None) -> MemoryBudget | None:
        if budget is None:
            return None
        others = [fields["bytes"] for fields in self._leader.gather("memory")]
        least = min(budget.max_bytes, *others)
        self._leader.send(Frame("memory", {"bytes": least}))
        return budget.at_most(least)

    def runner(self, *args: Any, **parts: Any) -> ModelRunner:
        runner = LeaderRunner(self._leader, *args, **parts)
        own = _built(runner)
        for rank, theirs in enumerate(self._leader.gather("ready"), 1):
            if differing := differences(own, theirs, rank):
                raise ValueError(f"All nodes must have the same programs: {differing}.")
        return runner


class FollowerNode(Node):
    """Another node."""

    def __init__(self, follower: Follower):
        self._follower = follower

    def loading(self) -> AbstractContextManager[None]:
        return self._follower.loading()

    def agreed(self, budget: MemoryBudget | None) -> MemoryBudget | None:
        if budget is None:
            return None
        self._follower.send(Frame("memory", {"bytes": budget.max_bytes}))
        frame = self._follower.receive()
        if frame.kind != "memory":
            raise NodeError(f"Node 0 sent {frame.kind!r} instead of 'memory'.")
        return budget.at_most(frame.fields["bytes"])

    def runner(self, *args: Any, **parts: Any) -> ModelRunner:
        runner = FollowerRunner(self._follower, *args, **parts)
        self._follower.send(Frame("ready", _built(runner)))
        return runner


def _program(frame: Frame) -> AnyProgram:
    try:
        return program_of(frame.fields["program"])
    except (ValueError, KeyError, TypeError, IndexError, AttributeError) as error:
        raise ValueError(f"Node 0 sent a malformed frame: {frame!r:.200}") from error


def _built(runner: ModelRunner) -> dict[str, Any]:
    """Return what the programs of all nodes must have in common."""
    shared = {"shapes": repr(runner.shapes), "device": runner.group.devices[0].device_kind}
    sources = {f"source of {place_of(each)}": source_digest(each) for each in runner.processors}
    return shared | sources
