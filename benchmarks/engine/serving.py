"""What a server costs: the same requests through `LLM` in process and through HTTP.

    python -m benchmarks.engine.serving --shape qwen3.5-9b [--parts throughput] [--json FILE]

Requests are those of `traffic.py`: random ids, a fixed number of greedy tokens, and a model with
random weights whose drafts stand at given rates. A tokenizer is made up for it. The server, what
asks it and `LLM` are three processes of one machine. Each answer is streamed.

* throughput: so many requests are there at a time, and where one ends the next one comes ("all":
  at once). `LLM` and the server take turns, and have an engine each on the same device. `of_llm` is
  the server's tokens a second over `LLM`'s, by the runs in the middle.
* first-token: one request at a time. From the call to the first piece, and from the first byte
  sent to the first piece received; medians, in turns of ten.
* streams: a server alone, with more rows. Seconds of each stage of a step on the host, "between"
  those of one step and the next one; how late the event loop is; and processors that are busy.
  With --switch-ms once more for each time that a thread may keep Python's lock for, and with
  --api-processes for each such number. The event loop and the processors are then those of the
  engine's process.

A device's memory must be enough for two engines: XLA_PYTHON_CLIENT_MEM_FRACTION=0.45 gives each its
share of it. A line is printed for each case, and a FILE keeps other cases.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import dummy_llm, traffic, workload
from benchmarks.engine.dummy_llm import RATES, Figures
from benchmarks.engine.http_processes import Generator, Server, write_tokenizer
from benchmarks.engine.serving_runs import Run, by_http, by_llm, figures_of, percentiles, streamed
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM
from jaxspec.pallas import dispatch

PARTS = "throughput", "first-token", "streams"
FIRSTS_A_TURN = 10
SHORT = 16  # requests of a run that is not timed


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a result is of."""

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
class Engines:
    """An LLM here, a server, and what asks it."""

    llm: LLM
    server: Server
    generator: Generator


def throughput(case: Case, engines: Engines, repeats: int) -> Figures:
    """Both ways in turns, after a short run of each."""
    work = work_of(case)
    some = slice(0, SHORT)
    short = traffic.Work(work.prompts[some], work.tokens[some]).one_token_each()
    by_llm(engines.llm, short, case.at_once)
    by_http(engines.server, engines.generator, short, case.at_once)
    runs: list[tuple[Run, Run]] = []
    for _ in range(repeats):
        here = by_llm(engines.llm, work, case.at_once)
        runs.append((here, by_http(engines.server, engines.generator, work, case.at_once)))
    llm, http = (figures_of(each) for each in zip(*runs, strict=True))
    ratios = [there.speed / here.speed for here, there in runs]
    key = "output_tokens_per_second"
    return {
        "llm": llm,
        "http": http,
        "of_llm": http[key] / llm[key],
        "of_llm_least": min(ratios),
        "of_llm_most": max(ratios),
    }


def first_token(case: Case, engines: Engines) -> Figures:
    """Requests one by one, some here, then some there."""
    work = work_of(case)
    both: dict[str, list[float]] = {"llm": [], "http": []}
    for turn in range(-1, case.requests // FIRSTS_A_TURN):
        some = slice(max(0, turn) * FIRSTS_A_TURN, (max(0, turn) + 1) * FIRSTS_A_TURN)
        part = traffic.Work(work.prompts[some], work.tokens[some])
        here = [streamed(engines.llm, *each) for each in zip(*part, strict=True)]
        there = by_http(engines.server, engines.generator, part, 1).ttft
        if turn >= 0:  # before that it gets warm
            both["llm"] += here
            both["http"] += there
    llm, http = (1000 * statistics.median(seconds) for seconds in both.values())
    return {
        **percentiles("llm", both["llm"]),
        **percentiles("http", both["http"]),
        "overhead_ms": http - llm,
    }


def streams(case: Case, server: Server, generator: Generator, repeats: int) -> Figures:
    """So many streams at a time, of a server alone."""
    work = work_of(case)

    def run(work: traffic.Work) -> Run:
        return by_http(server, generator, work, case.at_once, case.switch_ms)

    run(work.one_token_each())
    return figures_of([run(work) for _ in range(repeats)])


def work_of(case: Case) -> traffic.Work:
    requests = workload.lengths(case.lengths, case.requests)
    ids = workload.prompts(requests, SHAPES[case.shape].vocab)
    return traffic.Work(
        [{"prompt_token_ids": each} for each in ids], [tokens for _, tokens in requests]
    )


def cases_of(args: argparse.Namespace) -> list[Case]:
    """In the order of `--parts`, but for `streams`, which come last."""
    same = ("shape", "drafts", "draft_vocab")
    about = {name: getattr(args, name) for name in same} | {"rates": traffic.rates_of(args)}
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
    """A folder with a configuration and a tokenizer."""
    with dummy_llm.model_folder(args.shape) as folder:
        write_tokenizer(folder, SHAPES[args.shape].vocab)
        yield folder


def options_of(args: argparse.Namespace, rows: int, options: Figures) -> Figures:
    """An engine's; prefixes are not kept, for requests come again."""
    given = argparse.Namespace(**{**vars(args), "rows": rows})
    given.lengths = [*args.lengths, args.first_lengths, args.stream_lengths]
    return traffic.llm_options(given, {"enable_prefix_caching": False, **options})


def measured(cases: Sequence[Case], args: argparse.Namespace) -> Iterator[tuple[Case, Figures]]:
    """The figures of each case, as they come."""
    alone = [case for case in cases if case.part == "streams"]
    beside = [case for case in cases if case.part != "streams"]
    with model(args) as folder, Generator() as generator:
        if beside:
            yield from _beside(beside, args, folder, generator)
        options = options_of(args, args.stream_rows, dict(args.stream_options))
        for count, cases in itertools.groupby(alone, lambda case: case.api_processes):
            with Server(folder, options, api_processes=count) as server:
                for case in cases:
                    yield case, streams(case, server, generator, args.repeats)


def _beside(
    cases: Sequence[Case], args: argparse.Namespace, folder: Path, generator: Generator
) -> Iterator[tuple[Case, Figures]]:
    options = options_of(args, args.rows, dict(args.options))
    # The server finds in the cache what was compiled here.
    llm, setting_up = dummy_llm.started(lambda: LLM(folder, **options))
    del setting_up["compile_seconds_by_program"]
    with llm, Server(folder, options) as server:
        engines = Engines(llm, server, generator)
        for case in cases:
            if case.part == "throughput":
                yield case, setting_up | throughput(case, engines, args.repeats)
            else:
                yield case, setting_up | first_token(case, engines)


def parser() -> argparse.ArgumentParser:
    options = record.parser(__doc__)
    add = options.add_argument
    add("--shape", choices=SHAPES, default="qwen3.5-9b")
    add("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    add("--rows", type=int, default=64, help="that run at once (default 64)")
    add("--max-model-len", type=int, default=4096, help="at least (default 4096)")
    add("--drafts", type=traffic.drafts, default=3, metavar="K", help="0 to 3 (default), or auto")
    add("--draft-vocab", type=int, metavar="N", help="default: the model's")
    add("--rates", type=float, nargs="+", default=list(RATES), help="at which drafts stand")
    add("--lengths", nargs=1, default=["trace"], help="trace (default), or as 8192x1024")
    add("--requests", type=int, help="default: as many as --lengths has")
    add("--at-once", type=traffic.closed, nargs="+", default=[64, traffic.ALL], metavar="N")
    add("--first-lengths", default="512x8", help="of requests that come alone (default 512x8)")
    add("--firsts", type=int, default=50, help="how many of them, in tens (default 50)")
    add("--streams", type=int, nargs="+", default=[64, 256], metavar="N", help="that are open")
    add("--stream-rows", type=int, default=256, help="of their server (default 256)")
    add("--switch-ms", type=float, nargs="*", default=[], metavar="X", help="of threads, too")
    add("--api-processes", type=int, nargs="+", default=[1], metavar="N", help="of that server")
    add("--stream-lengths", default="128x512", help="of their requests (default 128x512)")
    add("--options", type=traffic.by_hand, nargs="*", default=[], metavar="NAME=VALUE")
    add("--stream-options", type=traffic.by_hand, nargs="*", default=[], metavar="NAME=VALUE")
    add("--repeats", type=int, default=3)
    add("--compilation-cache", type=Path, metavar="FOLDER")
    return options


def refusal(args: argparse.Namespace) -> str | None:
    """Why the options don't go together, if they don't."""
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
        about = json.loads(json.dumps(dataclasses.asdict(case)))  # with lists, as a file has them
        figures["commit"] = record.machine()["commit"]
        dummy_llm.keep(args.json, about, figures, dispatch.implementations())


if __name__ == "__main__":
    main()
