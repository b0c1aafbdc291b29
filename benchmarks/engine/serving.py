"""The cost of a server: the same requests by `LLM` in this process and over HTTP.

    python -m benchmarks.engine.serving --shape qwen3.5-9b [--parts throughput] [--json FILE]

Requests are those of `traffic.py`: random ids and a fixed number of greedy tokens, for a model with
random weights, whose drafts are accepted at given rates, and a tokenizer of words. The server is a
process of its own; this process has the `LLM` and the clients. Each answer is streamed.

* throughput: a closed load. `LLM` and the server run in turn, each with an engine on the same
  device. `of_llm` is the server's tokens per second over `LLM`'s, of the median runs.
* first-token: one request at a time, from the call to the first output, and from sending to the
  first output received; medians, in turns of ten.
* streams: a server alone, with more rows. Times of each stage of a step on the host ("between":
  from one step to the next), the lag of the event loop, and busy processors. --switch-ms repeats it
  for each time that a thread may keep Python's lock, --api-processes for each number; the event
  loop and the processors are then those of the engine's process.

Two engines share the device's memory: XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 gives each its part. A
line is printed per case, and FILE keeps the results of other cases.
"""

import argparse
import contextlib
import dataclasses
import itertools
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import dummy_llm, load_generator, traffic, workload
from benchmarks.engine.dummy_llm import Figures, rates_of
from benchmarks.engine.http_client import HTTPClient, WatchedServer, body
from benchmarks.engine.load_generator import Request, Served, one_token_each, run, serve
from benchmarks.measure import host_times, record
from benchmarks.measure.host_times import HostWatch
from benchmarks.measure.model_shapes import SHAPES
from benchmarks.measure.words import write_words
from jaxspec import LLM

PARTS = "throughput", "first-token", "streams"
FIRSTS_A_TURN = 10
SHORT = 16  # requests of a run that is not timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Fields that identify a result."""

    part: str
    shape: str
    rows: int
    drafts: int | str
    draft_vocab: int | None
    rates: list[float]
    options: dict[str, Any]  # of both engines, given by hand
    lengths: str
    requests: int
    at_once: int
    switch_ms: float | None = None  # of the server's threads; None: as it chooses
    api_processes: int = 1  # of the server


@dataclasses.dataclass
class Run:
    """One run of all requests, with the times of the engine's host."""

    served: Served
    cpu: dict[str, float]  # seconds of processors, by process and thread
    stages: host_times.Seconds
    lags: list[float] = dataclasses.field(default_factory=list)  # of the event loop, seconds

    @property
    def speed(self) -> float:
        return self.served.tokens / self.served.seconds


def by_llm(llm: LLM, requests: Sequence[Request], at_once: int) -> Run:
    watch = HostWatch(llm.session.engine)
    watch.begin()
    served = serve(llm, requests, at_once=at_once)
    host = watch.end()
    return Run(served, {"llm": host["cpu"]["all"]}, host["stages"])


def by_http(
    server: WatchedServer, requests: Sequence[Request], at_once: int, switch_ms: float | None = None
) -> Run:
    """Run the requests through HTTP.

    Raises:
        RuntimeError: a request was not served whole.
    """
    with HTTPClient(server.port, list(map(body, requests)), at_once) as client:
        server.begin(switch_ms)
        before = host_times.cpu_seconds()["MainThread"]
        served = run(client, len(requests), at_once=at_once)
        generator = host_times.cpu_seconds()["MainThread"] - before
        host = server.end()
    asked = sum(request.tokens for request in requests)
    if served.tokens != asked or host["num_running"] or host["num_waiting"]:
        raise RuntimeError(f"Not all was served: {served.tokens} of {asked} tokens.")
    threads = host["cpu"]
    cpu = {
        "server": threads["all"],
        "event_loop": threads["MainThread"],
        "engine": threads["jaxspec-engine"],
        "generator": generator,
    }
    return Run(served, cpu, host["stages"], host["lags"])


def first_piece(llm: LLM, request: Request) -> float:
    """Return the seconds to the first piece of a stream, which is read to its end."""
    begin = time.monotonic()
    pieces = llm.stream({"prompt_token_ids": request.prompt}, request.params)
    next(pieces)
    seconds = time.monotonic() - begin
    for _ in pieces:
        pass
    return seconds


def figures_of(runs: Sequence[Run]) -> Figures:
    """Return speeds and processors of the median run; waits and stages of all runs."""
    by_speed = sorted(runs, key=lambda run: run.speed)
    middle = by_speed[len(runs) // 2]
    lags = [x for run in runs for x in run.lags]
    return {
        "output_tokens_per_second": middle.speed,
        "output_tokens_per_second_least": by_speed[0].speed,
        "output_tokens_per_second_most": by_speed[-1].speed,
        **percentiles("ttft", [x for run in runs for x in run.served.ttft]),
        **percentiles("gap", [x for run in runs for x in run.served.gaps]),
        **percentiles("loop_lag", lags),
        **host_times.figures(run.stages for run in runs),
        "processors": {name: cpu / middle.served.seconds for name, cpu in middle.cpu.items()},
        "portions": len(middle.served.ttft) + len(middle.served.gaps),
        "dispatches": sum(len(run.stages["plan"]) for run in runs),
    }


def percentiles(name: str, seconds: Sequence[float]) -> Figures:
    if not seconds:
        return {}
    middle, late = 1000 * np.percentile(seconds, (50, 99))
    return {f"{name}_ms_p50": float(middle), f"{name}_ms_p99": float(late)}


def throughput(case: Case, llm: LLM, server: WatchedServer, repeats: int) -> Figures:
    """Run `LLM` and HTTP in turn, after a short run of each."""
    requests = requests_of(case)
    short = one_token_each(requests[:SHORT])
    by_llm(llm, short, case.at_once)
    by_http(server, short, case.at_once)
    runs: list[tuple[Run, Run]] = []
    for _ in range(repeats):
        here = by_llm(llm, requests, case.at_once)
        runs.append((here, by_http(server, requests, case.at_once)))
    in_process, http = (figures_of(each) for each in zip(*runs, strict=True))
    ratios = [there.speed / here.speed for here, there in runs]
    key = "output_tokens_per_second"
    return {
        "llm": in_process,
        "http": http,
        "of_llm": http[key] / in_process[key],
        "of_llm_least": min(ratios),
        "of_llm_most": max(ratios),
    }


def first_token(case: Case, llm: LLM, server: WatchedServer) -> Figures:
    """Time the first token of single requests, `FIRSTS_A_TURN` by `LLM`, then as many by HTTP."""
    requests = requests_of(case)
    both: dict[str, list[float]] = {"llm": [], "http": []}
    for turn in range(-1, case.requests // FIRSTS_A_TURN):
        start = max(0, turn) * FIRSTS_A_TURN
        part = requests[start : start + FIRSTS_A_TURN]
        here = [first_piece(llm, request) for request in part]
        there = by_http(server, part, 1).served.ttft
        if turn >= 0:  # before that it gets warm
            both["llm"] += here
            both["http"] += there
    in_process, http = (1000 * statistics.median(seconds) for seconds in both.values())
    return {
        **percentiles("llm", both["llm"]),
        **percentiles("http", both["http"]),
        "overhead_ms": http - in_process,
    }


def streams(case: Case, server: WatchedServer, repeats: int) -> Figures:
    """Run `case.at_once` streams on a server without an `LLM` beside it."""
    requests = requests_of(case)
    load = case.at_once, case.switch_ms
    by_http(server, one_token_each(requests), *load)
    return figures_of([by_http(server, requests, *load) for _ in range(repeats)])


def requests_of(case: Case) -> list[Request]:
    lengths = workload.lengths(case.lengths, case.requests)
    return load_generator.requests_of(lengths, SHAPES[case.shape].vocab)


def cases_of(args: argparse.Namespace) -> list[Case]:
    """Return the cases in the order of `--parts`."""
    same = ("shape", "drafts", "draft_vocab")
    about = {name: getattr(args, name) for name in same}
    about |= {"rates": rates_of(args.drafts, args.rates)}
    small = about | {"rows": args.rows, "options": dict(args.options)}
    large = about | {"rows": args.stream_rows, "options": dict(args.stream_options)}
    (lengths,) = args.lengths
    count = args.requests or len(workload.lengths(lengths))
    loads = [count if each == traffic.ALL else each for each in args.at_once]
    cases = [
        Case(part="throughput", lengths=lengths, requests=count, at_once=each, **small)
        for each in loads
    ]
    first = {"lengths": args.first_lengths, "requests": args.firsts, "at_once": 1}
    cases.append(Case(part="first-token", **first, **small))
    large |= {"part": "streams", "lengths": args.stream_lengths}
    cases += [
        Case(requests=2 * each, at_once=each, switch_ms=milliseconds, api_processes=count, **large)
        for count in args.api_processes
        for milliseconds in [None, *args.switch_ms]
        for each in args.streams
    ]
    return [case for part in args.parts for case in cases if case.part == part]


@contextlib.contextmanager
def model(args: argparse.Namespace) -> Iterator[Path]:
    """Yield a folder with a configuration and a tokenizer."""
    with dummy_llm.model_folder(args.shape) as folder:
        write_words(folder, SHAPES[args.shape].vocab)
        yield folder


def options_of(args: argparse.Namespace, rows: int, options: Figures) -> Figures:
    given = argparse.Namespace(**{**vars(args), "rows": rows})
    given.lengths = [*args.lengths, args.first_lengths, args.stream_lengths]
    return traffic.llm_options(given, options)


def measured(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[tuple[Case, Figures]]:
    """Yield each case with its measurements; streams come last."""
    alone = [case for case in cases if case.part == "streams"]
    beside = [case for case in cases if case.part != "streams"]
    with model(args) as folder:
        if beside:
            yield from _beside(beside, args, folder)
        options = options_of(args, args.stream_rows, dict(args.stream_options))
        for count, group in itertools.groupby(alone, lambda case: case.api_processes):
            with WatchedServer(folder, options, api_processes=count) as server:
                for case in group:
                    yield case, streams(case, server, args.repeats)


def _beside(
    cases: Sequence[Case], args: argparse.Namespace, folder: Path
) -> Iterator[tuple[Case, Figures]]:
    options = options_of(args, args.rows, dict(args.options))
    # The server finds in the cache what was compiled here.
    llm, setting_up = dummy_llm.started(lambda: LLM(folder, **options))
    del setting_up["compile_seconds_by_program"]
    with llm, WatchedServer(folder, options) as server:
        for case in cases:
            if case.part == "throughput":
                yield case, setting_up | throughput(case, llm, server, args.repeats)
            else:
                yield case, setting_up | first_token(case, llm, server)


def parser() -> argparse.ArgumentParser:
    options = traffic.model_parser(__doc__, 3)
    add = options.add_argument
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--lengths", nargs=1, default=["trace"], help="trace (default), or as 8192x1024")
    add("--requests", type=int, help="default: as many as --lengths has")
    add("--at-once", type=traffic.closed, nargs="+", default=[64, traffic.ALL], metavar="N")
    add("--first-lengths", default="512x8", help="of single requests (default 512x8)")
    add("--firsts", type=int, default=50, help="how many of them, in tens (default 50)")
    add("--streams", type=int, nargs="+", default=[64, 256], metavar="N", help="open at a time")
    add("--stream-rows", type=int, default=256, help="rows of their server (default 256)")
    add("--switch-ms", type=float, nargs="*", default=[], metavar="X", help="also with these times")
    add("--api-processes", type=int, nargs="+", default=[1], metavar="N", help="of that server")
    add("--stream-lengths", default="128x512", help="of their requests (default 128x512)")
    add("--stream-options", type=traffic.by_hand, nargs="*", default=[], metavar="NAME=VALUE")
    return options


def refusal(args: argparse.Namespace) -> str | None:
    """Return why the options are invalid; None if they are valid."""
    at_once = [each for each in args.at_once if each != traffic.ALL]
    counts = args.streams + args.api_processes + at_once
    if min(args.rows, args.stream_rows, args.repeats, *counts) < 1:
        return (
            "--rows, --stream-rows, --repeats, --streams, --api-processes and --at-once must be "
            "positive."
        )
    if args.firsts < 1 or args.firsts % FIRSTS_A_TURN:
        return f"--firsts must be tens, got {args.firsts}."
    try:
        for case in cases_of(args):
            workload.lengths(case.lengths, case.requests)
            if case.requests < case.at_once:
                return f"--requests must be at least as many as --at-once, got {case.requests}."
    except ValueError as error:
        return str(error)
    return record.refusal(args.json)


def main() -> None:
    options = parser()
    args = options.parse_args()
    if why := refusal(args):
        options.error(why)
    for case, figures in measured(cases_of(args), args):
        record.keep(args.json, case, figures)


if __name__ == "__main__":
    main()
