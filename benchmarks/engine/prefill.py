"""Speed of prefill: one prompt alone, several at once, and beside rows that decode.

    python -m benchmarks.engine.prefill --shape qwen3.5-9b [--kinds first-token mixed] [--json FILE]

Prompts of random ids and a model with random weights, as in `decode.py`. Three kinds of cases:

* first-token: one prompt, read whole in one step, and in chunks if it is longer than one. Wall
  clock of `LLM.generate` with one new token, and the request's own time to its first token.
* throughput: several prompts at once, one new token each, by the wall clock of `generate`.
* mixed: rows decode, and prompts come one after another: a chunk of one rides in every step, for
  as long as there are prompts. Time is counted from one collected step to the next, which is what a
  row waits for its next tokens; beside it that time while no prompt is there.

A line is printed when a case is done, a table at the end, and a FILE keeps what it says of other
cases. A case compiles two to five programs, and is measured in seconds.
"""

import argparse
import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import Figures, complete, num_pages, random_prompts, spread
from benchmarks.report import tables
from jaxspec import LLM, RequestMetrics
from jaxspec.engine.engine import StepTimes
from jaxspec.requests.outputs import Sample

KINDS = ("first-token", "throughput", "mixed")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(dummy_llm.Case):
    """Fields that identify a result."""

    prompts: int  # at once, or one after another beside rows that decode
    prompt: int  # tokens of each
    chunk: int  # prompt tokens of a step, at most
    rows: int = 0  # that decode meanwhile
    context: int = 0  # tokens of each such row's own prompt


def cases_of(args: argparse.Namespace) -> list[Case]:
    model = dummy_llm.fields_given(dummy_llm.Case, args)
    longest = max(args.lengths)
    alone = [(n, chunk) for n in args.lengths for chunk in sorted({n, min(n, args.chunk)})[::-1]]
    sizes = {
        "first-token": [{"prompts": 1, "prompt": n, "chunk": chunk} for n, chunk in alone],
        "throughput": [{"prompts": args.batch, "prompt": longest, "chunk": args.prefill_tokens}],
        "mixed": [
            {"prompts": args.stream, "prompt": longest, "chunk": args.chunk}
            | {"rows": args.rows, "context": args.context}
        ],
    }
    return [Case(**model | size) for kind in args.kinds for size in sizes[kind]]


def make_llm(case: Case, folder: Path, args: argparse.Namespace) -> LLM:
    """An engine with room for all of the case.

    A prompt keeps its row until its last step is collected; the next one's first chunk is planned
    before, so there are rows for as many prompts as there may be steps in flight, and one.
    """
    beside = min(case.prompts, 1 + case.max_in_flight) if case.rows else case.prompts
    lengths = [case.prompt + 1] * beside
    if case.rows:
        lengths += [case.context + steady_tokens(case, args)] * case.rows
    shortest = min(case.prompt, case.context or case.prompt)
    seqs = case.rows + beside
    return dummy_llm.make_llm(
        case,
        folder,
        max_num_seqs=seqs,
        max_model_len=max(lengths),
        max_prefill_seqs=-(-case.chunk // shortest),
        max_num_batched_tokens=case.chunk + seqs * (1 + case.drafts),
        decode_buckets=sorted({case.rows or seqs, seqs}),
        prefill_buckets=[case.chunk],
        num_pages=num_pages(lengths),
        gpu_memory_utilization=1.0,
        compilation_cache=args.compilation_cache,
    )


def alone(llm: LLM, case: Case, args: argparse.Namespace) -> Figures:
    """Time `generate` with one new token per prompt."""
    prompts = random_prompts(case.shape, case.prompts, case.prompt)
    complete(llm, prompts, 1)
    runs = [complete(llm, prompts, 1) for _ in range(args.repeats)]
    first = [statistics.mean(request.ttft or 0.0 for request in run.requests) for run in runs]
    seconds = spread("seconds", [run.seconds for run in runs])
    return {
        **seconds,
        "first_token_seconds": statistics.median(first),
        "prefill_tokens_per_second": case.prompts * case.prompt / seconds["seconds"],
        "steps": runs[0].steps,
    }


def steady_tokens(case: Case, args: argparse.Namespace) -> int:
    """Return more tokens than a row can get in `mixed`, because no row may end."""
    chunks = case.prompts * -(-case.prompt // case.chunk)
    own_chunks = case.rows * -(-case.context // case.chunk)  # of the rows that start later
    in_flight = 2 * (1 + case.max_in_flight)
    steps = own_chunks + args.repeats * (args.steps + chunks + in_flight) + in_flight
    return steps * case.steps_per_dispatch * (1 + case.drafts)


def mixed(llm: LLM, case: Case, args: argparse.Namespace) -> Figures:
    """Time steps that prefill prompts and decode rows."""
    params = dummy_llm.greedy(steady_tokens(case, args))
    own = random_prompts(case.shape, case.rows, case.context)
    decoding = [sample for (sample,) in llm.prepare(own, [params] * case.rows)]
    prompts = random_prompts(case.shape, case.prompts, case.prompt)
    one_token = [dummy_llm.greedy(1)] * case.prompts
    coming = [llm.prepare(prompts, one_token) for _ in range(args.repeats)]
    llm.session.add(decoding)
    while not all(sample.request.num_output for sample in decoding):
        llm.session.step()
    rounds = []
    with llm.trace() as times:
        for groups in coming:
            begin = len(times)
            for _ in range(args.steps):
                llm.session.step()
            read(llm, [sample for (sample,) in groups])
            rounds.append(waits(times[begin:]))
    if any(sample.request.finish for sample in decoding):
        raise RuntimeError("A row ended before the last prompt was read: give it more tokens.")
    tokens = RequestMetrics.total([sample.request.metrics for sample in decoding])
    llm.session.abort(decoding)
    per_step = case.rows * tokens.mean_acceptance_length
    speeds = [case.prompts * case.prompt / sum(seconds[True]) for seconds in rounds]
    return {
        **spread("prefill_tokens_per_second", speeds),
        "tokens_per_step": tokens.mean_acceptance_length,
        "mixed": decoding_figures([seconds[True] for seconds in rounds], per_step),
        "unmixed": decoding_figures([seconds[False] for seconds in rounds], per_step),
    }


def read(llm: LLM, samples: Sequence[Sample]) -> None:
    for _ in llm.session.run(samples):
        pass


def waits(steps: Sequence[StepTimes]) -> dict[bool, list[float]]:
    """Return seconds between collected steps: with a chunk of a prompt (True), and without."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    for before, step in itertools.pairwise(steps):
        has_chunk = step.num_prompt_tokens > 0
        seconds[has_chunk].append(step.collect_end - before.collect_end)
    return seconds


def decoding_figures(rounds: Sequence[Sequence[float]], tokens_per_step: float) -> Figures:
    """Summarize seconds between steps of rounds; all rows get `tokens_per_step` tokens."""
    seconds = [wait for one in rounds for wait in one]
    speeds = [tokens_per_step / statistics.mean(one) for one in rounds]
    return {
        "steps": len(seconds),
        "ms_per_step": 1000 * statistics.median(seconds),
        "ms_per_step_p99": 1000 * float(np.percentile(seconds, 99)),
        "decode_tokens_per_second": statistics.median(speeds),
    }


def measure(case: Case, folder: Path, args: argparse.Namespace) -> Figures:
    llm, setting_up = dummy_llm.started(lambda: make_llm(case, folder, args))
    figures = mixed(llm, case, args) if case.rows else alone(llm, case, args)
    return {**figures, **setting_up, "memory_bytes": llm.metrics()["memory_bytes"]}


def main() -> None:
    parser = dummy_llm.parser(__doc__)
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS)
    parser.add_argument("--drafts", type=int, default=0, choices=range(4))
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 8192], help="of prompts")
    parser.add_argument("--chunk", type=int, default=2048, help="prompt tokens of a step")
    parser.add_argument("--batch", type=int, default=8, help="prompts at once, for throughput")
    parser.add_argument("--prefill-tokens", type=int, default=8192, help="of a step, there")
    parser.add_argument("--rows", type=int, default=64, help="that decode in mixed steps")
    parser.add_argument("--context", type=int, default=512, help="prompt tokens of such a row")
    parser.add_argument("--stream", type=int, default=8, help="prompts that come meanwhile")
    parser.add_argument("--steps", type=int, default=64, help="without a prompt, before they come")
    args = parser.parse_args()
    figures = {"results": dummy_llm.run(cases_of(args), measure, args)}
    print(tables.shown(figures, "long prompts", "mixed steps"))


if __name__ == "__main__":
    main()
