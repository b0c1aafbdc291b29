"""Tables of what `traffic.py` measures, from a file for each card."""

from collections.abc import Sequence
from typing import Any

from benchmarks.measure.model_shapes import SHAPES
from benchmarks.report.markdown_table import markdown

ROWS, DRAFTS, RATES = 64, 3, [0.80, 0.60, 0.45]  # what the text names and the tables do not show
KINDS = ["idle", "prompts", "prompts and decode", "decode"]  # of steps
ABOUT = ["requests", "options", "card"]
Figures = dict[str, Any]


def served(*cards: Figures) -> str:
    """What users see of each load: tokens a second, and how long they wait."""
    lines = []
    for card, case in by_load(cards):
        rates = [f"{case[f'{what}_tokens_per_second']:,.0f}" for what in ("output", "total")]
        waits = _wait(case, "ttft", ",.0f"), _wait(case, "tpot", ".1f")
        gap = f"{case['gap_ms_p99']:.1f}" if "gap_ms_p99" in case else "–"
        batch = f"{case['ms_per_token']:.2f}" if "ms_per_token" in case else "–"
        lines.append([*_about(card, case), *rates, *waits, gap, batch, case["commit"]])
    head = ["tokens a second", "prompts too", "ms to the first token (p99)"]
    head += ["ms per token (p99)", "ms of a gap: p99", "ms a token of the batch", "commit"]
    return markdown([*ABOUT, *head], lines)


def spent(*cards: Figures) -> str:
    """Where the time of the same loads goes, and how much of what was computed was needed."""
    lines = []
    for card, case in by_load(cards):
        shares = [f"{case['shares_of_time'].get(kind, 0):.0%}" for kind in KINDS]
        needed = [
            f"{case[f'{what}_real'] / case[f'{what}_computed']:.0%}"
            for what in ("prompt_tokens", "rows")
        ]
        floor = f"{case['of_floor']:.0%} ({case['copy_tb_per_s']:.2f} TB/s)"
        lines.append([*_about(card, case), *shares, *needed, floor, case["commit"]])
    head = ["prompt tokens needed", "rows needed", "floor", "commit"]
    return markdown([*ABOUT, *KINDS, *head], lines)


def by_load(cards: Sequence[Figures]) -> list[tuple[str, Figures]]:
    """Each result with its card: a model's loads from light to heavy, and card beside card."""
    results = [(card_of(figures), case) for figures in cards for case in figures["results"]]
    return sorted(results, key=_order)


def card_of(figures: Figures) -> str:
    """The short name of what a file was measured on: "H100"."""
    return figures["device"].removeprefix("NVIDIA ").split()[0]


def work_of(case: Figures) -> str:
    """The model and the lengths of requests: "9B, trace"."""
    words = [case["shape"].removeprefix("qwen3.5-").upper()]
    if case["drafts"] != DRAFTS:
        words.append(f"{case['drafts']} drafts")
    if case["rates"] != RATES[: case["drafts"]]:
        words.append(f"drafts accepted at {'/'.join(f'{rate:.0%}' for rate in case['rates'])}")
    if case.get("sampling", "greedy") != "greedy":
        words.append(case["sampling"])
    return ", ".join([*words, case["lengths"]])


def options_of(case: Figures) -> list[str]:
    """What was chosen by hand, but for `max_num_seqs`."""
    vocab = {} if case["draft_vocab"] is None else {"draft_vocab": case["draft_vocab"]}
    return [f"{name}={value!r}" for name, value in (vocab | case["options"]).items()]


def is_all_at_once(case: Figures) -> bool:
    """Whether no request waits for another one's end before it is sent."""
    return case["at_once"] == case["requests"]


def _about(card: str, case: Figures) -> list[str]:
    if is_all_at_once(case):
        load = f"all {case['requests']} at once"
    elif case["share"] is None:
        load = f"{case['at_once']} at a time"
    else:
        load = f"{case['arrivals_per_second']:.1f} a second ({case['share']:.0%})"
    rows = [f"max_num_seqs={case['rows']}"] if case["rows"] != ROWS else []
    options = ", ".join(f"`{option}`" for option in rows + options_of(case))
    return [f"{work_of(case)}, {load}", options or "defaults", card]


def _order(result: tuple[str, Figures]) -> tuple[Any, ...]:
    card, case = result
    trace = case["lengths"] == "trace"
    lengths = [] if trace else [int(number) for number in case["lengths"].split("x")]
    work = list(SHAPES).index(case["shape"]), -case["drafts"], case["rates"], lengths
    work = *work, case["sampling"] != "greedy"
    load = is_all_at_once(case), case["share"] is not None, case["at_once"] or case["share"]
    return *work, *load, case["rows"], options_of(case), card


def _wait(case: Figures, name: str, form: str) -> str:
    """The mean and the 99th percentile; where each request has one token, there is no next one."""
    if f"{name}_ms" not in case:
        return "–"
    return f"{case[f'{name}_ms']:{form}} ({case[f'{name}_ms_p99']:{form}})"
