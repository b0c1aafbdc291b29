"""Gain of the prefix cache, and its cost without hits.

    python -m benchmarks.engine.prefixes --shape qwen3.5-9b [--parts first-token] [--json FILE]

Prompts have random ids, and the model random weights and drafts that are accepted at given rates.
Each part creates its own engines, so it can be run alone:

* first-token: milliseconds to the first token of single prompts. A round is a cold prompt; the same
  again; one with the same --shared tokens, after which the engine caches a recurrent state; one
  that finds these; and others with shorter and longer ends. A hit with too few cached tokens is an
  error.
* agents: conversations that grow and share their system prompt (`prefix_agents.py`), --at-once at a
  time, with a prefix cache. An engine without one serves a sample of the same requests with random
  outputs; they share nothing there, so a few represent all. By default 64 requests have 65,536
  tokens on average, 90% of them shared, and at most 73,436 with their output. All texts have 0.45
  million tokens: 16 GB of the 9B's keys and values, which fit an H200 beside 130 states without
  eviction.
* decode: milliseconds per token with a prefix cache without hits, over those without one. Both
  engines run in turn. A token's time is that of `decode.py`, which excludes the cost of the ends of
  outputs; the ratio of whole runs includes it.
* copies: microseconds of the programs that cache a state and restore one (`prefix_copies.py`).
* host: milliseconds to the first token after a hit on the device, and after a hit in host memory,
  of a prefix that was evicted.

The first run of a part is not timed. Results are the median, minimum and maximum of the repeats; of
agents, the median repeat. A line is printed per case, and FILE keeps the results of other cases.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.engine import prefix_copies
from benchmarks.engine.decode import copy_bandwidth
from benchmarks.engine.dummy_llm import RATES
from benchmarks.engine.prefix_agents import agents
from benchmarks.engine.prefix_parts import Results, decode, first_token, host, small_engine
from benchmarks.engine.traffic import by_hand
from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from benchmarks.report import tables


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Fields that identify a result."""

    part: str
    name: str
    shape: str
    drafts: int
    rates: list[float]
    options: dict[str, Any]  # of the LLM, given by hand
    sizes: dict[str, int]  # of the work


def copies(args: argparse.Namespace) -> Results:
    """Time the programs that copy states and pages between steps."""
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
    add("--shared", type=int, default=8000, help="of it, shared by others (default 8000)")
    add("--suffixes", type=int, nargs="+", default=[40, 376, 1296], help="tokens of other ends")
    add("--agents", type=int, default=16, help="default 16")
    add("--turns", type=int, default=4, help="of each (default 4)")
    add("--system", type=int, default=48640, help="tokens of the shared prefix")
    add("--first", type=int, default=9396, help="tokens of an agent's own first text")
    add("--more", type=int, default=4600, help="tokens of a tool's output between turns")
    add("--output", type=int, default=400, help="new tokens of a turn (default 400)")
    add("--at-once", type=int, default=12, help="agents at a time (default 12)")
    add("--cold-requests", type=int, default=12, help="without a prefix cache; 0: all (default 12)")
    add("--rows", type=int, nargs="+", default=[1, 8, 64], help="rows that decode (default 1 8 64)")
    add("--lengths", default="512x256", help="of rows that decode (default 512x256)")
    add("--host-gib", type=float, default=8.0, help="host memory for prefixes (default 8)")
    add("--options", type=by_hand, nargs="*", default=[], metavar="NAME=VALUE", help="by hand")
    add("--copy-tb-per-s", type=float, help="default: measured first")
    add("--compilation-cache", type=Path, metavar="FOLDER")
    return options


def refusal(args: argparse.Namespace) -> str | None:
    """Return why the options are invalid; None if they are valid."""
    if not 0 < args.shared < args.prompt:
        return f"--shared must be above 0 and less than --prompt, got {args.shared}."
    if min(args.repeats, args.at_once, *args.rows) < 1:
        return "--repeats, --at-once and --rows must be positive."
    if not 0 <= args.cold_requests <= args.agents * args.turns:
        return f"--cold-requests must be at most --agents times --turns, got {args.cold_requests}."
    return record.refusal(args.json)


def main() -> None:
    options = parser()
    args = options.parse_args()
    if why := refusal(args):
        options.error(why)
    results = []
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
            results.append(record.keep(args.json, case, figures | {"repeats": args.repeats}))
    names = "prefixes found", "agents", "prefixes not found", "copies of states"
    print(tables.shown({"results": results}, *names))


if __name__ == "__main__":
    main()
