"""Prompts that are alone on an engine: cold, and behind what earlier ones left.

A hit that finds less than it should is an error, and no figure.
"""

import argparse
import dataclasses
import json
from collections.abc import Sequence

from benchmarks.engine.dummy_llm import Figures, greedy, spread
from benchmarks.engine.prefix_engines import (
    KEPT,
    Prompt,
    Results,
    Texts,
    longest_prompt,
    small_engine,
)
from jaxspec import LLM
from jaxspec.options.engine_options import OPTIONS
from jaxspec.prefix.cache import MIN_UNCACHED

HOST_TIER = "kv_offloading_size"


@dataclasses.dataclass(frozen=True)
class Probe:
    """A prompt that is timed alone."""

    name: str
    prompt: Prompt
    least: int = 0  # tokens that must be found


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
