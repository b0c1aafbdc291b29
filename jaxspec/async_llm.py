"""AsyncLLM: text in, text out, for tasks of an event loop; the engine has a thread of its own."""

import asyncio
import functools
import os
import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Self, TypeVar

from jaxspec.admission import Admission
from jaxspec.arrivals import Receiver
from jaxspec.async_calls import AsyncCalls, Prepared
from jaxspec.async_errors import DrainingError, QueueTimeoutError
from jaxspec.async_stream import AsyncStream, Inbox
from jaxspec.checks import integer, real, shown
from jaxspec.config import StepShapes
from jaxspec.engine import StepTimes
from jaxspec.engine_thread import EngineThread, MakeTap, Settle
from jaxspec.inputs import InputProcessor
from jaxspec.llm_engine import LLMEngine
from jaxspec.metrics import Metric, kv_cache_usage
from jaxspec.outputs import Sample
from jaxspec.process import check_process
from jaxspec.request import Request
from jaxspec.sampling_params import SamplingParams
from jaxspec.tokenizer import Tokenizer

_Receiver = TypeVar("_Receiver", bound=Receiver)


class Elsewhere(NamedTuple):
    """What another process needs in order to make requests for this engine; it can be pickled."""

    make_inputs: Callable[[], InputProcessor]
    model_name: str
    shapes: StepShapes
    default_params: SamplingParams


class AsyncLLM(AsyncCalls):
    """A model for many callers in one process, each a task of an event loop.

    The engine runs in a thread of its own, and prompts are made ready in a few others, so the event
    loop never waits for either. `async with AsyncLLM(...) as llm:` closes it in the end.

    A step that fails ends every stream with `EngineDeadError`, and nothing is served after that.
    Whether the device can be trusted is for whoever runs the process to decide. `is_healthy` tells.

    `max_num_queued_reqs`, `max_num_queued_tokens`: how many requests, and tokens of their prompts,
    may wait for a row; None: any number. More are refused with `QueueFullError`.
    `queue_timeout`: seconds that a request may wait for a row; None: any time.
    `stream_interval`: tokens between two pieces of a stream, at least; the first token and the end
    come at once, and a request with stop strings passes it over.
    `options`: those of `LLM`.

    Raises:
        ValueError: a limit breaks its rule; and as `LLM`.
        FileNotFoundError, TypeError, RuntimeError: as `LLM`.
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
        """Load the model, and start its thread; programs are compiled when first needed."""
        admission = Admission(max_num_queued_reqs, max_num_queued_tokens)
        if queue_timeout is not None and not real(queue_timeout) > 0:
            raise ValueError(
                f"queue_timeout must be seconds above 0, got {shown(queue_timeout)}; None is no "
                "limit."
            )
        interval = integer("stream_interval", stream_interval, 1)
        self._queue_timeout, self._admission = queue_timeout, admission
        self._engine = LLMEngine(model, **options)
        self._process = os.getpid()
        self._thread = EngineThread(self._engine.session, admission, interval)
        self._begin_calls(self._engine)
        # The thread does not refer to the AsyncLLM: one that is lost is closed.
        weakref.finalize(self, self._thread.stop).atexit = False

    async def __aenter__(self) -> Self:
        """The AsyncLLM itself."""
        return self

    async def __aexit__(self, *error: object) -> None:
        """Close it."""
        await self.close()

    # Requests; `AsyncCalls` queues them.

    async def abort(self, request_id: str) -> None:
        """End the requests of this id that were submitted before; their streams end with "abort".

        A request that has ended, or never was, is passed over.
        """
        check_process(self._process)
        self._thread.abort_by_id(str(request_id))

    async def take_over(
        self,
        requests: Sequence[Request],
        make: Callable[[Sequence[Sample], MakeTap, Settle], Receiver],
    ) -> None:
        """Queue the requests of one prompt that another process made, within `expecting`.

        `make` makes their receiver. They are checked and what they need is compiled. Raises as
        `submit`.
        """

        def prepare() -> Prepared:
            samples = [Sample(request, None, None) for request in requests]
            self._engine.admit(samples)
            return None, samples

        await self._enter(prepare, make)

    def elsewhere(self, number: int) -> Elsewhere:
        """What process `number` needs in order to make requests for `take_over`."""
        make_inputs = self._engine.twin_inputs(number)
        params = self.get_default_sampling_params()
        return Elsewhere(make_inputs, self.model_name, self.shapes, params)

    def expecting(self) -> AbstractContextManager[None]:
        """Within the block another process makes a request ready, which counts as one that waits.

        Raises:
            QueueFullError, DrainingError, EngineDeadError: as in `submit`.
        """
        return self._admission.preparing()

    def give_up(self, *receivers: Receiver) -> None:
        """End requests that were queued here; any thread may call."""
        self._thread.abort(*receivers)

    async def _submit(self, prepare: Callable[[], Prepared]) -> AsyncStream:
        check_process(self._process)
        make = functools.partial(Inbox, asyncio.get_running_loop())
        with self._admission.preparing():
            prompt, inbox = await self._enter(prepare, make)
        return AsyncStream(inbox, prompt, self._thread.abort, keeps=self)

    async def _enter(
        self,
        prepare: Callable[[], Prepared],
        make: Callable[[Sequence[Sample], MakeTap, Settle], _Receiver],
    ) -> tuple[str | None, _Receiver]:
        loop = asyncio.get_running_loop()
        arrived = loop.time()
        try:
            prompt, samples = await loop.run_in_executor(self._pool, prepare)
        except (TypeError, ValueError):
            raise
        except Exception:
            self._admission.check_open()  # or this is why it failed
            raise
        receiver = self._thread.submit(functools.partial(make, samples))
        if self._queue_timeout is not None:
            end = arrived + self._queue_timeout
            receiver.timer = loop.call_at(end, self._expire, receiver, self._queue_timeout)
        return prompt, receiver

    def _expire(self, receiver: Receiver, seconds: float) -> None:
        if not receiver.has_begun:
            receiver.fail(QueueTimeoutError(seconds))
            self._thread.abort(receiver)

    # Its life.

    async def warm_up(self, samplers: Any = None) -> None:
        """`LLM.warm_up`, while the event loop goes on; the engine serves nobody meanwhile."""
        check_process(self._process)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._engine.warm_up, samplers)

    async def get_ready(self) -> None:
        """Run `LLM.get_ready` in a thread; no request is served until it returns."""
        check_process(self._process)
        loop = asyncio.get_running_loop()
        await loop.run_in_executor(self._pool, self._engine.get_ready)

    async def drain(self, timeout: float | None = None) -> bool:
        """Refuse new requests, and wait for the others to end; after `timeout` seconds abort them.

        Whether all came to their own ends.
        """
        check_process(self._process)
        idle = asyncio.wrap_future(self._admission.drain())
        done, _ = await asyncio.wait({idle}, timeout=timeout)
        if not done:
            self._thread.abort(*self._admission.close(DrainingError))
            await idle
        return bool(done) and self._thread.error is None

    async def close(self) -> None:
        """End what runs with "abort" and give the device's memory back; later calls are refused."""
        check_process(self._process)
        self._thread.stop()
        await asyncio.wrap_future(self._thread.ended)
        self._pool.shutdown(wait=False)

    # What it is, and what it does.

    @property
    def is_healthy(self) -> bool:
        """Whether it serves requests: no step has failed, and it is not closed."""
        return self._thread.is_running

    @property
    def error(self) -> BaseException | None:
        """What a step failed with, if one did."""
        return self._thread.error

    @property
    def num_running(self) -> int:
        """Samples that have a row."""
        return len(self._engine.session.scheduler.running)

    @property
    def num_waiting(self) -> int:
        """Requests that had no row yet, those that are being tokenized included."""
        return self._admission.num_waiting

    @property
    def kv_cache_usage(self) -> float:
        """The share of pages that requests hold, in [0, 1]."""
        return kv_cache_usage(self._engine.session.scheduler)

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's, if it has one."""
        return self._engine.tokenizer

    @property
    def model_name(self) -> str:
        """The model as it was given: a hub id, or a folder; the embedded model's folder's name."""
        return self._engine.model_name

    @property
    def max_model_len(self) -> int:
        """Tokens that a prompt and its output may have together."""
        return self._engine.shapes.max_model_len

    @property
    def shapes(self) -> StepShapes:
        """The sizes that programs were made for, and how many pages there are."""
        return self._engine.shapes

    def get_default_sampling_params(self) -> SamplingParams:
        """A copy of what a call without parameters uses, by the option `generation_config`."""
        return self._engine.get_default_sampling_params()

    def metrics(self) -> dict[str, Any]:
        """As `LLM.metrics`, and `num_running`, `num_waiting` and `kv_cache_usage`."""
        return {
            **self._engine.metrics(),
            "num_running": self.num_running,
            "num_waiting": self.num_waiting,
            "kv_cache_usage": self.kv_cache_usage,
        }

    def trace(self) -> AbstractContextManager[list[StepTimes]]:
        """As `LLM.trace`. To enter it waits for a step, so let another thread do that."""
        return self._engine.trace()

    def get_metrics(self) -> list[Metric]:
        """As `LLM.get_metrics`: the figures that vLLM has too, under its names."""
        return self._engine.get_metrics()
