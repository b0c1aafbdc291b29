"""`AsyncRollouts`: updates of weights, pauses and sleep of an `AsyncLLM`."""

import asyncio
import contextlib
import functools
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax

from jaxspec.api.async_calls import AsyncCalls
from jaxspec.api.llm_engine import LLMEngine
from jaxspec.api.weight_updates import SpecKind
from jaxspec.engine.admission import Admission
from jaxspec.engine.engine_thread import EngineThread
from jaxspec.process import check_process

_Given = ParamSpec("_Given")
_Result = TypeVar("_Result")
_Call = Callable[Concatenate[LLMEngine, _Given], _Result]
_Awaited = Callable[Concatenate["AsyncRollouts", _Given], Coroutine[Any, Any, _Result]]


def _in_pool(call: _Call[_Given, _Result]) -> _Awaited[_Given, _Result]:
    """Return a method that awaits `call` in a worker thread; steps go on meanwhile."""

    @functools.wraps(call)
    async def method(self: "AsyncRollouts", *args: _Given.args, **options: _Given.kwargs) -> Any:
        check_process(self._process)
        act = functools.partial(getattr(self._engine, call.__name__), *args, **options)
        return await self._pool.run(lambda: self._noted(act), is_long=True)

    return method


def _between_steps(call: _Call[_Given, _Result]) -> _Awaited[_Given, _Result]:
    """Return a method that awaits `call` in the engine thread.

    With the mode "wait", unfinished requests are awaited before.
    """

    @functools.wraps(call)
    async def method(self: "AsyncRollouts", *args: _Given.args, **options: _Given.kwargs) -> Any:
        check_process(self._process)
        act = functools.partial(getattr(self._engine, call.__name__), *args, **options)
        if not isinstance(self._thread, EngineThread):
            return act()  # replicas refuse it
        is_waiting = "wait" in (*args, options.get("mode")) and self._engine.session.gate.is_open
        with self._refusing() if is_waiting else contextlib.nullcontext():
            if is_waiting:
                await asyncio.wrap_future(self._admission.idle())
            return await asyncio.wrap_future(self._thread.call(act))

    return method


class AsyncRollouts(AsyncCalls):
    """Calls of trainers, which await those of the engine of the same names."""

    _engine: LLMEngine
    _thread: Any  # an `EngineThread`, or replicas
    _admission: Admission
    _process: int
    _num_refusing = 0  # calls that wait for unfinished requests

    update_weights = _in_pool(LLMEngine.update_weights)
    export_weights = _in_pool(LLMEngine.export_weights)
    pause = _between_steps(LLMEngine.pause)
    resume = _between_steps(LLMEngine.resume)
    sleep = _between_steps(LLMEngine.sleep)
    wake_up = _between_steps(LLMEngine.wake_up)

    @property
    def is_paused(self) -> bool:
        """True if no steps run: after `pause`, and while it sleeps."""
        return self._engine.is_paused

    @property
    def is_sleeping(self) -> bool:
        """True after `sleep`, until all parts are there again."""
        return self._engine.is_sleeping

    def weight_specs(self, kind: SpecKind = "published") -> dict[str, jax.ShapeDtypeStruct]:
        """Return the result of `LLM.weight_specs`.

        Args:
            kind: As in `LLM.weight_specs`.

        Raises:
            ValueError: as in `LLM.weight_specs`.
        """
        return self._engine.weight_specs(kind)

    @property
    def weight_version(self) -> str:
        """Version of the current weights."""
        return self._engine.weight_version

    @contextlib.contextmanager
    def _refusing(self) -> Iterator[None]:
        """Refuse new requests, until no call within the block is left."""
        gate = self._engine.session.gate
        self._num_refusing += 1
        gate.refuse("drain")
        try:
            yield
        finally:
            self._num_refusing -= 1
            if not self._num_refusing:
                gate.admit("drain")

    def _noted(self, act: Callable[[], _Result]) -> _Result:
        """Return `act()`, called in the pool: a cancelled call does not end it."""
        try:
            return act()
        finally:
            if isinstance(self._thread, EngineThread):
                self._thread.note_ended()
