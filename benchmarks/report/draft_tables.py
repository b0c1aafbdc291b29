"""Tables of what `draft_counts.py` measures."""

from typing import Any

from benchmarks.report.markdown_table import markdown

WAYS = {None: "no drafter", 0: "0 drafts", 1: "1", 3: "3", "auto": '`"auto"`'}
Figures = dict[str, Any]


def draft_counts(figures: Figures) -> str:
    """Milliseconds a token by how the number of drafts is chosen, and "auto" beside the best."""
    loads: dict[tuple[str, tuple[float, ...], int], dict[Any, float]] = {}
    plain: dict[tuple[str, int], float] = {}
    for case in figures["results"]:
        milliseconds, rows = case["ms_per_token"], case["rows"]
        if case["rates"] is None:
            plain[case["shape"], rows] = milliseconds
        else:
            load = loads.setdefault((case["shape"], tuple(case["rates"]), rows), {})
            load[case["drafts"]] = milliseconds
    lines = []
    for (shape, rates, rows), times in loads.items():
        times[None] = plain[shape, rows]
        best = min(time for way, time in times.items() if way != "auto")
        name = f"{shape.removeprefix('qwen3.5-').upper()}, {rows} request" + "s" * (rows > 1)
        stood = "/".join(f"{rate:.0%}" for rate in rates)
        shown = [f"{times[way]:.2f}" for way in WAYS]
        lines.append([name, stood, *shown, f"{times['auto'] / best - 1:+.1%}"])
    head = ["model, load", "drafts accepted at", *WAYS.values(), "auto beside the best"]
    return markdown(head, lines)
