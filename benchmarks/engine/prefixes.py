"""What kept prefixes give, and what they cost where none is found.

    python -m benchmarks.engine.prefixes --shape qwen3.5-9b [--parts first-token] [--json FILE]

Prompts of random ids and a model with random weights, whose drafts stand at given rates. The parts
make engines of their own, so each can be run by itself:

* first-token: milliseconds to the first token of a prompt that is alone on the engine. A round is
  a cold prompt; the same again; one that parts from it behind so many shared tokens, where a model
  with recurrent states leaves one; one that finds them; and others with shorter and longer ends.
* agents: conversations that grow and share their system prompt (`prefix_agents.py`), so many at a
  time, with kept prefixes. Beside them stands an engine without, which gets a sample of the same
  requests with made-up answers: nothing is shared there, so any of them is worth any other. By
  default 64 requests have 65,536 tokens on average, of which 90 % came earlier, and at most 73,436
  with their output. All texts together have 0.45 million: 16 GB of the 9B's keys and values, which
  an H200 holds beside 130 states, so that nothing has to go.
* decode: milliseconds a token with kept prefixes that nobody finds, over those without. Both
  engines are there at once and take turns. A token's time is as in `decode.py`, where what ends of
  outputs cost drops out; the ratio of whole runs has it.
* copies: microseconds of the programs that keep a state and begin on one (`prefix_copies.py`).
* host: milliseconds to the first token of a prompt whose beginning was found on the device, and of
  one whose beginning had to make room and was found in the host's memory.

Every part runs once untimed; figures are the median, the least and the most of the repeats. A hit
that finds less than it should is an error. A line is printed for each case, and a FILE keeps other
cases.
"""

import argparse
import contextlib
import dataclasses
import functools
import gc
import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine import dummy_llm, prefix_agents, prefix_copies, workload
from benchmarks.engine.decode import copy_bandwidth
from benchmarks.engine.dummy_llm import RATES, Figures, complete, greedy, num_pages, spread
from benchmarks.engine.prefix_agents import Agents
from benchmarks.engine.traffic import by_hand
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from benchmarks.report import prefix_tables
from jaxspec import LLM
from jaxspec.options import OPTIONS
from jaxspec.pallas import dispatch
from jaxspec.scheduler.prefix_cache import MIN_UNCACHED

HOST_TIER = "kv_offloading_size"
KEPT = 8  # prompts that an engine has pages for
Prompt = list[int]
Results = Iterator[tuple[str, dict[str, int], Figures]]  # a case's name, the sizes of its work


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """What a result is of."""

    part: str
    name: str
    shape: str
    drafts: int
    rates: list[float]
    options: dict[str, Any]  # of the LLM, given by hand
    sizes: dict[str, int]  # of the work


@dataclasses.dataclass(frozen=True)
class Probe:
    """A prompt that is timed alone."""

    name: str
    prompt: Prompt
    least: int = 0  # tokens that must be found


@contextlib.contextmanager
def engine(args: argparse.Namespace, **sizes: Any) -> Iterator[LLM]:
    """An engine with its programs while the block runs; options by hand come last."""
    speculation = {
        "num_speculative_tokens": args.drafts,
        "synthetic_acceptance_rates": list(RATES[: args.drafts]),
    }
    with dummy_llm.model_folder(args.shape) as folder:
        make = functools.partial(
            LLM,
            folder,
            load_format="dummy",
            speculative_config=speculation if args.drafts else None,
            compilation_cache=args.compilation_cache,
            show_progress=False,
            **sizes | dict(args.options),
        )
        llm, _ = dummy_llm.started(make)
    try:
        yield llm
    finally:
        llm.close()
        gc.collect()  # the weights, before others are drawn


def small_engine(
    args: argparse.Namespace, **options: Any
) -> contextlib.AbstractContextManager[LLM]:
    """An engine for prompts that come alone, and whose prefixes stay."""
    longest = longest_prompt(args) + 1
    sizes = {"max_num_seqs": 4, "decode_buckets": [1, 4], "max_model_len": longest}
    pages = {"num_pages": num_pages([longest] * KEPT)}
    return engine(args, **sizes | pages | {"enable_prefix_caching": True} | options)


def longest_prompt(args: argparse.Namespace) -> int:
    return max(args.prompt, args.shared + max(args.suffixes))


class Texts:
    """Random ids, no two texts alike."""

    def __init__(self, args: argparse.Namespace):
        """Draw ids of the shape's vocabulary."""
        self._vocab, self._draw = SHAPES[args.shape].vocab, np.random.default_rng(0)

    def __call__(self, length: int) -> Prompt:
        return self._draw.integers(0, self._vocab, length).tolist()

    def prompts(self, count: int, length: int) -> dummy_llm.Prompts:
        """Some as the LLM takes them."""
        return [{"prompt_token_ids": self(length)} for _ in range(count)]


def findable(llm: LLM, length: int) -> int:
    """How many of so many shared tokens are found: without states those of full pages."""
    return length if llm.shapes.num_checkpoints else length - length % llm.shapes.page_size


def parted(llm: LLM, args: argparse.Namespace, text: Texts) -> list[Probe]:
    """A cold prompt, two that share its beginning, and the same again."""
    cold, end = text(args.prompt), args.prompt - args.shared
    shared = cold[: args.shared]
    again = args.prompt - 1 if args.prompt > MIN_UNCACHED else 0  # else no state is kept there
    least = findable(llm, args.shared)
    return [
        Probe("cold", cold),
        Probe("the same again", cold, findable(llm, again)),
        Probe("parts", [*shared, *text(end)], 0 if llm.shapes.num_checkpoints else least),
        Probe("hit", [*shared, *text(end)], least),
    ]


def first_token(args: argparse.Namespace) -> Results:
    """Rounds of prompts that are alone on the engine."""
    with small_engine(args) as llm:
        text, rounds = Texts(args), list[dict[str, Figures]]()
        for _ in range(args.repeats + 1):
            llm.reset_prefix_cache()
            probes = parted(llm, args, text)
            shared, least = probes[0].prompt[: args.shared], probes[-1].least
            for end in args.suffixes:
                probes.append(Probe(f"hit, {end} more", [*shared, *text(end)], least))
            rounds.append({probe.name: timed(llm, probe) for probe in probes})
        yield from summed_up(rounds[1:], args)


def host(args: argparse.Namespace) -> Results:
    """Rounds in which other prompts push a prefix out of the device's memory."""
    if HOST_TIER not in OPTIONS:
        print(json.dumps({"part": "host", "skipped": f"this LLM has no option {HOST_TIER}"}))
        return
    with small_engine(args, **{HOST_TIER: args.host_gib}) as llm:
        text, rounds = Texts(args), list[dict[str, Figures]]()
        for _ in range(args.repeats + 1):
            llm.reset_prefix_cache()
            probes = parted(llm, args, text)
            for probe in probes:
                device = timed(llm, probe)
            for _ in range(KEPT + 1):
                timed(llm, Probe("other", text(longest_prompt(args))))
            end = text(args.prompt - args.shared)
            back = Probe("back", [*probes[0].prompt[: args.shared], *end], probes[-1].least)
            rounds.append({"hit on the device": device, "hit in host memory": timed(llm, back)})
        counts = {"prefix_cache": llm.metrics()["prefix_cache"]}
        for name, sizes, figures in summed_up(rounds[1:], args):
            yield name, sizes, figures | counts


def timed(llm: LLM, probe: Probe) -> Figures:
    """What the first token of a prompt takes.

    Raises:
        RuntimeError: less was found than should be.
    """
    (output,) = llm.generate([{"prompt_token_ids": probe.prompt}], greedy(1))
    if output.num_cached_tokens < probe.least:
        raise RuntimeError(
            f"{probe.name!r} must find {probe.least} of its {len(probe.prompt)} tokens, and found "
            f"{output.num_cached_tokens}: {llm.metrics()['prefix_cache']}."
        )
    return {
        "prompt_tokens": len(probe.prompt),
        "cached_tokens": output.num_cached_tokens,
        "ttft_ms": 1000 * output.metrics.ttft,
    }


def summed_up(rounds: Sequence[dict[str, Figures]], args: argparse.Namespace) -> Results:
    """The figures of all rounds, by the names of their prompts."""
    sizes = {"prompt": args.prompt, "shared": args.shared}
    for name, figures in rounds[0].items():
        times = spread("ttft_ms", [each[name]["ttft_ms"] for each in rounds])
        found = [each[name]["cached_tokens"] for each in rounds]
        yield name, sizes, figures | times | {"cached_tokens": min(found)}


def agents(args: argparse.Namespace) -> Results:
    """All requests with kept prefixes, and some of them without."""
    names = (field.name for field in dataclasses.fields(prefix_agents.Sizes))
    sizes = prefix_agents.Sizes(**{name: getattr(args, name) for name in names})
    everyone = Agents(sizes, SHAPES[args.shape].vocab)
    about = dataclasses.asdict(sizes) | {"at_once": args.at_once}
    room = {"max_num_seqs": args.at_once, "max_model_len": -(-sizes.longest // 1024) * 1024}
    with engine(args, **room, enable_prefix_caching=True) as llm:
        yield "with", about, served(llm, args, everyone, everyone.turns)
    some = everyone.sample(args.cold_requests or len(everyone.turns))
    with engine(args, **room, enable_prefix_caching=False) as llm:
        yield "without", about, served(llm, args, everyone, some)


def served(
    llm: LLM, args: argparse.Namespace, agents: Agents, turns: Sequence[prefix_agents.Turn]
) -> Figures:
    """The repeat in the middle, with the spread of its tokens a second."""
    keeps = "prefix_cache" in llm.metrics()
    complete(llm, Texts(args).prompts(1, 64), 8)  # finds all warm
    runs = []
    for _ in range(args.repeats):
        if keeps:
            agents.forget()
            llm.reset_prefix_cache()
        else:
            agents.make_up_answers()
        run = prefix_agents.serve(llm, agents, turns, args.at_once)
        runs.append(prefix_agents.speed(run) | (prefix_agents.found(run, agents) if keeps else {}))
    runs.sort(key=lambda figures: figures["seconds"])
    speeds = [figures["output_tokens_per_second"] for figures in runs]
    figures = runs[len(runs) // 2] | spread("output_tokens_per_second", speeds)
    told = llm.metrics()
    figures |= {name: told[name] for name in ("num_preemptions", "prefix_cache") if name in told}
    sizes = {"num_pages": llm.shapes.num_pages, "num_checkpoints": llm.shapes.num_checkpoints}
    return figures | sizes


def decode(args: argparse.Namespace) -> Results:
    """Rows that decode on two engines by turns, of which one keeps what nobody finds."""
    ((prompt, tokens),) = workload.lengths(args.lengths)
    longest = prompt + tokens + 1
    room = {
        "max_num_seqs": max(args.rows),
        "decode_buckets": sorted(args.rows),
        "prefill_buckets": [min(2048, max(args.rows) * prompt)],
        "max_model_len": longest,
        "num_pages": num_pages([longest] * max(args.rows)),
    }
    with (
        engine(args, **room, enable_prefix_caching=False) as without,
        engine(args, **room, enable_prefix_caching=True) as keeping,
    ):
        text, engines = Texts(args), {"without": without, "with": keeping}
        for rows in args.rows:
            rounds = []
            for repeat in range(args.repeats + 1):
                prompts = [text.prompts(rows, prompt) for _ in range(2)]
                order = sorted(engines, reverse=repeat % 2 == 0)
                rounds.append({name: run_of(engines[name], *prompts, tokens) for name in order})
            counts = keeping.metrics()["prefix_cache"]
            if counts["num_hits"]:
                raise RuntimeError(f"Nothing should have been found, and something was: {counts}.")
            sizes = {"rows": rows, "prompt": prompt, "tokens": tokens}
            yield f"{rows} rows", sizes, compared(rounds[1:]) | {"prefix_cache": counts}


class Run(NamedTuple):
    """What rows of one load took."""

    token_ms: float
    seconds: float  # of all, prompts too


def run_of(llm: LLM, short: dummy_llm.Prompts, whole: dummy_llm.Prompts, tokens: int) -> Run:
    """Rows of `whole` get `tokens` tokens behind their first, and those of `short` that alone."""
    first, seconds = (
        complete(llm, prompts, count).seconds
        for prompts, count in ((short, 1), (whole, tokens + 1))
    )
    return Run(1000 * (seconds - first) / tokens, seconds)


def compared(rounds: Sequence[dict[str, Run]]) -> Figures:
    """Both engines' milliseconds, and their ratios round by round."""
    pairs = [(each["without"], each["with"]) for each in rounds]
    return {
        **spread("without_ms", [without.token_ms for without, _ in pairs]),
        **spread("with_ms", [keeping.token_ms for _, keeping in pairs]),
        **spread("ratio", [keeping.token_ms / without.token_ms for without, keeping in pairs]),
        **spread("ratio_whole", [keeping.seconds / without.seconds for without, keeping in pairs]),
    }


def copies(args: argparse.Namespace) -> Results:
    """The programs between steps, alone."""
    copy = 1e12 * args.copy_tb_per_s if args.copy_tb_per_s else copy_bandwidth()
    with small_engine(args) as llm:
        for name, figures in prefix_copies.measure(llm, args.shape, copy).items():
            yield name, {}, figures | {"copy_tb_per_s": copy / 1e12}


PARTS: dict[str, Callable[[argparse.Namespace], Results]] = {
    "first-token": first_token,
    "agents": agents,
    "decode": decode,
    "copies": copies,
    "host": host,
}


def parser() -> argparse.ArgumentParser:
    options = record.parser(__doc__)
    add = options.add_argument
    add("--parts", nargs="+", default=list(PARTS), choices=PARTS)
    add("--shape", choices=SHAPES, default="qwen3.5-9b")
    add("--drafts", type=int, default=3, choices=range(len(RATES) + 1))
    add("--repeats", type=int, default=3)
    add("--prompt", type=int, default=8192, help="tokens of a prompt alone (default 8192)")
    add("--shared", type=int, default=8000, help="of it, that others begin with (default 8000)")
    add("--suffixes", type=int, nargs="+", default=[40, 376, 1296], help="tokens of other ends")
    add("--agents", type=int, default=16, help="default 16")
    add("--turns", type=int, default=4, help="of each (default 4)")
    add("--system", type=int, default=48640, help="tokens that all agents begin with")
    add("--first", type=int, default=9396, help="tokens of an agent's own behind them")
    add("--more", type=int, default=4600, help="tokens of a tool between two turns")
    add("--output", type=int, default=400, help="new tokens of a turn (default 400)")
    add("--at-once", type=int, default=12, help="agents that are served at a time (default 12)")
    add("--cold-requests", type=int, default=12, help="of an engine without; 0: all (default 12)")
    add("--rows", type=int, nargs="+", default=[1, 8, 64], help="that decode (default 1 8 64)")
    add("--lengths", default="512x256", help="of rows that decode (default 512x256)")
    add("--host-gib", type=float, default=8, help="of the host's memory for prefixes (default 8)")
    add("--options", type=by_hand, nargs="*", default=[], metavar="NAME=VALUE", help="by hand")
    add("--copy-tb-per-s", type=float, help="default: measured first")
    add("--compilation-cache", type=Path, metavar="FOLDER")
    return options


def main() -> None:
    options = parser()
    args = options.parse_args()
    if not 0 < args.shared < args.prompt:
        options.error(f"--shared must be less than --prompt, got {args.shared} of {args.prompt}.")
    results, commit = [], record.machine()["commit"]
    for part in args.parts:
        for name, sizes, figures in PARTS[part](args):
            case = Case(
                part=part,
                name=name,
                shape=args.shape,
                drafts=args.drafts,
                rates=list(RATES[: args.drafts]),
                options=dict(args.options),
                sizes=sizes,
            )
            about = json.loads(json.dumps(dataclasses.asdict(case)))  # with lists, as a file has
            figures |= {"repeats": args.repeats, "commit": commit}
            results.append(dummy_llm.keep(args.json, about, figures, dispatch.implementations()))
    print(*prefix_tables.all_of({"results": results}), sep="\n\n")


if __name__ == "__main__":
    main()
