"""jaxspec beside vLLM: README's table and picture, and the table of traffic measured by hand."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.report.markdown_table import markdown
from benchmarks.report.traffic_tables import ROWS, is_all_at_once, options_of, work_of

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "against_vllm.svg"
Figures = dict[str, Any]

# Cases of decode_h200.json: shape, rows, dtype of recurrent states, decode steps a dispatch.
CASES = [
    *(("qwen3.5-0.8b", rows, "float32", 16) for rows in (1, 8, 64)),
    ("qwen3.5-9b", 1, "float32", 8),
    ("qwen3.5-9b", 8, "float32", 8),
    ("qwen3.5-9b", 64, "float16", 8),
]
DRAFTS = 3


class Load(NamedTuple):
    """Requests that both engines were sent at once, and where vLLM's file tells of them."""

    lengths: str
    requests: int
    words: str
    part: str
    key: str
    our_key: str  # in traffic.py's
    unit: str
    form: str


LOADS = [
    Load("512x256", 64, "equal", "equal", "ms_per_token", "ms_per_token", "ms per token", ".2f"),
    Load(
        "trace",
        256,
        "unequal",
        "trace",
        "tokens_per_second",
        "output_tokens_per_second",
        "tokens per second",
        ",.0f",
    ),
]


def table(decode: Figures, peer: Figures, peer_traffic: Figures, *traffic: Figures) -> str:
    """Return README's table: a row per case with its best settings, then rows with defaults."""
    lines = []
    for (shape, rows, *_), ours, theirs in _measured(decode, peer):
        work = f"{_size(shape)}, {rows} request" + "s" * (rows > 1)
        vllm, best, gain = _compared(theirs, ours, ".2f", less=True)
        lines.append([work, "ms per token", vllm, best, "–", gain])
    size = _size(peer_traffic["shape"])
    for load in LOADS:
        former = {
            (x["engine"], x.get("setting")): x[load.key]
            for x in peer_traffic[load.part]["results"]
            if x.get("rows", ROWS) == ROWS
        }
        newer = _by_defaults(load, f"{size}, {load.lengths}", peer_traffic["device"], traffic)
        ours, date = newer or (former["jaxspec", "defaults"], peer_traffic["date"])
        less = load.key == "ms_per_token"
        vllm, defaults, gain = _compared(former["vllm", None], ours, load.form, less=less)
        work = f"{size}, {load.requests} requests of {load.words} lengths"
        lines.append([work, load.unit, vllm, "–", f"{defaults} ({date})", gain])
    head = ["model, work", "unit", "vLLM", "jaxspec, best settings", "jaxspec, defaults", "gain"]
    return markdown(head, lines)


def _by_defaults(
    load: Load, work: str, device: str, traffic: Sequence[Figures]
) -> tuple[float, str] | None:
    """What `traffic.py` measured of the load on the peer's card with the drafts alone by hand."""
    for figures in traffic:
        for case in figures["results"]:
            is_load = work_of(case) == work and case["requests"] == load.requests
            is_alike = case["rows"] == ROWS and not options_of(case)
            if figures["device"] == device and is_load and is_alike and is_all_at_once(case):
                return case[load.our_key], case["date"]
    return None


def traffic_by_hand(figures: Figures) -> str:
    """What was measured at one commit, of vLLM too, with defaults and settings chosen by hand."""
    lines = []
    for work, key, form in (
        ("equal", "ms_per_token", ".2f"),
        ("trace", "tokens_per_second", ",.0f"),
    ):
        for case in figures[work]["results"]:
            requests = (
                "256 of unequal lengths" if work == "trace" else f"{case['rows']} x (512, 256)"
            )
            engine = "vLLM" if case["engine"] == "vllm" else f"jaxspec, {case['setting']}"
            unit = "tokens per second" if work == "trace" else "ms per token"
            lines.append([requests, engine, f"{case[key]:{form}}", unit])
    for case in figures["long"]["results"]:
        if "tokens_per_second" in case:
            requests = f"{case['requests']} x (8192, 1024), {case['rows']} rows"
            engine = f"jaxspec, by hand, {case['drafts']} drafts"
            speed = f"{case['tokens_per_second']:,}"
            lines.append([requests, engine, speed, "tokens per second, in and out"])
    return markdown(["requests (tokens in, out)", "engine", "speed", "unit"], lines)


def _measured(decode: Figures, peer: Figures) -> list[tuple[Any, float, float]]:
    """Each of `CASES` with our milliseconds a token and vLLM's."""
    keys = "shape", "rows", "state_dtype", "steps_per_dispatch"
    ours = {
        tuple(x[key] for key in keys): x["ms_per_token"]
        for x in decode["results"]
        if x["drafts"] == DRAFTS and x["prompt"] == peer["prompt"]
    }
    theirs = {
        (x["shape"], x["rows"]): x["ms_per_token"] for x in peer["results"] if x["drafts"] == DRAFTS
    }
    return [(case, ours[case], theirs[case[:2]]) for case in CASES]


def _size(shape: str) -> str:
    return shape.removeprefix("qwen3.5-").upper()


def _compared(theirs: float, ours: float, form: str, *, less: bool) -> list[str]:
    """Both, and how many times better ours is; `less`: less is better."""
    gain = theirs / ours if less else ours / theirs
    return [f"{theirs:{form}}", f"{ours:{form}}", f"{gain:.2f}x"]


def picture(decode: Figures, peer: Figures, path: Path) -> None:
    """Bars of milliseconds a token, a pair for each of `CASES`, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    measured = _measured(decode, peer)
    with plt.rc_context({"svg.hashsalt": "jaxspec", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(7, 2.8), layout="constrained")
        for offset, engine, colour, column in (
            (-0.2, "vLLM 0.25.1", "#b0b0b0", 2),
            (0.2, "jaxspec", "#3b6fb6", 1),
        ):
            heights = [row[column] for row in measured]
            bars = axes.bar(
                [i + offset for i in range(len(measured))],
                heights,
                0.38,
                color=colour,
                label=engine,
            )
            axes.bar_label(bars, [f"{x:.2f}" for x in heights], padding=1, fontsize=7)
        names = [f"{_size(case[0])}\n{case[1]} row" + "s" * (case[1] > 1) for case, *_ in measured]
        axes.set_xticks(range(len(measured)), names)
        axes.set_ylabel("milliseconds a token and row")
        axes.set_title("Decoding with 3 drafts, one H200, bfloat16: less is better", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def main() -> None:
    """Draw the picture anew."""
    parser = argparse.ArgumentParser(description="Draws README's picture of jaxspec beside vLLM.")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    args = parser.parse_args()
    names = "decode_h200.json", "peer_h200.json"
    decode, peer = (json.loads((RESULTS / name).read_text()) for name in names)
    picture(decode, peer, args.picture)


if __name__ == "__main__":
    main()
