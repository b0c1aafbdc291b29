"""The table of seconds until an engine is ready, and of what its first requests wait for."""

from typing import Any

from benchmarks.report.markdown_table import markdown


def ready(figures: dict[str, Any]) -> str:
    """A line per start, cold or warm."""
    head = ["model", "start", "load, s", "compile, s", "ready, s"]
    head += ["first token of each kind, ms", "gap then, ms", "gap while programs compile, ms"]
    return markdown(head, [_line(row) for row in figures["results"]])


def _line(row: dict[str, Any]) -> list[str]:
    first = [kind["first_token_ms"] for kind in row["kinds"]]
    gap = max(kind["largest_gap_ms"] for kind in row["kinds"])
    seconds = [f"{row[f'{name}_seconds']:.1f}" for name in ("load", "compile", "ready")]
    beside = f"{row['largest_gap_ms_while_compiling']:,.0f}"
    waits = [f"{min(first):.0f} to {max(first):.0f}", f"{gap:.0f}", beside]
    return [f"{row['shape']}, {row['rows']} rows", row["start"], *seconds, *waits]
