"""Engines for cached prefixes, and the parts without agents: prompts alone, and rows that decode.

A hit that finds fewer tokens than it should is an error.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from benchmarks.engine import dummy_llm, workload
from benchmarks.engine.dummy_llm import Figures, complete, greedy, num_pages, spread
from benchmarks.measure.model_shapes import SHAPES
from jaxspec import LLM
from jaxspec.options.engine_options import OPTIONS

HOST_TIER = "kv_offloading_size"
KEPT = 8  # prompts that a small engine has pages for
Prompt = list[int]
Results = Iterator[tuple[str, dict[str, int], Figures]]  # a case's name, the sizes of its work


@contextlib.contextmanager
def engine(args: argparse.Namespace, **sizes: Any) -> Iterator[LLM]:
    """Yield an engine with all its programs; `args.options` replace `sizes`."""
    cache = args.compilation_cache
    options = dummy_llm.options_of(args.drafts, compilation_cache=cache, **sizes)
    options |= dict(args.options)
    with dummy_llm.model_folder(args.shape) as folder:
        llm, _ = dummy_llm.started(lambda: LLM(folder, **options))
    try:
        yield llm
    finally:
        llm.close()
        gc.collect()  # the weights, before others are drawn


def small_engine(
    args: argparse.Namespace, **options: Any
) -> contextlib.AbstractContextManager[LLM]:
    """Return an engine for single prompts, with pages for the prefixes of `KEPT` prompts."""
    longest = longest_prompt(args) + 1
    sizes = {"max_num_seqs": 4, "decode_buckets": [1, 4], "max_model_len": longest}
    pages = {"num_pages": num_pages([longest] * KEPT)}
    return engine(args, **sizes | pages | {"enable_prefix_caching": True} | options)


def longest_prompt(args: argparse.Namespace) -> int:
    return max(args.prompt, args.shared + max(args.suffixes))


class Texts:
    """Random texts, each different."""

    def __init__(self, args: argparse.Namespace):
        self._vocab, self._draw = SHAPES[args.shape].vocab, np.random.default_rng(0)

    def __call__(self, length: int) -> Prompt:
        return self._draw.integers(0, self._vocab, length).tolist()

    def prompts(self, count: int, length: int) -> dummy_llm.Prompts:
        return [{"prompt_token_ids": self(length)} for _ in range(count)]


@dataclasses.dataclass(frozen=True)
class Probe:
    """A prompt that is timed alone, and the cached tokens it must find."""

    name: str
    prompt: Prompt
    least: int = 0  # tokens that must be found


def findable(llm: LLM, length: int) -> int:
    """Return the cached ones of `length` shared tokens: without states those of full pages."""
    return length if llm.shapes.num_checkpoints else length - length % llm.shapes.page_size


def parted(llm: LLM, args: argparse.Namespace, text: Texts) -> list[Probe]:
    """Return a cold prompt, the same again, and two that share its prefix."""
    cold, end = text(args.prompt), args.prompt - args.shared
    shared = cold[: args.shared]
    least = findable(llm, args.shared)
    return [
        Probe("cold", cold),
        Probe("the same again", cold, findable(llm, args.prompt - 1)),
        Probe("parts", [*shared, *text(end)], 0 if llm.shapes.num_checkpoints else least),
        Probe("hit", [*shared, *text(end)], least),
    ]


def first_token(args: argparse.Namespace) -> Results:
    """Time the first token of prompts sent one by one."""
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
    """Time hits on the device, and in host memory after other prompts evicted the prefix."""
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
    """Time the first token of a prompt.

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
    sizes = {"prompt": args.prompt, "shared": args.shared}
    for name, figures in rounds[0].items():
        times = spread("ttft_ms", [each[name]["ttft_ms"] for each in rounds])
        found = [each[name]["cached_tokens"] for each in rounds]
        yield name, sizes, figures | times | {"cached_tokens": min(found)}


def decode(args: argparse.Namespace) -> Results:
    """Decode in turn with and without a prefix cache, in which no request finds anything."""
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
    """Times of the rows of one load."""

    token_ms: float
    seconds: float  # of all, prompts too


def run_of(llm: LLM, short: dummy_llm.Prompts, whole: dummy_llm.Prompts, tokens: int) -> Run:
    """Time `tokens` tokens after the first: 1 + `tokens` for `whole`, less 1 for `short`."""
    first, seconds = (
        complete(llm, prompts, count).seconds
        for prompts, count in ((short, 1), (whole, tokens + 1))
    )
    return Run(1000 * (seconds - first) / tokens, seconds)


def compared(rounds: Sequence[dict[str, Run]]) -> Figures:
    """Return both engines' milliseconds and the spread of their ratios per round."""
    pairs = [(each["without"], each["with"]) for each in rounds]
    return {
        **spread("without_ms", [without.token_ms for without, _ in pairs]),
        **spread("with_ms", [keeping.token_ms for _, keeping in pairs]),
        **spread("ratio", [keeping.token_ms / without.token_ms for without, keeping in pairs]),
        **spread("ratio_whole", [keeping.seconds / without.seconds for without, keeping in pairs]),
    }
