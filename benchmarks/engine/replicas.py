"""Throughput of replicas beside one engine, and what requests see when one of them is killed.

    python -m benchmarks.engine.replicas --replicas 4 --shape qwen3.5-9b [--json FILE]

An `AsyncLLM` has so many replicas, each on `--tensor-parallel-size` devices, and a closed load of
two requests per row. Each replica gets the same work whatever their number: the requests of
`--lengths` (`workload.py`), `--times` times. The model has random weights and drafts that are
accepted at given rates. Tokens per second are of the whole load, the median of the repeats.

With several replicas the load runs once more, and one of them is killed (SIGKILL) when half of the
requests have been sent. `lost` are requests that ended with `ReplicaDiedError`, the others have all
their tokens (else this is an error), and `others_tokens_per_second` is from the kill to the last
token or until the replica is back, which takes `seconds_until_back`. Then the load runs again.

A process measures one number of replicas, and FILE keeps the results of others.
"""

import argparse
import asyncio
import dataclasses
import os
import signal
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import dummy_llm, load_generator, traffic, workload
from benchmarks.engine.dummy_llm import Figures, rates_of
from benchmarks.engine.load_generator import AsyncLLMClient, Event
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from jaxspec.api.async_llm import AsyncLLM
from jaxspec.api.processes.replica_group import ReplicaGroup
from jaxspec.engine.errors import ReplicaDiedError
from jaxspec.requests.sampling_params import SamplingParams

SECONDS_TO_COME_BACK = 300.0
KILLED = 0  # index of the replica
Asked = Sequence[tuple[list[int], SamplingParams]]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Fields that identify a result."""

    shape: str
    rows: int
    drafts: int | str
    draft_vocab: int | None
    rates: list[float]
    options: dict[str, Any]  # of the AsyncLLM, given by hand
    lengths: str
    times: int
    tensor_parallel_size: int
    replicas: int


class Load(AsyncLLMClient):
    """Sends requests, kills a replica before request `kill_at`, and counts tokens by their time."""

    def __init__(
        self, llm: AsyncLLM, runner: asyncio.Runner, requests: Asked, kill_at: int | None = None
    ):
        super().__init__(llm, runner, requests)
        self._kill_at = kill_at
        self.arrived = list[tuple[float, int]]()  # time and tokens of each portion
        self.lost = list[int]()  # requests of the replica that was killed
        self.killed = 0.0  # time
        self.back: float | None = None  # time

    def send(self, index: int, due: float) -> None:
        if index == self._kill_at:
            replica = group_of(self._llm)._replicas[KILLED]
            os.kill(replica.process.pid, signal.SIGKILL)
            self.killed = time.monotonic()
            self._tasks.append(self._runner.get_loop().create_task(self._watch(replica)))
        super().send(index, due)

    async def _watch(self, killed: Any) -> None:
        """Note when the replica that was killed has a successor."""
        replicas = group_of(self._llm)._replicas
        while replicas.get(KILLED, killed) is killed:
            await asyncio.sleep(0.02)
        self.back = time.monotonic()

    async def _read(self, index: int) -> None:
        (prompt, params), count = self._requests[index], 0
        try:
            async for piece in await self._llm.submit({"prompt_token_ids": prompt}, params):
                count += len(piece.token_ids)
                self.arrived.append((time.monotonic(), len(piece.token_ids)))
            if count != params.max_tokens:
                raise RuntimeError(f"Request {index} has {count} of {params.max_tokens} tokens.")
        except ReplicaDiedError:
            self.lost.append(index)
        except Exception as error:
            self._events.put_nowait(error)
            return
        self._events.put_nowait(Event(index, None, count))

    def speed(self, begin: float, end: float) -> float:
        """Return the tokens per second between two times."""
        return sum(tokens for at, tokens in self.arrived if begin < at <= end) / (end - begin)


def group_of(llm: AsyncLLM) -> ReplicaGroup:
    """Return the processes of an AsyncLLM with several replicas."""
    return llm._engine.group


def requests_of(case: Case) -> Asked:
    """Return each replica's requests, with other ids for each of them."""
    count = case.times * case.replicas
    lengths = workload.lengths(case.lengths) * count
    requests = load_generator.requests_of(lengths, SHAPES[case.shape].vocab)
    return [(request.prompt, request.params) for request in requests]


def measure(
    llm: AsyncLLM, runner: asyncio.Runner, case: Case, repeats: int
) -> tuple[Figures, Figures]:
    """Return the throughput, and what followed when a replica was killed (empty if it is alone)."""
    requests = requests_of(case)
    at_once = 2 * case.rows * case.replicas

    def run(kill_at: int | None = None) -> tuple[Load, float]:
        load = Load(llm, runner, requests, kill_at)
        begin = load_generator.run(load, len(requests), at_once=at_once).begin
        return load, load.speed(begin, load.arrived[-1][0])

    run()  # compiles what is left
    speeds = sorted(run()[1] for _ in range(repeats))
    figures = {
        "requests": len(requests),
        "tokens_per_second": statistics.median(speeds),
        "least": speeds[0],
        "most": speeds[-1],
    }
    if case.replicas == 1:
        return figures, {}
    load, _ = run(kill_at=len(requests) // 2)
    last = load.arrived[-1][0]
    until_back = runner.run(wait(load))
    return figures, {
        "lost": len(load.lost),
        "served": len(requests) - len(load.lost),
        "others_tokens_per_second": load.speed(load.killed, min(last, load.killed + until_back)),
        "seconds_until_back": until_back,
        "tokens_per_second_after": run()[1],
    }


async def wait(load: Load) -> float:
    """Return the seconds until the killed replica was back.

    Raises:
        TimeoutError: it is not back in time.
    """
    async with asyncio.timeout(SECONDS_TO_COME_BACK):
        while load.back is None:
            await asyncio.sleep(0.02)
    return load.back - load.killed


def parser() -> argparse.ArgumentParser:
    options = traffic.model_parser(__doc__, 3)
    options.add_argument("--replicas", type=int, default=2, help="default 2")
    options.add_argument("--tensor-parallel-size", type=int, default=1, help="of each (default 1)")
    options.add_argument("--lengths", default="trace", help="trace (default), or as 512x128")
    options.add_argument("--times", type=int, default=2, help="of the lengths (default 2)")
    return options


def main() -> None:
    options = parser()
    args = options.parse_args()
    if min(args.replicas, args.rows, args.times, args.repeats) < 1:
        options.error("--replicas, --rows, --times and --repeats must be positive.")
    by_hand = dict(args.options)
    fields = {field.name for field in dataclasses.fields(Case)} - {"rates", "options"}
    given = {name: getattr(args, name) for name in fields}
    case = Case(**given, rates=rates_of(args.drafts, args.rates), options=by_hand)
    args.lengths = [case.lengths]
    devices = {
        "data_parallel_size": case.replicas,
        "tensor_parallel_size": case.tensor_parallel_size,
    }
    llm_options = traffic.llm_options(args, devices | by_hand)
    with dummy_llm.model_folder(case.shape) as folder, asyncio.Runner() as runner:
        figures = started_and_measured(runner, folder, llm_options, case, args.repeats)
    record.keep(args.json, case, figures, implementations={})  # other processes chose them


def started_and_measured(
    runner: asyncio.Runner, folder: Path, options: dict[str, Any], case: Case, repeats: int
) -> Figures:
    """Measure an AsyncLLM with these options, and close it."""
    begin = time.monotonic()
    llm = AsyncLLM(folder, **options)
    try:
        runner.run(llm.warm_up(["greedy"]))
        ready = time.monotonic() - begin
        figures, killed = measure(llm, runner, case, repeats)
    finally:
        runner.run(llm.close())
    return {**figures, "ready_seconds": ready, "killed": killed}


if __name__ == "__main__":
    main()
