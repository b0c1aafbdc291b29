"""Tables of what `prefixes.py` measures; each says so where nothing was measured yet."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from benchmarks.report.markdown_table import markdown

NOTHING = "Not measured yet."
Figures = dict[str, Any]


def first_token(figures: Figures) -> str:
    """A line for each prompt that was alone on the engine, those that came from the host too."""
    lines = [
        [
            f"{_size(case)}, {case['name']}",
            f"{case['prompt_tokens']:,}",
            f"{case['cached_tokens']:,}",
            _spread(case, "ttft_ms", ".1f"),
            case["commit"],
        ]
        for case in _of(figures, "first-token", "host")
    ]
    head = ["prompt", "tokens", "found", "ms to the first token (least to most)", "commit"]
    return _table(head, lines)


def agents(figures: Figures) -> str:
    """The same conversations with kept prefixes and without."""
    lines = [
        [
            f"{_size(case)}, {case['name']} kept prefixes",
            f"{case['requests']}",
            f"{case['prompt_tokens'] / case['requests']:,.0f}",
            _spread(case, "output_tokens_per_second", ",.0f"),
            f"{case['total_tokens_per_second']:,.0f}",
            f"{case['of_shared']:.1%}" if "of_shared" in case else "–",
            f"{case['ttft_ms']:,.0f} ({case['ttft_ms_p90']:,.0f})",
            case["commit"],
        ]
        for case in _of(figures, "agents")
    ]
    head = ["engine", "requests", "tokens of a prompt", "tokens a second (least to most)"]
    head += ["prompts too", "found of what is shared", "ms to the first token (p90)", "commit"]
    return _table(head, lines)


def decode(figures: Figures) -> str:
    """What a token takes where nothing is found."""
    lines = [
        [
            f"{_size(case)}, {case['sizes']['rows']}",
            _spread(case, "without_ms", ".3f"),
            _spread(case, "with_ms", ".3f"),
            _spread(case, "ratio", ".3f"),
            _spread(case, "ratio_whole", ".3f"),
            case["commit"],
        ]
        for case in _of(figures, "decode")
    ]
    head = ["rows", "ms a token without", "with kept prefixes", "ratio (least to most)"]
    return _table([*head, "of whole runs", "commit"], lines)


def copies(figures: Figures) -> str:
    """The programs between steps."""
    lines = [
        [
            f"{_size(case)}, {case['name']}",
            _spread(case, "us", ".1f"),
            f"{case['device_us']:.1f}" if "device_us" in case else "–",
            f"{case['bytes_moved'] / 1e6:.1f}",
            f"{case['of_copy']:.0%}",
            case["commit"],
        ]
        for case in _of(figures, "copies")
    ]
    head = ["program", "microseconds, back to back (least to most)", "on the device"]
    return _table([*head, "MB that must move", "of the copy bandwidth", "commit"], lines)


def all_of(figures: Figures) -> Iterable[str]:
    """Those tables that have lines."""
    tables: list[Callable[[Figures], str]] = [first_token, agents, decode, copies]
    return (made for table in tables if (made := table(figures)) != NOTHING)


def _of(figures: Figures, *parts: str) -> list[Figures]:
    return [case for case in figures["results"] if case["part"] in parts]


def _size(case: Figures) -> str:
    return case["shape"].removeprefix("qwen3.5-").upper()


def _spread(case: Figures, name: str, form: str) -> str:
    least, most = case[f"{name}_least"], case[f"{name}_most"]
    return f"{case[name]:{form}} ({least:{form}} to {most:{form}})"


def _table(head: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    return markdown(head, lines) if lines else NOTHING
