"""The load generator: sends requests to an engine as they are due and times their tokens.

The engine is behind a `Client`: an `LLM` that this thread steps, an `AsyncLLM`, or a server over
HTTP (`http_client.py`). A load is closed (a number of requests at a time) or open (arrivals). All
times are in seconds of `time.monotonic`.
"""

import asyncio
import contextlib
import dataclasses
import itertools
import time
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from benchmarks.engine import workload
from jaxspec import LLM, AsyncLLM, RequestMetrics, SamplingParams
from jaxspec.requests.outputs import Sample
from jaxspec.requests.request import Finish

GREEDY: dict[str, Any] = {"temperature": 0.0}


class Request(NamedTuple):
    """A prompt and its exact number of new tokens."""

    prompt: list[int]
    tokens: int
    sampling: dict[str, Any] = GREEDY

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(max_tokens=self.tokens, **{"ignore_eos": True, **self.sampling})


def requests_of(
    lengths: list[tuple[int, int]], vocab: int, sampling: dict[str, Any] = GREEDY
) -> list[Request]:
    """Return requests with random ids, the same in each call.

    Args:
        lengths: Prompt tokens and new tokens of each request.
        vocab: Number of ids.
        sampling: Fields of `SamplingParams`.
    """
    prompts = workload.prompts(lengths, vocab)
    pairs = zip(prompts, lengths, strict=True)
    return [Request(prompt, tokens, sampling) for prompt, (_, tokens) in pairs]


def one_token_each(requests: Iterable[Request]) -> list[Request]:
    return [request._replace(tokens=1) for request in requests]


class Event(NamedTuple):
    """A portion of a request's output, its end, or both."""

    index: int  # of the request
    time: float | None  # of the portion
    tokens: int | None = None  # at the end: of the whole output


class Client(Protocol):
    """Serves requests, which are known by their index."""

    def is_ready(self, index: int) -> bool:
        """Return whether the request can be sent; False while it waits for another's output."""
        del index
        return True

    def send(self, index: int, due: float) -> None:
        """Send a request that was due at the time `due`."""
        ...

    def receive(self, until: float | None) -> Iterable[Event]:
        """Wait until the time `until` (None: without limit), at most for one batch of events."""
        ...


@dataclasses.dataclass
class Answer:
    """The times of a request: due, and of each portion of its output."""

    due: float
    times: list[float] = dataclasses.field(default_factory=list)
    tokens: int = 0

    @property
    def ttft(self) -> float:
        return self.times[0] - self.due

    @property
    def tpot(self) -> float | None:
        """Seconds per token after the first; None for fewer than two tokens."""
        return (self.times[-1] - self.times[0]) / (self.tokens - 1) if self.tokens > 1 else None


@dataclasses.dataclass
class Served:
    """One run of all requests; `answers` are in the order in which they were sent."""

    begin: float
    answers: dict[int, Answer]
    samples: list[Sample] = dataclasses.field(default_factory=list)  # of an `LLM`

    @property
    def metrics(self) -> list[RequestMetrics]:
        return [sample.request.metrics for sample in self.samples]

    @property
    def seconds(self) -> float:
        """Seconds from the begin to the last token."""
        return max(answer.times[-1] for answer in self.answers.values()) - self.begin

    @property
    def tokens(self) -> int:
        return sum(answer.tokens for answer in self.answers.values())

    @property
    def ttft(self) -> list[float]:
        return [answer.ttft for answer in self.answers.values()]

    @property
    def gaps(self) -> list[float]:
        """Seconds between two portions of a request."""
        pairs = (itertools.pairwise(answer.times) for answer in self.answers.values())
        return [after - before for before, after in itertools.chain(*pairs)]


def run(
    client: Client,
    count: int,
    *,
    at_once: int | None = None,
    arrivals: Sequence[float] | None = None,
) -> Served:
    """Send `count` requests in their order, each when it is due, and wait for all outputs.

    Args:
        client: The engine.
        count: Number of requests.
        at_once: Requests at a time; where one ends the next one is sent. None means unlimited.
        arrivals: Seconds at which requests are due; None means as soon as they may be sent.
    """
    waiting, answers, running = list(range(count)), dict[int, Answer](), 0
    begin = time.monotonic()
    while waiting or running:
        until = None
        while at_once is None or running < at_once:
            index = next((each for each in waiting if client.is_ready(each)), None)
            if index is None:
                break
            due = begin + arrivals[index] if arrivals else time.monotonic()
            if time.monotonic() < due:
                until = due
                break
            waiting.remove(index)
            answers[index] = Answer(due)
            client.send(index, due)
            running += 1
        for event in client.receive(until):
            if event.time is not None:
                answers[event.index].times.append(event.time)
            if event.tokens is not None:
                answers[event.index].tokens = event.tokens
                running -= 1
    return Served(begin, answers)


class LLMClient(Client):
    """An `LLM`, whose engine is stepped in `receive`."""

    def __init__(self, llm: LLM, requests: Sequence[Request] = ()):
        """Prepare `requests`, which is no part of their times."""
        self._llm, self.samples = llm, dict[int, Sample]()
        self._indices = dict[Sample, int]()
        self.prepare(range(len(requests)), requests)

    def prepare(self, indices: Iterable[int], requests: Sequence[Request]) -> None:
        prompts = [{"prompt_token_ids": request.prompt} for request in requests]
        groups = self._llm.prepare(prompts, [request.params for request in requests])
        for index, (sample,) in zip(indices, groups, strict=True):
            self.samples[index], self._indices[sample] = sample, index

    def send(self, index: int, due: float) -> None:
        sample = self.samples[index]
        sample.request.metrics.arrival_time = due
        self._llm.session.add([sample])

    def receive(self, until: float | None) -> list[Event]:
        """Run a step, or sleep if there is none.

        Raises:
            RuntimeError: a request ended early.
        """
        if self._llm.session.has_work:
            return [self._event(sample) for sample in self._llm.session.step()]
        time.sleep(max(0.0, (until or 0.0) - time.monotonic()))
        return []

    def _event(self, sample: Sample) -> Event:
        request = sample.request
        if request.finish and request.finish != Finish.LENGTH:
            raise RuntimeError(f"A row ended early: {request.finish}.")
        tokens = request.metrics.num_tokens if request.finish else None
        return Event(self._indices[sample], request.metrics.last_token_time, tokens)

    def run(self, count: int, **load: Any) -> Served:
        """Return `run` of this client with its samples; `load`: `at_once` or `arrivals`."""
        served = run(self, count, **load)
        while self._llm.session.has_work:  # steps that were planned before the last output was read
            self._llm.session.step()
        return dataclasses.replace(served, samples=list(self.samples.values()))


def serve(llm: LLM, requests: Sequence[Request], **load: Any) -> Served:
    """Run the requests in an `LLM`; `load`: `at_once` or `arrivals` of `run`."""
    return LLMClient(llm, requests).run(len(requests), **load)


class AsyncLLMClient(Client):
    """An `AsyncLLM`, with a task per request in the event loop of `runner`."""

    def __init__(
        self,
        llm: AsyncLLM,
        runner: asyncio.Runner,
        requests: Sequence[tuple[list[int], SamplingParams]],
    ):
        """`requests`: prompts with the parameters of one sample each."""
        self._llm, self._runner, self._requests = llm, runner, requests
        self._events = asyncio.Queue[Event | Exception]()
        self._tasks = list[asyncio.Task[None]]()

    def send(self, index: int, due: float) -> None:
        del due
        self._tasks.append(self._runner.get_loop().create_task(self._read(index)))

    def receive(self, until: float | None) -> Iterable[Event]:
        """Return the events that have arrived, at least one before `until`.

        Raises:
            Exception: the error of a request.
        """
        return self._runner.run(self._wait(until))

    async def _wait(self, until: float | None) -> list[Event]:
        events = []
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(until and until - time.monotonic()):
                events.append(await self._events.get())
        events += (self._events.get_nowait() for _ in range(self._events.qsize()))
        for event in events:
            if isinstance(event, Exception):
                raise event
        return events

    async def _read(self, index: int) -> None:
        (prompt, params), count = self._requests[index], 0
        try:
            async for piece in await self._llm.submit({"prompt_token_ids": prompt}, params):
                count += len(piece.token_ids)
                self._events.put_nowait(Event(index, time.monotonic()))
            self._events.put_nowait(Event(index, None, count))
        except Exception as error:
            self._events.put_nowait(error)
