"""FairPool: threads that prepare requests, shared fairly between clients.

Requests are parsed, rendered and tokenized in a few threads, in which one that takes seconds may
not hold those of others.
"""

import asyncio
import collections
import concurrent.futures
import threading
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

LONG_BYTES = 2**18
"""Requests with more bytes count as long; their preparation may take seconds."""
_Result = TypeVar("_Result")


class Caller(NamedTuple):
    """Origin of the calls of a task.

    Attributes:
        client: Name of the client, such as its address; all calls without one share a client.
        num_bytes: Size of its request.
    """

    client: str = ""
    num_bytes: int = 0


_NONE = Caller()
CALLER = ContextVar("jaxspec_caller", default=_NONE)
"""The caller of the current task, set by servers."""


class _Job(NamedTuple):
    call: Callable[[], Any]
    result: concurrent.futures.Future[Any]


class FairPool:
    """Runs calls in threads, in turns of the clients and for each client in order.

    At most `num_threads - 1` calls of a client run. Long calls of all clients have at most half of
    the threads, those of one client one fewer: with 4 threads, 2 long calls and 1 of a client.
    """

    def __init__(self, num_threads: int, name: str):
        """Start threads as needed.

        Args:
            num_threads: Most threads, at least 4.
            name: Prefix of their names.
        """
        self._threads = concurrent.futures.ThreadPoolExecutor(num_threads, name)
        self._num_threads, self._most_long = num_threads, num_threads // 2
        self._lock = threading.Lock()
        # By client and whether they are long; the next turn comes first.
        self._waiting = dict[tuple[str, bool], collections.deque[_Job]]()
        self._running = collections.Counter[tuple[str, bool]]()
        self._is_closed = False

    async def run(self, call: Callable[[], _Result], *, is_long: bool = False) -> _Result:
        """Run `call` in a thread, for the client in `CALLER`, and return its result.

        Args:
            call: The call. It is dropped if the task is cancelled before it starts.
            is_long: It may take seconds whatever the size of its request.

        Raises:
            RuntimeError: the pool is closed.
            Exception: raised by `call`.
        """
        caller = CALLER.get()
        key = caller.client, is_long or caller.num_bytes > LONG_BYTES
        job = _Job(call, concurrent.futures.Future())
        with self._lock:
            if self._is_closed:
                raise RuntimeError("The pool is closed.")
            self._waiting.setdefault(key, collections.deque()).append(job)
            self._start()
        try:
            return await asyncio.wrap_future(job.result)
        except asyncio.CancelledError:
            self._drop(key, job)
            raise

    def close(self) -> None:
        """Refuse the calls that wait, and later ones; running calls end in their own time."""
        with self._lock:
            self._is_closed = True
            dropped, self._waiting = self._waiting, {}
        for job in (job for jobs in dropped.values() for job in jobs):
            if job.result.set_running_or_notify_cancel():
                job.result.set_exception(RuntimeError("The pool is closed."))
        self._threads.shutdown(wait=False)

    def _drop(self, key: tuple[str, bool], job: _Job) -> None:
        """Free what a cancelled call holds, such as the body of its request, before its turn."""
        with self._lock:
            jobs = self._waiting.get(key)
            if jobs and job in jobs:
                jobs.remove(job)
                if not jobs:
                    del self._waiting[key]

    def _start(self) -> None:
        """Start waiting calls as far as they may run; called with the lock."""
        while key := next(filter(self._may_run, self._waiting), None):
            jobs = self._waiting.pop(key)
            job = jobs.popleft()
            if jobs:
                self._waiting[key] = jobs  # at the end: the others have their turns first
            self._running[key] += 1
            self._threads.submit(self._run, key, job)

    def _may_run(self, key: tuple[str, bool]) -> bool:
        client, is_long = key
        own = self._running[client, False] + self._running[client, True]
        if self._running.total() >= self._num_threads or own >= self._num_threads - 1:
            return False
        num_long = sum(count for (_, long), count in self._running.items() if long)
        is_free = num_long < self._most_long and self._running[key] < self._most_long - 1
        return is_free or not is_long

    def _run(self, key: tuple[str, bool], job: _Job) -> None:
        try:
            if job.result.set_running_or_notify_cancel():
                try:
                    found = job.call()
                except BaseException as error:
                    job.result.set_exception(error)
                else:
                    job.result.set_result(found)
        finally:
            del job  # and with it an error's frames
            with self._lock:
                self._running -= collections.Counter([key])
                self._start()
