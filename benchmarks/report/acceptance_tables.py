"""Tables of the acceptance of the assembled product; each says so where nothing was measured."""

from collections.abc import Iterable, Sequence
from typing import Any

from benchmarks.report.markdown_table import markdown

NOTHING = "Not measured yet."
Figures = dict[str, Any]
SHORT_TABLE = "greedy", "published defaults", "all in each request", "the three in one batch"
KEPT = {  # figures of other parts, and how they are written
    "ms_per_token": "{:.2f} ms per token",
    "generations": "{:,} generations",
    "identical": "{:,} identical",
    "ties": "{:,} ties",
    "differing": "{:,} different",
    "drafts_accepted": "{:,} drafts accepted",
    "prompt_tokens": "{:,} prompt tokens",
    "cached_tokens": "{:,} found the third time",
    "in_turn": "{:,} found in the next turn",
    "tokens_before": "moved after {:,} tokens",
    "same_tokens": "same tokens: {}",
    "clients": "{} clients",
    "tokens_per_second": "{:,.0f} tokens per second",
    "first_ms": "{:.0f} ms first",
    "again_ms": "{:.0f} ms again",
    "first_token_ms": "{:.0f} ms to the last first token",
    "largest_gap_ms": "largest gap {:.0f} ms",
    "ready_seconds": "ready in {:.0f} s",
}


def features(figures: Figures) -> str:
    """A line per feature, with the models that have all of them side by side."""
    found = _by_feature(figures, "features")
    models = [model for model, rows in found.items() if len(rows) > 1 + len(SHORT_TABLE)]
    names = dict.fromkeys(name for model in models for name in found[model] if name != "ready")
    head = ["requests"]
    for model in models:
        head += [f"{model}: ms per token", "of greedy", "first request, ms", "next one", "gap, ms"]
    lines = [
        [name, *(cell for model in models for cell in _feature(found[model], name))]
        for name in names
    ]
    return markdown(head, lines) if lines else NOTHING


def models(figures: Figures) -> str:
    """A line per model."""
    found = _by_feature(figures, "features")
    without = _by_feature(figures, "without drafts")
    lines = []
    for model, rows in found.items():
        ready = rows.get("ready", {}).get("ready_seconds")
        speeds = [rows.get(name, {}) for name in SHORT_TABLE]
        speeds.append(without.get(model, {}).get("greedy", {}))
        waits = [row["first_ms"] for row in rows.values() if "first_ms" in row]
        gaps = [row["largest_gap_ms"] for row in rows.values() if "largest_gap_ms" in row]
        compiled = [row["compiled_in_calls"] for row in rows.values() if "compiled_in_calls" in row]
        lines.append(
            [
                model,
                _number(ready, ".0f"),
                *(_speed(row) for row in speeds),
                _number(max(waits, default=None), ".0f"),
                _number(max(gaps, default=None), ".0f"),
                _number(sum(compiled) if compiled else None, "d"),
            ]
        )
    head = ["model", "ready, s", "ms per token: greedy", "published defaults", "all features"]
    head += ["the three mixed", "greedy, no drafts", "longest first request, ms"]
    head += ["largest gap, ms", "programs that a request waited for"]
    return markdown(head, lines) if lines else NOTHING


def others(figures: Figures) -> str:
    """A line per row of the other parts."""
    lines = []
    for row in figures["results"]:
        name = row["feature"]
        if row["part"] in ("features", "without drafts") or name in ("ready", "part", "all"):
            continue
        if failure := _failure(row):
            said = failure
        else:
            said = ", ".join(form.format(row[key]) for key, form in KEPT.items() if key in row)
        lines.append([row["model"], row["part"], name, said])
    return markdown(["model", "part", "what", "result"], lines) if lines else NOTHING


def failures(figures: Figures) -> str:
    """A line for all that failed or was skipped."""
    lines = [
        [row["model"], row["part"], row["feature"], said]
        for row in figures["results"]
        if (said := _failure(row))
    ]
    if not figures["results"]:
        return NOTHING
    return markdown(["model", "part", "what", "why"], lines) if lines else "Nothing."


def all_of(figures: Figures) -> Iterable[str]:
    """Those tables that have lines."""
    return (table(figures) for table in (features, models, others, failures))


def _by_feature(figures: Figures, part: str) -> dict[str, dict[str, Figures]]:
    found: dict[str, dict[str, Figures]] = {}
    for row in figures["results"]:
        if row["part"] == part and row["feature"] not in ("part", "all"):
            found.setdefault(row["model"], {})[row["feature"]] = row
    return found


def _feature(rows: dict[str, Figures], name: str) -> Sequence[str]:
    row = rows.get(name, {})
    speed, greedy = (each.get("ms_per_token") for each in (row, rows.get(SHORT_TABLE[0], {})))
    return [
        _speed(row),
        _number(speed / greedy if speed and greedy else None, ".2f"),
        _number(row.get("first_ms"), ".0f"),
        _number(row.get("again_ms"), ".0f"),
        _number(row.get("largest_gap_ms"), ".0f"),
    ]


def _speed(row: Figures) -> str:
    if "skipped" in row:
        return "skipped"
    if "error" in row and "ms_per_token" not in row:
        return "failed"
    return _number(row.get("ms_per_token"), ".2f")


def _number(value: float | None, form: str) -> str:
    return "–" if value is None else f"{value:{form}}"


def _failure(row: Figures) -> str | None:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    return row["error"].replace("|", "/").replace("\n", " ") if "error" in row else None
