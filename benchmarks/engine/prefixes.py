"""What kept prefixes give, and what they cost where none is found.

    python -m benchmarks.engine.prefixes --shape qwen3.5-9b [--parts first-token] [--json FILE]

Prompts of random ids and a model with random weights, whose drafts stand at given rates. The parts
make engines of their own, so each can be run by itself:

* first-token: milliseconds to the first token of a prompt that is alone on the engine. A round is
  a cold prompt; the same again; one that parts from it behind so many shared tokens, and leaves a
  recurrent state there; one that finds these; and others with shorter and longer ends. A hit that
  finds less than it should is an error.
* agents: conversations that grow and share their system prompt (`prefix_agents.py`), so many at a
  time, with kept prefixes. Beside them stands an engine without, which gets a sample of the same
  requests with made-up answers: nothing is shared there, so any of them is worth any other. By
  default 64 requests have 65,536 tokens on average, of which 90% came earlier, and at most 73,436
  with their output. All texts together have 0.45 million: 16 GB of the 9B's keys and values, which
  an H200 holds beside 130 states, so that nothing has to go.
* decode: milliseconds a token with kept prefixes that nobody finds, over those without. Both
  engines are there at once and take turns. A token's time is as in `decode.py`, where what ends of
  outputs cost drops out; the ratio of whole runs has it.
* copies: microseconds of the programs that keep a state and begin on one (`prefix_copies.py`).
* host: milliseconds to the first token of a prompt whose beginning was found on the device, and of
  one whose beginning had to make room and was found in the host's memory.

What runs first in a part is not timed. Figures are the median, the least and the most of the
repeats; of agents, those of the repeat in the middle. A line is printed for each case, and a FILE
keeps other cases.
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
    """What a result is of."""

    part: str
    name: str
    shape: str
    drafts: int
    rates: list[float]
    options: dict[str, Any]  # of the LLM, given by hand
    sizes: dict[str, int]  # of the work


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
    add("--host-gib", type=float, default=8.0, help="of the host's memory for prefixes (default 8)")
    add("--options", type=by_hand, nargs="*", default=[], metavar="NAME=VALUE", help="by hand")
    add("--copy-tb-per-s", type=float, help="default: measured first")
    add("--compilation-cache", type=Path, metavar="FOLDER")
    return options


def refusal(args: argparse.Namespace) -> str | None:
    """Why the options don't go together, if they don't."""
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
