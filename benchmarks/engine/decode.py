"""Speed of decoding on one GPU, beside vLLM and the memory's bandwidth.

    python -m benchmarks.engine.decode --shape qwen3.5-9b [--rows 1 64] [--drafts 0 3] [--json FILE]

`LLM.generate` of so many prompts of 512 random ids at once, 256 greedy tokens each, by a model with
random weights; drafts stand at given rates (synthetic), which `--draft-vocab` does not lower as it
would with real ones. A token's time is that of 257 new tokens less that of 1, over 256, the median
of the repeats: the definition that vLLM was measured by (`peer_h200.json`). The floor is
`floor.py`'s, at the mean context and the copy bandwidth.

The gap: while all rows decode, the engine's time a step, over that of steps which are planned
beforehand and enqueued back to back; minus 1. The host's times are of the engine's steps; where the
driver's queue is full (as with 256 rows, drafts and 16 steps a dispatch), the dispatch waits for
room.

A line is printed when a case is done, and a FILE keeps what it says of other cases. A process
measures one shape: most of its time it compiles, two to ten programs a case. With `--one-engine`
all `--rows` have the same engine, and steps with fewer rows are padded to the next of them.
"""

import argparse
import dataclasses
import functools
import gc
import json
import statistics
import time
from pathlib import Path

import jax

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import Figures, Prompts, complete, num_pages
from benchmarks.measure import floor, power
from benchmarks.measure.kernel_times import kernel_times
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM, RequestMetrics
from jaxspec.models import parse_config
from jaxspec.plan.step_shapes import StateConfig

HOST = ("plan", "dispatch", "collect")  # what its time goes to, but for waiting
PROFILED = 8  # steps, enqueued back to back
ROUNDS = 3  # of steady steps, by the engine and back to back
PEER = Path(__file__).parents[1] / "results" / "peer_h200.json"


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(dummy_llm.Case):
    """Fields that identify a result."""

    rows: int
    prompt: int
    tokens: int


def make_llm(case: Case, folder: Path, args: argparse.Namespace) -> LLM:
    """Create an engine for `case.rows` rows whose prompts are sent at once, or for all `--rows`."""
    sizes = sorted(args.rows) if args.one_engine else [case.rows]
    rows, chunks = sizes[-1], {min(size * case.prompt, args.prefill_tokens) for size in sizes}
    longest = case.prompt + max(case.tokens + 1, steady_tokens(case, args.steps))
    chunk, ends = max(chunks), []
    if case.drafts and not args.one_engine:
        # Rows end one by one, and a step computes the smallest bucket that holds the rest.
        count = args.row_sizes or (8 if rows >= 32 else 4 if rows >= 4 else 1)
        ends = [rows * i // count for i in range(1, count)]
    return dummy_llm.make_llm(
        case,
        folder,
        max_num_seqs=rows,
        max_model_len=longest,
        max_prefill_seqs=-(-chunk // case.prompt),
        max_num_batched_tokens=chunk + rows * (1 + case.drafts),
        decode_buckets=[*ends, *sizes],
        prefill_buckets=sorted({min(chunks), chunk}),
        num_pages=num_pages([longest] * rows),
        gpu_memory_utilization=1.0,
        compilation_cache=args.compilation_cache,
    )


class Engines:
    """Creates the engine of each case; with `--one-engine`, one for all rows with these drafts."""

    def __init__(self, args: argparse.Namespace):
        self._args = args
        self._drafts: int | str | None = None
        self._made: tuple[LLM, Figures] | None = None

    def engine(self, case: Case, folder: Path) -> tuple[LLM, Figures]:
        """Return an engine for `case` that has all its programs, and the times of its start."""
        if self._made is None or self._drafts != case.drafts or not self._args.one_engine:
            self.drop()
            self._made = dummy_llm.started(lambda: make_llm(case, folder, self._args))
            self._drafts = case.drafts
        return self._made

    def drop(self) -> None:
        """Close the engine, and free its weights before others are drawn."""
        if self._made is not None:
            self._made[0].close()
        self._made = None
        gc.collect()


def generation(llm: LLM, case: Case, prompts: Prompts, repeats: int) -> Figures:
    """Time `generate`; sample the GPU's clock and power while all rows decode."""
    with power.sampled() as samples:  # a run that is not timed, and the next ones find all warm
        sampled = complete(llm, prompts, case.tokens + 1).requests
    all_decode = (
        max(request.first_token_time for request in sampled),
        min(request.last_token_time for request in sampled),
    )
    shorts, wholes = [], []
    for _ in range(repeats):
        shorts.append(complete(llm, prompts, 1))
        wholes.append(complete(llm, prompts, case.tokens + 1))
    first = statistics.median(run.seconds for run in shorts)
    times = [(run.seconds - first) / case.tokens for run in wholes]
    middle = statistics.median(times)
    steps = statistics.median(run.steps for run in wholes) - shorts[0].steps
    requests = [request for run in wholes for request in run.requests]
    return {
        **power.summary(samples, *all_decode),
        "ms_per_token": 1000 * middle,
        "ms_per_token_least": 1000 * min(times),
        "ms_per_token_most": 1000 * max(times),
        "ms_per_step": 1000 * middle * case.tokens / steps,
        "tokens_per_step": RequestMetrics.total(requests).mean_acceptance_length,
        "tokens_per_second": case.rows / middle,
        "prefill_seconds": first,
        "prefill_tokens_per_second": case.rows * case.prompt / first,
        "first_token_seconds": statistics.mean(request.ttft or 0.0 for request in requests),
    }


def calls_per_round(case: Case, steps: int) -> int:
    """Return the dispatches of a round: at least 3, because a single one overlaps nothing."""
    return max(3, steps // case.steps_per_dispatch)


def steady_tokens(case: Case, steps: int) -> int:
    """Return more tokens than a row can get in `steady_steps`, because no row may end."""
    a_round = calls_per_round(case, steps) * case.steps_per_dispatch
    unknown = (3 + case.max_in_flight) * case.steps_per_dispatch  # to the scheduler
    return (2 * ROUNDS * a_round + PROFILED + 8 + unknown) * (1 + case.drafts)


def steady_steps(llm: LLM, case: Case, prompts: Prompts, args: argparse.Namespace) -> Figures:
    """Time steps while all rows decode: by the engine, and back to back."""
    engine = llm.session.engine
    tokens = steady_tokens(case, args.steps)
    groups = llm.prepare(prompts, [dummy_llm.greedy(tokens)] * len(prompts))
    samples = [sample for (sample,) in groups]
    llm.session.add(samples)
    while not all(sample.request.num_output for sample in samples):
        llm.session.step()
    rounds, calls = [], calls_per_round(case, args.steps)
    steps = calls * case.steps_per_dispatch
    for _ in range(ROUNDS):
        engine.drain()
        before, begin = dict(vars(engine.metrics)), time.perf_counter()
        for _ in range(calls):
            llm.session.step()
        engine.drain()
        by_engine, after = time.perf_counter() - begin, vars(engine.metrics)
        host = {name: after[name + "_time"] - before[name + "_time"] for name in HOST}
        rounds.append({"engine": by_engine, "back_to_back": back_to_back(llm, calls), **host})
    profiled = -(-PROFILED // case.steps_per_dispatch)
    kernels = (
        kernel_times(lambda: back_to_back(llm, profiled), profiled * case.steps_per_dispatch)
        if args.profile
        else {}
    )
    llm.session.abort(samples)
    middle = {k: statistics.median(times[k] for times in rounds) / steps for k in rounds[0]}
    gap = statistics.median(times["engine"] / times["back_to_back"] for times in rounds) - 1
    milliseconds = {f"{name}_ms": 1000 * seconds for name, seconds in middle.items()}
    milliseconds["host_ms"] = 1000 * sum(middle[name] for name in HOST)
    return {**milliseconds, "gap": gap, "steps_per_round": steps, **kernels}


def back_to_back(llm: LLM, calls: int) -> float:
    """Seconds of `calls` dispatches that are planned, and on the device, before the first begins.

    A plan needs no more than an upper bound of each length, so it can be made so early.
    """
    scheduler, runner = llm.session.scheduler, llm._runner
    scheduled = [scheduler.schedule() for _ in range(calls)]
    plans = [step.plan for step in scheduled]
    where = runner.group.whole if runner.group.size > 1 else None
    plans = [dataclasses.replace(plan, packed=jax.device_put(plan.packed, where)) for plan in plans]
    jax.block_until_ready([plan.packed for plan in plans])
    begin = time.perf_counter()
    pending = [runner.dispatch(plan) for plan in plans]
    pending[-1].result()
    seconds = time.perf_counter() - begin
    for step, output in zip(scheduled, pending, strict=True):
        scheduler.collect(step, output.result())
    return seconds


def compare(case: Case, figures: Figures, copy: float) -> Figures:
    """Return the floor of a step at `copy` bytes per second, and the peer's time."""
    config = parse_config(SHAPES[case.shape].config())
    moved = floor.step_bytes(
        config,
        rows=case.rows,
        context=case.prompt + case.tokens // 2,
        drafts=case.drafts,
        draft_vocab=case.draft_vocab,
        emitted=figures["tokens_per_step"],
        states=StateConfig(case.state_policy, case.state_dtype),
        dtype=case.dtype,
        kv_dtype=case.kv_dtype,
        weight_dtype=case.weight_dtype,
    )
    # The devices share bytes and operations; what they send each other is not in the floor.
    whole = floor.step_seconds(moved, config, case.rows * (1 + case.drafts), copy)
    least = whole / case.tensor_parallel_size
    result = {
        "floor_bytes": {name: round(size) for name, size in moved.items()},
        "floor_ms_per_step": 1000 * least,
        "of_roofline": 1000 * least / figures["ms_per_step"],
    }
    peers = json.loads(PEER.read_text())
    alike = ("shape", "rows", "drafts", "prompt", "tokens")
    for peer in (
        (peers | peer for peer in peers["results"]) if case.tensor_parallel_size == 1 else ()
    ):
        if all(peer[name] == getattr(case, name) for name in alike):
            result["peer_ms_per_token"] = peer["ms_per_token"]
            result["times_peer"] = peer["ms_per_token"] / figures["ms_per_token"]
    return result


def measure(
    case: Case, folder: Path, args: argparse.Namespace, *, copy: float, engines: Engines
) -> Figures:
    """Measure one case; `copy`: bytes per second of a copy."""
    prompts = dummy_llm.random_prompts(case.shape, case.rows, case.prompt)
    llm, setting_up = engines.engine(case, folder)
    try:
        figures = generation(llm, case, prompts, args.repeats)
        figures |= compare(case, figures, copy) | steady_steps(llm, case, prompts, args)
    except Exception:  # requests of this case may be left in the engine
        engines.drop()
        raise
    figures |= {**setting_up, "memory_bytes": llm.metrics()["memory_bytes"]}
    peak = (jax.devices()[0].memory_stats() or {}).get("peak_bytes_in_use")  # of the process
    figures |= {"peak_bytes": peak, "one_engine": args.one_engine}
    return {**figures, "copy_tb_per_s": copy / 1e12}


def copy_bandwidth() -> float:
    from benchmarks.kernels.run import copy_bandwidth  # with all kernels and their cases

    return copy_bandwidth()


def main() -> None:
    parser = dummy_llm.parser(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 64, 256])
    parser.add_argument("--drafts", type=int, nargs="+", default=[0, 1, 3], choices=range(4))
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default 512)")
    parser.add_argument("--tokens", type=int, default=256, help="new ones (default 256)")
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="of a step, at most")
    parser.add_argument(
        "--steps", type=int, default=24, help="of a round for the gap, at least 3 dispatches"
    )
    parser.add_argument(
        "--row-sizes",
        type=int,
        help="numbers of rows that get compiled where there are drafts (default 1 to 8, by rows)",
    )
    parser.add_argument(
        "--one-engine", action="store_true", help="for all --rows, which compiles fewer programs"
    )
    parser.add_argument("--profile", action="store_true", help="the kernels' times, too")
    parser.add_argument("--copy-tb-per-s", type=float, help="default: measured first")
    args = parser.parse_args()
    copy = 1e12 * args.copy_tb_per_s if args.copy_tb_per_s else copy_bandwidth()
    fixed = dummy_llm.fields_given(Case, args)
    sizes = [
        {"rows": rows, "drafts": drafts, "draft_vocab": args.draft_vocab if drafts else None}
        for rows in args.rows
        for drafts in args.drafts
    ]
    if args.one_engine:
        sizes.sort(key=lambda size: size["drafts"])
    cases = [Case(**fixed | size) for size in sizes]
    dummy_llm.run(cases, functools.partial(measure, copy=copy, engines=Engines(args)), args)


if __name__ == "__main__":
    main()
