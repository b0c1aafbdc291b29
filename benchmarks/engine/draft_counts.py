"""Speed with the number of drafts `"auto"`, beside each fixed number and no drafter at all.

    python -m benchmarks.engine.draft_counts --shape qwen3.5-9b [--rows 1 8 64] [--json FILE]

One engine has the programs of all numbers. So many requests with random ids run at once in it, and
the model has random weights; drafts stand at given rates (synthetic). A fixed number is the same
engine's, with the choice taken away. A drafter that drafts nothing still reads each token, so one
more engine without a drafter (`drafts` and `rates` null) says what that costs.

A token's time is that of all tokens less that of one for each request, over the tokens between. The
repeats of the ways to choose take turns; "auto" has had one run of the same load to learn from.
"""

import argparse
import dataclasses
import functools
import gc
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.engine import dummy_llm
from benchmarks.engine.dummy_llm import RATES, Figures
from benchmarks.engine.load_generator import one_token_each, requests_of, serve
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM, RequestMetrics
from jaxspec.scheduler.adaptive_drafts import AdaptiveDrafts

AUTO = "auto"
Rates = list[float]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Fields that identify a result."""

    shape: str
    rates: Rates | None
    rows: int
    prompt: int
    tokens: int
    drafts: int | str | None  # "auto" chooses among all; None: the engine has no drafter


class FixedCount(AdaptiveDrafts):
    """A fixed number of drafts."""

    count: int

    def choose(self, needs, most) -> int:
        return self.count


def make_llm(args: argparse.Namespace, folder: Path, rates: Rates | None) -> LLM:
    options = dummy_llm.options_of(
        AUTO if rates else 0,
        rates or (),
        max_num_seqs=args.rows[-1],
        decode_buckets=args.rows,
        prefill_buckets=[512],
        max_model_len=args.prompt + args.tokens,
        compilation_cache=args.compilation_cache,
    )
    return LLM(folder, **options)


def choosers(
    llm: LLM, drafts: Sequence[int | str | None]
) -> dict[int | str | None, AdaptiveDrafts]:
    """Return an `AdaptiveDrafts` for each of `drafts`."""
    scheduler, found = llm.session.scheduler, {}
    for word in drafts:
        kind = FixedCount if isinstance(word, int) else AdaptiveDrafts
        found[word] = kind(scheduler.shapes, scheduler.step_seconds.decode, scheduler.programs)
        found[word].count = word
    return found


def measure(llm: LLM, args: argparse.Namespace, rows: int, drafts: Sequence[Any]) -> list[Figures]:
    """Return the time per token of each choice, in the order of `drafts`."""
    requests = requests_of([(args.prompt, args.tokens)] * rows, SHAPES[args.shape].vocab)
    ways, runs = choosers(llm, drafts), {word: list[Figures]() for word in drafts}
    for repeat in range(args.repeats + 1):
        for word, chooser in ways.items():
            llm.session.scheduler.adaptive_drafts = chooser
            served = serve(llm, requests)
            first = serve(llm, one_token_each(requests))
            milliseconds = 1000 * (served.seconds - first.seconds) / (args.tokens - 1)
            total = RequestMetrics.total(served.metrics)
            if repeat:  # the first run is for learning
                runs[word].append({"ms": milliseconds, "tokens_per_step": total.tokens_per_step})
    return [
        dummy_llm.spread("ms_per_token", [run["ms"] for run in runs[word]])
        | {"tokens_per_step": statistics.median(run["tokens_per_step"] for run in runs[word])}
        for word in drafts
    ]


def rates(word: str) -> Rates | None:
    """Parse acceptance rates of the first draft, the first two, ...: "0.8,0.6,0.45" or "none"."""
    return None if word == "none" else [float(rate) for rate in word.split(",")]


def parser() -> argparse.ArgumentParser:
    options = record.parser(__doc__)
    add = options.add_argument
    add("--shape", choices=SHAPES, default="qwen3.5-9b")
    engines = [list(RATES), None]
    add("--rates", type=rates, nargs="+", default=engines, help="of each engine; none: no drafter")
    add("--rows", type=int, nargs="+", default=[1, 8, 64], help="requests at once, ascending")
    add("--prompt", type=int, default=128, help="tokens of a prompt (default 128)")
    add("--tokens", type=int, default=256, help="new tokens of a request (default 256)")
    add("--repeats", type=int, default=3)
    add("--compilation-cache", type=Path, metavar="FOLDER")
    return options


def main() -> None:
    args = parser().parse_args()
    sizes = {name: getattr(args, name) for name in ("shape", "prompt", "tokens")}
    with dummy_llm.model_folder(args.shape) as folder:
        for each in args.rates:
            make = functools.partial(make_llm, args, folder, each)
            llm, setting_up = dummy_llm.started(make)
            about = {"compile_seconds": setting_up["compile_seconds"]}
            drafts = [AUTO, *llm.shapes.draft_buckets] if each else [None]
            for rows in args.rows:
                for word, figures in zip(drafts, measure(llm, args, rows, drafts), strict=True):
                    case = Case(**sizes, rates=each, rows=rows, drafts=word)
                    record.keep(args.json, case, figures | about)
            llm.close()
            del llm, make
            gc.collect()  # the weights, before others are drawn


if __name__ == "__main__":
    main()
