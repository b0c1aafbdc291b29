"""Tables of what `draft_counts.py` and `kernels/sampling.py` measure."""

from typing import Any

from benchmarks.report.markdown_table import markdown

WAYS = {None: "no drafter", 0: "0 drafts", 1: "1", 3: "3", "auto": '`"auto"`'}
Figures = dict[str, Any]


def draft_counts(figures: Figures) -> str:
    """Milliseconds a token by how the number of drafts is chosen, and "auto" beside the best."""
    loads: dict[tuple[str, tuple[float, ...], int], dict[Any, float]] = {}
    plain, commits = dict[tuple[str, int], float](), dict[Any, str]()
    for case in figures["results"]:
        milliseconds, rows = case["ms_per_token"], case["rows"]
        if case["rates"] is None:
            plain[case["shape"], rows] = milliseconds
        else:
            key = case["shape"], tuple(case["rates"]), rows
            loads.setdefault(key, {})[case["drafts"]] = milliseconds
            commits[key] = case["commit"]
    lines = []
    for key, times in loads.items():
        shape, rates, rows = key
        times[None] = plain[shape, rows]
        best = min(time for way, time in times.items() if way != "auto")
        name = f"{shape.removeprefix('qwen3.5-').upper()}, {rows} request" + "s" * (rows > 1)
        stood = "/".join(f"{rate:.0%}" for rate in rates)
        shown = [f"{times[way]:.2f}" for way in WAYS]
        lines.append([name, stood, *shown, f"{times['auto'] / best - 1:+.1%}", commits[key]])
    head = ["model, load", "drafts accepted at", *WAYS.values(), "auto beside the best", "commit"]
    return markdown(head, lines)


def sampling(figures: Figures) -> str:
    """Microseconds of a draw by what requests ask for, and what is more than temperature."""
    lines = []
    for case in figures["results"]:
        if case["stage"] == "draw" and case["logits"] == "peaked":
            more = f"{case['us_more']:+.0f}" if case["us_more"] else "–"
            lines.append([case["asks"], f"{case['us']:.0f}", more])
        elif case["stage"] == "logprobs":
            lines.append(["logprobs, 1 to 20 of the likeliest", "–", f"{case['us']:+.0f}"])
    return markdown(["asked for", "microseconds of a draw", "more than temperature"], lines)
