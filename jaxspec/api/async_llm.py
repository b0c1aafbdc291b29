"""`AsyncLLM`: asynchronous API for event loops, with an engine that runs in its own thread."""

import asyncio
import functools
import os
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Self, TypeVar

from jaxspec.api.async_calls import EngineCall, Prepare, WorkerSpec
from jaxspec.api.async_rollouts import AsyncRollouts
from jaxspec.api.engine_args import EngineArgs
from jaxspec.api.llm_engine import LLMEngine
from jaxspec.api.replicated_engine import ReplicatedEngine, replicated
from jaxspec.checks import integer, real, shown
from jaxspec.engine.admission import Admission
from jaxspec.engine.async_stream import AsyncStream, OutputQueue
from jaxspec.engine.engine import StepTimes
from jaxspec.engine.engine_thread import EngineThread, MakeSampleStream, Settle
from jaxspec.engine.errors import DrainingError, QueueTimeoutError
from jaxspec.engine.metrics import EngineSnapshot, Metric
from jaxspec.engine.sample_stream import Receiver
from jaxspec.process import check_process
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Request

_Receiver = TypeVar("_Receiver", bound=Receiver)
_LOOK = 0.1  # seconds between looks for a pause


class AsyncLLM(AsyncRollouts):
    """Model for concurrent tasks of an event loop.

    The engine runs in its own thread, and prompts are tokenized in a few others, so the event loop
    never waits for either. `async with AsyncLLM(...) as llm:` closes it at the end of the block.

    A failed step ends every stream with `EngineDeadError`, and later requests are refused. Restart
    it in a new process if the device may be at fault. `is_healthy` turns False. With
    `data_parallel_size` above 1, it ends only the streams of its replica, with `ReplicaDiedError`,
    and the replica is started again.

    Args:
        model: A folder, a GGUF file or a hub id; None means the embedded model.
        max_num_queued_reqs: Most requests that wait for a row; others are refused with
            `QueueFullError`. None means unlimited.
        max_num_queued_tokens: Most prompt tokens of waiting requests, likewise. A longer prompt is
            accepted if no other request waits.
        queue_timeout: Seconds that a request may wait for a row before it ends with
            `QueueTimeoutError`; None means unlimited.
        stream_interval: Fewest tokens per delta of a stream. The first and the last delta may have
            fewer, and requests with stop strings ignore it.
        **options: Options of `LLM`, with `weights` and `weight_version`.

    Raises:
        ValueError: a limit is invalid, or as in `LLM`.
        FileNotFoundError, TypeError, RuntimeError: as in `LLM`.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        max_num_queued_reqs: int | None = None,
        max_num_queued_tokens: int | None = None,
        queue_timeout: float | None = None,
        stream_interval: int = 1,
        **options: Any,
    ):
        """Load the model and start the engine thread; programs are compiled when first needed."""
        admission = Admission(max_num_queued_reqs, max_num_queued_tokens)
        if queue_timeout is not None and not real(queue_timeout) > 0:
            raise ValueError(
                f"queue_timeout must be seconds above 0, got {shown(queue_timeout)}; None is no "
                "limit."
            )
        interval = integer("stream_interval", stream_interval, 1)
        self._queue_timeout, self._admission = queue_timeout, admission
        if options.get("data_parallel_size", 1) == 1:
            engine = LLMEngine(model, **options)
            self._thread = EngineThread(engine.session, admission, interval)
        else:
            engine = ReplicatedEngine(replicated(model, options), admission, interval)
            self._thread = engine.group
        self._engine: LLMEngine = engine
        self._process = os.getpid()
        num_replicas = options.get("data_parallel_size", 1)
        super().__init__(
            engine.inputs, engine.model_name, engine.shapes, engine.limits, num_replicas
        )
        # The thread has no reference to the AsyncLLM, which is closed when it is collected.
        weakref.finalize(self, self._thread.stop).atexit = False

    @classmethod
    def from_engine_args(cls, engine_args: EngineArgs) -> Self:
        """Load the model of `engine_args` and start the engine thread.

        Args:
            engine_args: Options of the engine.

        Raises:
            FileNotFoundError, ValueError, RuntimeError: as in the constructor.
        """
        return cls(**engine_args.options())

    async def __aenter__(self) -> Self:
        """Return the AsyncLLM."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close the AsyncLLM."""
        await self.close()

    # Requests, besides the calls of `AsyncCalls`

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """Abort the requests with this id submitted so far; their streams end with "abort".

        Unknown ids and finished requests are ignored.

        Args:
            request_id: Id of the requests, or several ids.

        Raises:
            RuntimeError: this is a forked child of the engine's process.
        """
        check_process(self._process)
        several = isinstance(request_id, Iterable) and not isinstance(request_id, str)
        for name in request_id if several else [request_id]:
            self._thread.abort_by_id(str(name))

    async def take_over(
        self,
        requests: Sequence[Request],
        make: Callable[[Sequence[Sample], MakeSampleStream, Settle], Receiver],
    ) -> None:
        """Check and queue the requests of one prompt from another process. Call within `expecting`.

        Args:
            requests: The requests, one per sample.
            make: Returns the receiver of the samples; see `EngineThread.submit` for the other two
                arguments.

        Raises:
            ServiceError, ValueError, RuntimeError: as in `submit`.
        """
        await self._enter(lambda: [Sample(request, None, None) for request in requests], make)

    def worker_spec(self, number: int | None = None) -> WorkerSpec:
        """Return the specification for a process that creates requests for `take_over`.

        Args:
            number: Number of the process, which selects the noise of prompts without a seed; None
                means that of this process, if only the other one creates requests.
        """
        make_inputs, sizes = self._inputs.twin(number), (self.shapes, self.limits)
        return WorkerSpec(make_inputs, self.model_name, *sizes, self.num_replicas)

    def expecting(self) -> AbstractContextManager[None]:
        """Count a request that another process prepares as waiting, within the returned context.

        Returns:
            A context manager, whose entry raises QueueFullError, DrainingError or EngineDeadError
            as `submit` does.
        """
        return self._admission.preparing()

    def give_up(self, *receivers: Receiver) -> None:
        """Abort queued or running requests. Thread-safe.

        Args:
            *receivers: Receivers of the requests.
        """
        self._thread.abort(*receivers)

    async def _submit(self, prepare: Prepare, *, is_long: bool = False) -> AsyncStream:
        check_process(self._process)
        make = functools.partial(OutputQueue, asyncio.get_running_loop())
        with self._admission.preparing():
            output_queue = await self._enter(prepare, make, is_long=is_long)
        return AsyncStream(output_queue, self._thread.abort, keeps=self)

    async def _enter(
        self,
        prepare: Prepare,
        make: Callable[[Sequence[Sample], MakeSampleStream, Settle], _Receiver],
        *,
        is_long: bool = False,
    ) -> _Receiver:
        def prepare_and_admit() -> Sequence[Sample]:
            self._engine.session.require_usable()
            samples = prepare()
            self._engine.admit(samples)
            return samples

        loop = asyncio.get_running_loop()
        arrived = loop.time()
        try:
            samples = await self._pool.run(prepare_and_admit, is_long=is_long)
        except (TypeError, ValueError):
            raise
        except Exception:
            self._admission.check_open()  # a closed engine is the likely cause
            raise
        receiver = self._thread.submit(functools.partial(make, samples))
        if self._queue_timeout is not None:
            end = arrived + self._queue_timeout
            receiver.timer = loop.call_at(end, self._expire, receiver, self._queue_timeout)
        return receiver

    def _expire(self, receiver: Receiver, seconds: float) -> None:
        if not receiver.has_begun:
            receiver.fail(QueueTimeoutError(seconds))
            self._thread.abort(receiver)

    # Lifecycle

    async def warm_up(self, feature_sets: Any = None) -> None:
        """Run `LLM.warm_up` in a thread; the engine runs no steps while it compiles.

        Args:
            feature_sets: As in `LLM.warm_up`.

        Raises:
            ValueError, RuntimeError: as in `LLM.warm_up`.
        """
        check_process(self._process)
        await self._pool.run(functools.partial(self._engine.warm_up, feature_sets))

    async def get_ready(self) -> None:
        """Run `LLM.get_ready` in a thread; the engine runs no steps while it compiles.

        Raises:
            RuntimeError: as in `LLM.get_ready`.
        """
        check_process(self._process)
        await self._pool.run(self._engine.get_ready)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests and wait until the others have finished.

        Args:
            timeout: Seconds after which unfinished requests are aborted. None means unlimited,
                but in a pause, in which none would finish, they are aborted.

        Returns:
            True if no request was aborted by the drain and no step failed.

        Raises:
            RuntimeError: this is a forked child of the engine's process.
        """
        check_process(self._process)
        finished = self._admission.drain()
        idle = asyncio.wrap_future(finished)  # done a moment later
        if timeout is not None:
            await asyncio.wait({idle}, timeout=timeout)
        was_paused = False  # for a look: ends of before the pause are passed on meanwhile
        while timeout is None and not (finished.done() or (was_paused and self.is_paused)):
            was_paused = self.is_paused
            await asyncio.wait({idle}, timeout=_LOOK)
        if not (is_whole := finished.done()):
            self._thread.abort(*self._admission.close(DrainingError))
            await asyncio.wait({idle}, timeout=self._thread.aborting)
            idle.cancel()
        return is_whole and self._thread.error is None

    async def close(self) -> None:
        """Abort all requests, free the device memory, and refuse later requests.

        Raises:
            RuntimeError: this is a forked child of the engine's process.
        """
        check_process(self._process)
        self._thread.stop()
        await asyncio.wrap_future(self._thread.ended)
        self._pool.close()

    def shutdown(self, timeout: float | None = None) -> None:
        """Close it as `close` does, from any thread, and wait for the end of the running step.

        Args:
            timeout: Seconds to wait; None means until it is closed.

        Raises:
            TimeoutError: it is not closed in time, and closes later.
            RuntimeError: as in `close`.
        """
        check_process(self._process)
        self._thread.stop()
        self._thread.ended.result(timeout)
        self._pool.close()

    async def _control(self, call: EngineCall) -> Any:
        check_process(self._process)
        return await self._pool.run(getattr(self._engine, call))

    # Status and metrics

    @property
    def is_healthy(self) -> bool:
        """True if no step has failed and it is not closed."""
        return self._thread.is_running

    @property
    def is_ready(self) -> bool:
        """True if new requests are taken.

        False after a failure, while all replicas are being restarted, and during a pause with the
        mode "wait" or "abort".
        """
        return self._thread.is_ready and not self._engine.session.gate.is_refusing

    @property
    def error(self) -> BaseException | None:
        """Error of the failed step or of the replicas, or None."""
        return self._thread.error

    @property
    def num_running(self) -> int:
        """Number of samples that have a row."""
        return self._engine.num_running

    @property
    def num_waiting(self) -> int:
        """Number of requests that wait for their first row or are being tokenized."""
        return self._admission.num_waiting

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of pages held by requests, in [0, 1]."""
        return self._engine.kv_cache_usage

    def metrics(self) -> dict[str, Any]:
        """Return `LLM.metrics` with `num_running`, `num_waiting` and `kv_cache_usage`.

        Raises:
            RuntimeError: as in `LLM.metrics`.
        """
        return self._with_waiting(self._engine.snapshot()).engine

    async def snapshot(self) -> EngineSnapshot:
        """Return `metrics` and `get_metrics` at once, asked for in a thread.

        Raises:
            RuntimeError: as in `LLM.metrics`.
        """
        return self._with_waiting(await asyncio.to_thread(self._engine.snapshot))

    def _with_waiting(self, snapshot: EngineSnapshot) -> EngineSnapshot:
        return snapshot._replace(engine={**snapshot.engine, "num_waiting": self.num_waiting})

    def trace(self) -> AbstractContextManager[list[StepTimes]]:
        """Return the context manager of `LLM.trace`.

        Entering it waits for the current step, so enter it in another thread than the event loop's.

        Raises:
            RuntimeError: as in `LLM.trace`, when it is entered.
        """
        return self._engine.trace()

    def get_metrics(self) -> list[Metric]:
        """Return the metrics shared with vLLM, as `LLM.get_metrics` does.

        Raises:
            RuntimeError: as in `LLM.get_metrics`.
        """
        return self._engine.get_metrics()
