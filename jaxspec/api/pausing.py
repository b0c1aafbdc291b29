"""`Pausing`: pauses of a loaded engine, and sleep, which frees its device memory meanwhile."""

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, Literal, get_args

from jaxspec.api.weight_updates import WeightUpdates
from jaxspec.checks import shown
from jaxspec.engine.gate import Part, Reason

PauseMode = Literal["keep", "wait", "abort"]
"""What happens to unfinished requests: they wait, or finish before, or end with "abort"."""
PARTS: tuple[Part, ...] = get_args(Part)


class Pausing(WeightUpdates):
    """Pauses and sleep of a loaded engine, which sets the attributes."""

    def pause(self, mode: PauseMode = "keep", *, clear_cache: bool = False) -> None:
        """Run no steps until `resume`; the devices are idle when it returns.

        Calls of other threads wait meanwhile. Tokens are the same as without a pause.

        Args:
            mode: "keep" pauses after the steps in flight; requests continue later, and new ones
                are queued. "wait" first finishes all unfinished requests, or keeps them if the
                engine is paused already; "abort" ends them. Both refuse new ones until `resume`.
            clear_cache: Drop the cached prefixes, too.

        Raises:
            ValueError: an argument is invalid, or the engines are replicas.
            RuntimeError: the engine is closed, or this is a forked child of its process, or a call
                from within a step.
        """
        if not isinstance(clear_cache, bool):
            raise ValueError(f"clear_cache must be a bool, got {shown(clear_cache)}.")
        with self._stopping(mode, "pause"):
            self.session.in_turn(lambda: self._pause_in_turn(mode, clear_cache=clear_cache))

    def resume(self) -> None:
        """End a pause; does nothing without one. A sleeping engine still needs `wake_up`.

        Raises:
            RuntimeError: as in `pause`.
        """
        self.session.require_open()
        self.session.in_turn(lambda: self.session.gate.open("pause"))

    @property
    def is_paused(self) -> bool:
        """True if no steps run: after `pause`, and while it sleeps."""
        return not self.session.gate.is_open

    def sleep(
        self,
        level: Literal[1, 2] = 1,
        mode: PauseMode = "keep",
        *,
        tags: Sequence[Part] | None = None,
    ) -> None:
        """Pause, and free the device memory until `wake_up`.

        Keys, values, states and cached prefixes of all tiers are dropped. Running requests are
        computed again afterwards, with the same tokens. Compiled programs stay. The memory returns
        to JAX, which other processes see only with XLA_PYTHON_CLIENT_ALLOCATOR=platform.

        Args:
            level: 1 moves the weights to pinned host memory; 2 drops them, and `update_weights`
                with all tensors must bring them back.
            mode: As in `pause`.
            tags: "weights" or "kv_cache" frees one of both. None means both.

        Raises:
            ValueError: an argument is invalid, or the engine has several nodes or replicas.
            RuntimeError: an update of weights is running, or as in `pause`.
        """
        if isinstance(level, bool) or level not in (1, 2):
            raise ValueError(
                f"level must be 1 (weights move to the host) or 2 (weights are dropped), got "
                f"{shown(level)}. Call pause to keep all memory."
            )
        parts = _parts(tags)

        def sleep() -> None:
            with self._stopping(mode, *parts):
                self.session.in_turn(lambda: self._sleep_in_turn(level, mode, parts))

        self._check_one_process("sleep")
        self._alone("sleep", sleep)

    def wake_up(self, tags: Sequence[Part] | None = None) -> None:
        """Restore what `sleep` freed; does nothing if the engine does not sleep.

        Steps run again once both parts are there, unless `pause` was called, too. After
        `sleep(2)` the weights are there once `update_weights` has brought all tensors, before or
        after this call.

        Args:
            tags: "weights" or "kv_cache" restores one of both. None means both.

        Raises:
            ValueError, RuntimeError: as in `sleep`.
        """
        wake = functools.partial(self._wake_in_turn, _parts(tags))
        self._check_one_process("wake_up")
        self._alone("wake_up", lambda: self.session.in_turn(wake))

    @property
    def is_sleeping(self) -> bool:
        """True after `sleep`, until both parts are there again."""
        return self.session.gate.is_closed_by(*PARTS)

    def _check_one_process(self, call: str) -> None:
        self.session.require_open()
        if (count := self._runner.group.nodes) > 1:
            raise ValueError(
                f"{call} frees or restores the memory of one process, and this engine has {count} "
                "nodes. Use nnodes=1."
            )

    @contextlib.contextmanager
    def _stopping(self, mode: Any, *reasons: Reason) -> Iterator[None]:
        """Refuse new requests and finish others, as `mode` says; an error takes requests again."""
        self.session.require_open()
        if mode not in get_args(PauseMode):
            raise ValueError(
                f"mode must be one of {', '.join(map(repr, get_args(PauseMode)))}, got "
                f"{shown(mode)}."
            )
        gate = self.session.gate
        new: set[Reason] = {reason for reason in reasons if not gate.is_closed_by(reason)}
        try:
            gate.refuse(*(() if mode == "keep" else reasons))
            while mode == "wait" and self.session.can_step:
                self.session.step()
            yield
        except BaseException:
            if not self._runner.has_weights:
                new.discard("weights")
            gate.open(*new)
            raise

    # In a turn

    def _pause_in_turn(self, mode: PauseMode, *, clear_cache: bool) -> None:
        self._stop_in_turn(mode, "pause")
        if clear_cache:
            self.session.guarded(self.session.scheduler.prefixes.clear)

    def _stop_in_turn(self, mode: PauseMode, *reasons: Reason) -> None:
        session = self.session
        session.require_open()  # another thread may have closed the session
        if mode == "abort":
            session.guarded(session.end_all)
        session.pause(*reasons)

    def _sleep_in_turn(self, level: int, mode: PauseMode, parts: Sequence[Part]) -> None:
        session, runner = self.session, self._runner
        self._stop_in_turn(mode, *parts)
        if "kv_cache" in parts:
            session.guarded(session.scheduler.forget_device)
            runner.reset()
        if "weights" in parts:
            if level == 1:
                runner.put_away()
            else:
                runner.drop_weights()

    def _wake_in_turn(self, parts: Sequence[Part]) -> None:
        session, runner = self.session, self._runner
        session.require_open()
        gate = session.gate
        if "weights" in parts:
            if runner.has_put_away:
                runner.bring_back()
            if runner.has_weights:  # also if an interrupt came right after they were brought back
                gate.open("weights")
        if "kv_cache" in parts and gate.is_closed_by("kv_cache"):
            runner.allocate()
            gate.open("kv_cache")


def _parts(tags: Any) -> tuple[Part, ...]:
    if tags is None:
        return PARTS
    is_list = isinstance(tags, list | tuple) and len(tags) > 0
    if not is_list or not all(tag in PARTS for tag in tags):
        raise ValueError(
            f"tags must be None or a list of {' and '.join(map(repr, PARTS))}, got {shown(tags)}."
        )
    return tuple(part for part in PARTS if part in tags)
