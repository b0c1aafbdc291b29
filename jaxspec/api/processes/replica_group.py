"""ReplicaGroup: the engine processes of `data_parallel_size`, routed to and restarted."""

import asyncio
import atexit
import concurrent.futures
import contextlib
import copy
import functools
import logging
import os
import threading
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from jaxspec.api.async_calls import WorkerSpec
from jaxspec.api.processes.devices import environments
from jaxspec.api.processes.engine_client import Submission
from jaxspec.api.processes.replica import Replica
from jaxspec.engine.admission import Admission
from jaxspec.engine.engine_thread import Delta, MakeSampleStream, Settle, receive_each
from jaxspec.engine.errors import (
    DrainingError,
    EngineDeadError,
    NoReplicaError,
    ReplicaDiedError,
    ReplicasDeadError,
)
from jaxspec.engine.metrics import EngineSnapshot
from jaxspec.engine.router import Route, Router
from jaxspec.engine.sample_stream import Calls, Receiver, SampleStream, TokenDelta
from jaxspec.options.draft_methods import ExtractHiddenStatesOptions
from jaxspec.options.engine_options import OPTIONS, EngineConfig
from jaxspec.requests.request import Finish

_Receiver = TypeVar("_Receiver", bound=Receiver)
_Result = TypeVar("_Result")
_Call = tuple[str, tuple[Any, ...]]  # name and arguments
_LOG = logging.getLogger(__name__)
WAITS = (1.0, 5.0, 15.0)
"""Seconds before a replica is started again after its first, second, ... end in a row.

One more end in a row ends the group.
"""
EARLY = 60.0
"""Seconds of service after which an end is the first in a row."""
_ANSWERING = 5.0  # seconds for a replica to return its metrics; else its last ones are used
_AT_EXIT = 15.0  # seconds to wait for the processes at interpreter exit
_FOLDERS = ("kv_offloading_folder", "profiler_folder")  # each replica has a subfolder


class _Placed(NamedTuple):
    submission: Submission
    replica: Replica
    route: Route


def options_of(config: EngineConfig, number: int) -> dict[str, Any]:
    """Return the options of the engine of replica `number`; the first shows progress bars."""
    options: dict[str, Any] = {name: getattr(config, name) for name in OPTIONS}
    options["data_parallel_size"] = 1
    for name in _FOLDERS:
        if options[name] is not None:
            folder = Path(options[name]).expanduser() / f"replica-{number}"
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            options[name] = folder
    return options | ({"show_progress": False} if number > 1 else {})


def _check(config: EngineConfig) -> None:
    options = getattr(config.speculative_config, "options", None)
    if isinstance(options, ExtractHiddenStatesOptions):
        raise ValueError(
            f"Hidden states are extracted by one engine, got data_parallel_size="
            f"{config.data_parallel_size}. Set it to 1, and start one process per GPU."
        )


class ReplicaGroup:
    """Engines in processes of their own, with the interface of one `EngineThread`.

    A thread has an event loop with one channel per replica. Deltas are sent to the event loop of
    each receiver, once per message of a replica.

    A replica that ends fails its requests with `ReplicaDiedError` and is started again. If one ends
    repeatedly soon after its start, all are ended and every request fails with `ReplicasDeadError`.
    """

    aborting = 10.0
    """As in `EngineThread`; a replica may hang."""

    def __init__(self, config: EngineConfig, admission: Admission, stream_interval: int = 1):
        """Start the processes and wait until all engines are loaded.

        Raises:
            ValueError: there are too few devices, or as in `LLM`.
            Exception: as in `LLM`.
        """
        _check(config)
        self._environments = environments(config.data_parallel_size, config.tensor_parallel_size)
        interval = {"stream_interval": stream_interval}
        numbers = range(1, config.data_parallel_size + 1)
        self._options = [options_of(config, number) | interval for number in numbers]
        self.admission = admission
        self.error: EngineDeadError | None = None  # why the group has ended
        self.ended = concurrent.futures.Future[None]()  # done when all processes have ended
        self.ended.set_running_or_notify_cancel()  # makes it impossible to cancel
        self._loop, self._stopping = asyncio.new_event_loop(), asyncio.Event()
        # Used in the thread of the loop only, except `_replicas`, which others may test:
        self._replicas: dict[int, Replica] = {}  # those that take requests
        self._started = set[Replica]()  # those whose process has not ended
        self._router = Router()
        self._placed: dict[Receiver, _Placed] = {}  # unfinished requests
        self._sending = set[asyncio.Task[None]]()
        self._prepared = list[_Call]()  # made in each replica before it takes requests
        self._last: dict[int, EngineSnapshot] = {}  # of each replica
        self._retired: EngineSnapshot | None = None  # counts of replicas that have ended
        self._process = os.getpid()
        started = concurrent.futures.Future[WorkerSpec]()
        self._thread = threading.Thread(
            target=self._run, args=(started,), name="jaxspec-replicas", daemon=True
        )
        atexit.register(self._at_exit)
        self._thread.start()
        try:
            self.spec = started.result()
        except BaseException:  # an interrupt, too
            self.stop()
            self.ended.result(_AT_EXIT)
            raise

    @property
    def is_running(self) -> bool:
        return self.error is None and not self.ended.done()

    @property
    def is_ready(self) -> bool:
        """True if a replica takes requests."""
        return self.is_running and bool(self._replicas)

    def submit(self, make: Callable[[MakeSampleStream, Settle], _Receiver]) -> _Receiver:
        """Queue the checked samples of a prompt, as `EngineThread.submit`.

        Raises:
            NoReplicaError: all replicas are being restarted.
            ServiceError: as in `Admission.admit`.
        """
        if self.is_running and not self._replicas:
            raise NoReplicaError
        receivers = list[_Receiver]()

        def make_receiver(make_sample_stream: MakeSampleStream, settle: Settle) -> _Receiver:
            receivers.append(make(make_sample_stream, settle))
            return receivers[0]

        submission = Submission(make_receiver, self._note_settled)
        let_in = functools.partial(self._post, self._let_in, submission)
        self.admission.admit(receivers[0], let_in)
        return receivers[0]

    def abort(self, *receivers: Receiver) -> None:
        self._post(self._abort, receivers)

    def abort_by_id(self, request_id: str) -> None:
        """Abort all requests with this id submitted so far."""
        self._post(self._abort_by_id, request_id)

    def stop(self) -> None:
        """Abort all requests and end the processes; `ended` is done afterwards."""
        self._post(self._stopping.set)

    def prepare(self, name: str, *args: Any) -> None:
        """Make a call in all replicas, and in each that is started from now on.

        Raises:
            Exception: the error of a replica; the call is not repeated.
        """
        self._wait(self._prepare(name, args))

    def call(self, name: str, *args: Any) -> list[Any]:
        """Return the result of a call in each replica that takes requests.

        Raises:
            Exception: the error of a replica.
        """
        return self._wait(self._call(name, args))

    def reset_prefix_cache(self) -> None:
        """Drop the cached prefixes of all replicas."""
        self.call("reset_prefix_cache")
        self._post(self._router.forget_prefixes)

    def snapshot(self) -> EngineSnapshot:
        """Return the total of the metrics, asking each replica once."""
        return self._wait(self._snapshot())

    def require_running(self) -> None:
        """Raise unless the group runs.

        Raises:
            RuntimeError: it was stopped.
            ReplicasDeadError: a replica ended repeatedly.
        """
        if self.error is not None:
            raise copy.copy(self.error)
        if self.ended.done():
            raise RuntimeError("An LLM can't be used once it is closed, and this one is. Make one.")

    def _wait(self, work: Coroutine[Any, Any, _Result]) -> _Result:
        """Return the result of `work`, run in the loop; raises as `require_running`, too."""
        try:
            answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        except RuntimeError:  # the loop is closed
            answer = concurrent.futures.Future[_Result]()
        either: list[concurrent.futures.Future[Any]] = [answer, self.ended]
        concurrent.futures.wait(either, return_when="FIRST_COMPLETED")
        if not answer.done() or answer.cancelled():
            concurrent.futures.wait([self.ended])
            work.close()
            self.require_running()
        return answer.result()

    def _post(self, act: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(act, *args)

    def _note_settled(self, submission: Submission, stream: SampleStream, end: int | None) -> None:
        self._post(self._settle, submission, stream, end)

    def _at_exit(self) -> None:
        if os.getpid() == self._process:
            self.stop()
            self._thread.join(_AT_EXIT)

    # Called in the thread of the loop: the processes

    def _run(self, started: concurrent.futures.Future[WorkerSpec]) -> None:
        try:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner:  # cancels what is left
                runner.run(self._serve(started))
        except BaseException as error:
            self.ended.set_exception(error)
        else:
            self.ended.set_result(None)
        atexit.unregister(self._at_exit)

    async def _serve(self, started: concurrent.futures.Future[WorkerSpec]) -> None:
        stopping = asyncio.create_task(self._stopping.wait())
        starting = asyncio.create_task(self._start())
        keeping = list[asyncio.Task[None]]()
        try:
            await asyncio.wait([stopping, starting], return_when=asyncio.FIRST_COMPLETED)
            if starting.done():
                spec, replicas = await starting
                keeping = [asyncio.create_task(self._keep(*each)) for each in replicas.items()]
                started.set_result(spec)
                await asyncio.wait([stopping, *keeping], return_when=asyncio.FIRST_COMPLETED)
                for keeper in keeping:
                    if keeper.done():
                        keeper.result()  # raises what should not happen
        except Exception as error:
            if started.done():
                raise
            started.set_exception(error)
        finally:
            tasks = [starting, *keeping, *self._sending]
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            try:
                self._close()
            finally:
                await asyncio.gather(*(replica.end() for replica in self._started))

    async def _start(self) -> tuple[WorkerSpec, dict[int, Replica]]:
        indices = range(len(self._options))
        try:
            async with asyncio.TaskGroup() as group:
                starts = [group.create_task(self._launch(index)) for index in indices]
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        found = [start.result() for start in starts]
        self._replicas = {index: replica for index, (_, replica) in enumerate(found)}
        return found[0][0], dict(self._replicas)

    async def _launch(self, index: int) -> tuple[WorkerSpec, Replica]:
        """Start a replica and load its engine."""
        replica = await Replica.start(self._environments[index])
        self._started.add(replica)
        try:
            spec = await replica.load(
                self._options[index],
                receive=self._receive,
                failed=functools.partial(self._failed, index, replica),
                begun=self._begun,
                over=self._over,
            )
            self._last[index] = await replica.channel.call("snapshot")
            # Last, so that no call that comes meanwhile is missed.
            made = list[_Call]()
            while call := next((each for each in self._prepared if each not in made), None):
                await replica.channel.call(call[0], *call[1])
                made.append(call)
        except BaseException:
            await replica.kill()
            self._started.discard(replica)
            raise
        return spec, replica

    async def _keep(self, index: int, replica: Replica | None) -> None:
        """Route requests to a replica, and start it again when it ends; return if it can't be."""
        deaths, reason, began = 0, "", self._loop.time()
        while True:
            if replica is not None:
                self._replicas[index] = replica
                self._router.add(index)
                await replica.gone()
                reason = await self._bury(index, replica)
                deaths = deaths + 1 if self._loop.time() - began < EARLY else 1
            count = len(self._options)
            if deaths > len(WAITS):
                self.error = ReplicasDeadError(index + 1, count, deaths, reason)
                _LOG.error("%s", self.error)
                return
            _LOG.error("Replica %d of %d %s, and is started again.", index + 1, count, reason)
            await asyncio.sleep(WAITS[deaths - 1])  # its memory may not yet be free
            try:
                _, replica = await self._launch(index)
            except Exception as error:
                replica, reason, deaths = None, f"could not start ({error})", deaths + 1
            began = self._loop.time()

    async def _bury(self, index: int, replica: Replica) -> str:
        """Fail the requests of a replica that is gone, and return how it ended."""
        self._withdraw(index)
        await replica.end()
        self._started.discard(replica)
        if (last := self._last.pop(index, None)) is not None:
            parts = [last.counts, *([self._retired] if self._retired else ())]
            self._retired = EngineSnapshot.total(parts)
        for submission in replica.client.forget_all():
            self._fail(submission, self._death(index, replica))
        return replica.reason

    def _close(self) -> None:
        """Refuse new requests, and end the others with the error of the group or "abort"."""
        for index in list(self._replicas):
            self._withdraw(index)
        error = self.error

        def refusal() -> Exception:
            return DrainingError() if error is None else copy.copy(error)

        for receiver in self.admission.close(refusal):
            placed = self._placed.get(receiver)
            if placed is None:  # not routed yet
                self._send(receiver.loop, receiver.fail, refusal())
                self.admission.over(receiver)
            elif error is not None:
                self._fail(placed.submission, error)
            else:
                self._end_here(placed)

    def _withdraw(self, index: int) -> None:
        """Route no more requests to a replica."""
        self._replicas.pop(index, None)
        self._router.remove(index)

    # Called in the thread of the loop: requests

    def _let_in(self, submission: Submission) -> None:
        receiver = submission.receiver
        streams = receiver.sample_streams
        request = streams[0].request
        most = request.max_len - len(request.prompt)
        route = self._router.route(request.prompt, request.cache_salt, most, len(streams))
        if route is None:
            self._send(receiver.loop, receiver.fail, NoReplicaError())
            self.admission.over(receiver)
            return
        placed = _Placed(submission, self._replicas[route.replica], route)
        self._placed[receiver] = placed
        task = self._loop.create_task(self._hand_over(placed))
        self._sending.add(task)
        task.add_done_callback(self._sending.discard)

    async def _hand_over(self, placed: _Placed) -> None:
        replica, index = placed.replica, placed.route.replica
        try:
            await replica.take_over(placed.submission)
        except ConnectionError:
            self._fail(placed.submission, self._death(index, replica))
        except Exception as error:  # refused, such as after a failed step
            self._failed(index, replica, placed.submission, error)

    def _death(self, index: int, replica: Replica) -> ReplicaDiedError:
        return ReplicaDiedError(index + 1, len(self._options), replica.reason)

    def _failed(
        self, index: int, replica: Replica, submission: Submission, error: Exception
    ) -> None:
        if isinstance(error, EngineDeadError):  # a step failed; the process exits
            replica.fail()
            if self._replicas.get(index) is replica:
                self._withdraw(index)
            error = self._death(index, replica)
        self._fail(submission, error)

    def _fail(self, submission: Submission, error: Exception) -> None:
        receiver = submission.receiver
        if receiver in self._placed:
            self._send(receiver.loop, receiver.fail, copy.copy(error))
            self._over(submission)

    def _begun(self, submission: Submission) -> None:
        self.admission.begun(submission.receiver)
        submission.receiver.begin()

    def _over(self, submission: Submission) -> None:
        if (placed := self._placed.pop(submission.receiver, None)) is not None:
            self._router.over(placed.route)
            self.admission.over(submission.receiver)

    def _settle(self, submission: Submission, stream: SampleStream, end: int | None) -> None:
        if (placed := self._placed.get(submission.receiver)) is not None:
            placed.replica.client.settle(submission, stream, end)

    def _abort(self, receivers: Sequence[Receiver]) -> None:
        for placed in [self._placed[each] for each in receivers if each in self._placed]:
            if placed.submission.is_aborted:
                continue  # such as when "abort" can't be sent, for its event loop is closed
            if placed.submission.number < 0:  # not sent yet
                self._end_here(placed)
            else:
                placed.replica.client.abort(placed.submission)

    def _abort_by_id(self, request_id: str) -> None:
        self._abort([each for each in self._placed if each.request_id == request_id])

    def _end_here(self, placed: _Placed) -> None:
        """End a request with "abort" without its replica."""
        submission, receiver = placed.submission, placed.submission.receiver
        end = TokenDelta([], [], Finish.ABORT, 0)
        running = [each for each in receiver.sample_streams if each.index in submission.running]
        submission.end()
        self._receive([(receiver, each, end) for each in running])
        self._over(submission)

    def _receive(self, deltas: Sequence[Delta]) -> None:
        batches = dict[Calls, list[Delta]]()
        for delta in deltas:
            batches.setdefault(delta[0].loop, []).append(delta)
        for loop, batch in batches.items():
            if not self._send(loop, receive_each, batch):
                self._abort(list({receiver for receiver, *_ in batch}))

    @staticmethod
    def _send(loop: Calls, act: Callable[..., object], *args: Any) -> bool:
        """Call `act` in another loop; return False if that is closed."""
        try:
            loop.call_soon_threadsafe(act, *args)
        except RuntimeError:
            return False
        return True

    # Called in the thread of the loop: calls of all replicas

    async def _prepare(self, name: str, args: tuple[Any, ...]) -> None:
        is_new = (name, args) not in self._prepared
        if is_new:
            self._prepared.append((name, args))
        try:
            await self._call(name, args)
        except Exception:
            if is_new:
                self._prepared.remove((name, args))
            raise

    async def _call(self, name: str, args: Sequence[Any]) -> list[Any]:
        calls = [replica.channel.call(name, *args) for replica in self._replicas.values()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = [each for each in answers if not isinstance(each, ConnectionError)]
        for answer in found:
            if isinstance(answer, BaseException):
                raise answer
        return found

    async def _snapshot(self) -> EngineSnapshot:
        async def ask(index: int, replica: Replica) -> None:
            with contextlib.suppress(TimeoutError, ConnectionError):
                async with asyncio.timeout(_ANSWERING):
                    snapshot = await replica.channel.call("snapshot")
                    if self._replicas.get(index) is replica:
                        self._last[index] = snapshot

        await asyncio.gather(*(ask(*each) for each in self._replicas.items()))
        parts = [*self._last.values(), *([self._retired] if self._retired else ())]
        return EngineSnapshot.total(parts)
