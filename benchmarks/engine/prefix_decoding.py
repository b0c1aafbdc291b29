"""Rows that decode on two engines by turns, of which one keeps prefixes that nobody finds."""

import argparse
from collections.abc import Sequence
from typing import NamedTuple

from benchmarks.engine import dummy_llm, workload
from benchmarks.engine.dummy_llm import Figures, complete, num_pages, spread
from benchmarks.engine.prefix_engines import Results, Texts, engine
from jaxspec import LLM


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
