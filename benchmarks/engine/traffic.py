"""Tokens per second and waits of requests as users send them, by `LLM` with default options.

    python -m benchmarks.engine.traffic --shape qwen3.5-9b [--lengths trace 8192x1024] [--json FILE]

Requests have random ids and a fixed number of new tokens (`workload.py`), and the model random
weights and drafts that are accepted at given rates. Tokens are greedy, or sampled (`SAMPLING`).
A load (`load_generator.py`) is

* closed: a number of requests at a time; where one ends the next one is sent ("all": at once); or
* open: random arrivals (Poisson), at a share of the requests per second of "all".

Seconds are from the first arrival to the last token. Times to the first token are from the arrival,
and times per token from the first token to the last; a gap is the time between two portions of a
row. If all requests are equal and run at once, `ms_per_token` is the time of all tokens less that
of one token each, over the tokens between. Results are of the median repeat.

One more run is traced. It gives the share of the time by kind of step, and of rows and prompt
tokens

* computed: the sizes of the programs; planned: the part that was used;
* real: rows of requests that had not ended; the host reads an end late and plans rows until then;
* floor: the seconds of the same steps with real prompt tokens and planned rows alone, by
  `floor.py`; `of_floor` is its share of the traced run.

A process creates one engine. A line is printed per case, and FILE keeps the results of other cases.
"""

import argparse
import ast
import collections
import dataclasses
import math
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine import dummy_llm, load_generator, workload
from benchmarks.engine.decode import copy_bandwidth
from benchmarks.engine.dummy_llm import RATES, Figures, rates_of
from benchmarks.engine.load_generator import Request, Served, one_token_each
from benchmarks.measure import floor, record
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM, RequestMetrics, SamplingParams
from jaxspec.engine.engine import StepTimes
from jaxspec.models import dtype_of, parse_config
from jaxspec.pallas import dispatch
from jaxspec.plan.plan import Program
from jaxspec.plan.step_shapes import StateConfig

ALL = "all"
SAMPLING: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "Qwen3.5's default": {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Fields that identify a result."""

    shape: str
    rows: int
    drafts: int | str  # "auto": the engine chooses in each step, 3 at most
    draft_vocab: int | None
    rates: list[float]
    options: dict[str, Any]  # of the LLM, given by hand
    lengths: str
    requests: int
    at_once: int | None = None  # closed
    share: float | None = None  # open
    sampling: str = "greedy"

    @property
    def is_one_batch(self) -> bool:
        """True if all requests are equal and run at once."""
        is_at_once = self.requests == self.at_once and self.requests <= self.rows
        return self.lengths != "trace" and is_at_once


def make_llm(args: argparse.Namespace, folder: Path, options: dict[str, Any]) -> LLM:
    return LLM(folder, **llm_options(args, options))


def llm_options(args: argparse.Namespace, options: dict[str, Any]) -> dict[str, Any]:
    """Return the options of the model, its sizes, and `options`, which replace them."""
    longest = max(sum(each) for name in args.lengths for each in workload.lengths(name))
    return (
        dummy_llm.options_of(
            args.drafts,
            args.rates,
            args.draft_vocab,
            compilation_cache=args.compilation_cache,
            max_num_seqs=args.rows,
            max_model_len=max(longest, args.max_model_len),
        )
        | options
    )


def requests_of(case: Case) -> list[Request]:
    lengths = workload.lengths(case.lengths, case.requests)
    return load_generator.requests_of(lengths, SHAPES[case.shape].vocab, SAMPLING[case.sampling])


def speed(served: Served) -> Figures:
    """Return tokens and requests per second; times to the first token, per token, and of gaps."""
    prompt = sum(len(sample.request.prompt) for sample in served.samples)
    times = {
        "ttft": served.ttft,
        "tpot": [each.tpot for each in served.answers.values() if each.tpot is not None],
        "gap": served.gaps,
    }
    return {
        "seconds": served.seconds,
        "requests_per_second": len(served.answers) / served.seconds,
        "output_tokens_per_second": served.tokens / served.seconds,
        "total_tokens_per_second": (prompt + served.tokens) / served.seconds,
        "tokens_per_verify": RequestMetrics.total(served.metrics).mean_acceptance_length,
        **{f"{name}_ms": 1000 * float(np.mean(x)) for name, x in times.items() if x},
        **{f"{name}_ms_p99": 1000 * float(np.percentile(x, 99)) for name, x in times.items() if x},
    }


def kind_of(step: StepTimes) -> str:
    """Return the kind of a dispatch."""
    if not step.num_decodes and not step.num_prompt_tokens:
        return "copies"
    if not step.num_prompt_tokens:
        return "decode"
    return "prompts and decode" if step.num_decodes else "prompts"


def shares_of_time(steps: Sequence[StepTimes]) -> dict[str, float]:
    """Return the shares of the device's time by kind of step."""
    begin = free = steps[0].dispatch_start
    seconds = collections.Counter[str]()
    for step in steps:
        started = max(free, step.dispatch_start)
        seconds["idle"] += started - free
        seconds[kind_of(step)] += step.device_end - started
        free = step.device_end
    return {kind: part / (free - begin) for kind, part in seconds.items()}


def amounts(served: Served, steps: Sequence[StepTimes]) -> Figures:
    """Return the rows and prompt tokens computed, planned and needed."""
    # A verify gives one token more than drafts that stand; the first token is the prompt's.
    computed = [step for step in steps if isinstance(step.program, Program)]
    real = sum(each.num_tokens - 1 - each.num_accepted_tokens for each in served.metrics)
    return {
        "steps": sum(step.program.num_steps for step in computed),
        "dispatches": len(steps),
        "rows_computed": sum(s.program.decode_rows * s.program.num_steps for s in computed),
        "rows_planned": sum(step.num_decodes * step.program.num_steps for step in computed),
        "rows_real": real,
        "prompt_tokens_computed": sum(step.program.prefill_tokens for step in computed),
        "prompt_tokens_real": sum(len(sample.request.prompt) for sample in served.samples),
    }


def floor_seconds(
    case: Case, requests: Sequence[Request], steps: Iterable[StepTimes], copy: float
) -> float:
    """Return the floor of the same steps without padding, at the mean length of a row."""
    config = parse_config(SHAPES[case.shape].config())
    tokens = [request.tokens for request in requests]
    lengths = [len(request.prompt) + request.tokens / 2 for request in requests]
    option, kernels = case.options.get, dispatch.kernels_here()[1] is None
    states = StateConfig.resolve(
        option("state_policy", "auto"), option("state_dtype", "float32"), has_kernels=kernels
    )
    seconds = 0.0
    for step in steps:
        if not isinstance(step.program, Program):
            continue
        rows, prompt_tokens = step.num_decodes, step.num_prompt_tokens
        moved = floor.step_bytes(
            config,
            rows=rows,
            context=round(np.average(lengths, weights=tokens)),
            drafts=step.program.num_drafts,
            draft_vocab=case.draft_vocab,
            emitted=1 + sum(case.rates[: step.program.num_drafts]),
            states=states,
            dtype=dtype_of(option("dtype", "auto")).name,
            kv_dtype=option("kv_dtype"),
            weight_dtype="float8_e4m3fn" if option("quantization") else None,
            prompt_tokens=prompt_tokens,
        )
        verified = rows * (1 + step.program.num_drafts)
        each = floor.step_seconds(moved, config, verified, copy, prompt_tokens)
        seconds += each * step.program.num_steps
    return seconds


def measure(llm: LLM, case: Case, repeats: int, copy: float, served_all: float) -> Figures:
    """Measure one case; `served_all`: requests per second of the load with all at once."""
    requests = requests_of(case)
    rate = case.share and case.share * served_all
    arrivals = workload.poisson(case.requests, rate) if rate else None

    def run(requests: Sequence[Request]) -> Served:
        return load_generator.serve(llm, requests, at_once=case.at_once, arrivals=arrivals)

    load_generator.serve(llm, one_token_each(requests))  # compiles what is left
    runs = sorted((run(requests) for _ in range(repeats)), key=lambda served: served.seconds)
    figures = speed(runs[len(runs) // 2])
    for name, served in (("least", runs[-1]), ("most", runs[0])):
        key = "output_tokens_per_second"
        figures[f"{key}_{name}"] = speed(served)[key]
    if rate:
        figures["arrivals_per_second"] = rate
    if case.is_one_batch and requests[0].tokens > 1:
        firsts = [run(one_token_each(requests)).seconds for _ in range(repeats)]
        first = sorted(firsts)[repeats // 2]
        figures["ms_per_token"] = 1000 * (figures["seconds"] - first) / (requests[0].tokens - 1)
    preemptions = llm.metrics()["num_preemptions"]
    with llm.trace() as steps:
        traced = run(requests)
    figures["preemptions"] = llm.metrics()["num_preemptions"] - preemptions
    least = floor_seconds(case, requests, steps, copy)
    return {
        **figures,
        "shares_of_time": shares_of_time(steps),
        **amounts(traced, steps),
        "traced_seconds": traced.seconds,
        "floor_seconds": least,
        "of_floor": least / traced.seconds,
        "copy_tb_per_s": copy / 1e12,
    }


def cases_of(args: argparse.Namespace, options: dict[str, Any]) -> list[Case]:
    """Return the loads of each `--lengths`: all at once, other closed loads, open loads."""
    same = ("shape", "rows", "drafts", "draft_vocab", "sampling")
    model = {name: getattr(args, name) for name in same}
    model |= {"rates": rates_of(args.drafts, args.rates), "options": options}
    cases = []
    for name in args.lengths:
        count = args.requests or (len(workload.lengths(name)) if name == "trace" else args.rows)
        loads = [{"requests": count, "at_once": count}] if ALL in args.at_once else []
        loads += [
            {"requests": args.requests or max(4, 2 * at_once), "at_once": at_once}
            for at_once in args.at_once
            if at_once != ALL
        ]
        loads += [{"requests": count, "share": share} for share in args.shares]
        cases += [Case(**model, lengths=name, **load) for load in loads]
    return cases


def by_hand(word: str) -> tuple[str, Any]:
    """Parse an option of the LLM, "name=value"."""
    name, _, value = word.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def drafts(word: str) -> int | str:
    if word == "auto":
        return word
    if int(word) not in range(len(RATES) + 1):
        raise ValueError
    return int(word)


def closed(word: str) -> int | str:
    return ALL if word == ALL else int(word)


def model_parser(doc: str, default_drafts: int | str) -> argparse.ArgumentParser:
    """Return a parser with the options of `llm_options` and of results."""
    options = record.parser(doc)
    add = options.add_argument
    add("--shape", choices=SHAPES, default="qwen3.5-9b")
    add("--rows", type=int, default=64, help="requests that run at once (default 64)")
    add("--max-model-len", type=int, default=4096, help="at least (default 4096)")
    of_drafts = f"0 to 3, or auto (default {default_drafts})"
    add("--drafts", type=drafts, default=default_drafts, metavar="K", help=of_drafts)
    add("--draft-vocab", type=int, metavar="N", help="ids that are drafted (default: the model's)")
    add("--rates", type=float, nargs="+", default=list(RATES), help="at which drafts are accepted")
    add("--options", type=by_hand, nargs="*", default=[], metavar="NAME=VALUE", help="of the LLM")
    add("--repeats", type=int, default=3)
    add("--compilation-cache", type=Path, metavar="FOLDER")
    return options


def parser() -> argparse.ArgumentParser:
    options = model_parser(__doc__, "auto")
    add = options.add_argument
    add("--sampling", choices=SAMPLING, default="greedy")
    add("--lengths", nargs="+", default=["trace"], help="trace, or as 8192x1024")
    add("--requests", type=int, help="default: all of the trace, --rows, or 2 per --at-once")
    add("--at-once", type=closed, nargs="*", default=[ALL], metavar="N", help="default: all")
    add("--shares", type=float, nargs="*", default=[], metavar="X", help='of the speed of "all"')
    add("--copy-tb-per-s", type=float, help="default: measured first")
    return options


def refusal(args: argparse.Namespace) -> str | None:
    """Return why the options are invalid; None if they are valid."""
    if args.shares and ALL not in args.at_once:
        return f"--shares are of the speed with --at-once {ALL}, which is left out."
    at_once = [count for count in args.at_once if count != ALL]
    if min(args.rows, args.repeats, *at_once) < 1 or min(args.shares, default=1) <= 0:
        return "--rows, --repeats, --at-once and --shares must be positive."
    if args.requests is not None and args.requests < max([1, *at_once]):
        return f"--requests must be at least as many as --at-once, got {args.requests}."
    if "max_num_seqs" in dict(args.options):
        return "max_num_seqs is --rows."
    if why := record.refusal(args.json):
        return why
    try:
        for case in cases_of(args, {}):
            workload.lengths(case.lengths, case.requests)
    except ValueError as error:
        return str(error)
    return None


def main() -> None:
    options = parser()
    args = options.parse_args()
    if why := refusal(args):
        options.error(why)
    tuned = dict(args.options)
    copy = 1e12 * args.copy_tb_per_s if args.copy_tb_per_s else copy_bandwidth()
    with dummy_llm.model_folder(args.shape) as folder:
        kind = SamplingParams(**SAMPLING[args.sampling])
        llm, setting_up = dummy_llm.started(lambda: make_llm(args, folder, tuned), kind)
    del setting_up["compile_seconds_by_program"]
    served_all = math.nan
    for case in cases_of(args, tuned):
        figures = measure(llm, case, args.repeats, copy, served_all)
        if case.at_once == case.requests:
            served_all = figures["requests_per_second"]
        record.keep(args.json, case, {**figures, **setting_up, "date": time.strftime("%F")})


if __name__ == "__main__":
    main()
