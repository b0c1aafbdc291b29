"""Draws the pictures of the documents as SVG: README's bars beside vLLM, and docs/traffic.md's.

python -m benchmarks.report.pictures [--folder FOLDER]
"""

import argparse
import contextlib
import itertools
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.load_tables import (
    PEER,
    PEER_TRAFFIC,
    TRAFFIC,
    beside_peer,
    by_load,
    card_of,
    is_all_at_once,
    options_of,
    work_of,
)
from benchmarks.report.table import Figures, plural, size_of
from benchmarks.report.tables import RESULTS

FOLDER = Path(__file__).parents[2] / "docs" / "pictures"
COLORS = ["#3b6fb6", "#e08a2e", "#3a9d5d", "#8a4fa3", "#b0413e", "#4f8a8b"]
GRAY = "#b0b0b0"  # vLLM
FEWEST = 8  # requests at a time that are written at a point
Point = tuple[float, float, str]  # ms per token, tokens per second, requests at a time


@contextlib.contextmanager
def _axes(path: Path, height: float) -> Iterator[tuple[Any, Any]]:
    """Yield a figure and its axes, and write them to `path`."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    with plt.rc_context({"svg.hashsalt": "jaxspec", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(7, height), layout="constrained")
        yield figure, axes
        axes.spines[["top", "right"]].set_visible(False)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def against_vllm(decode: Figures, peer: Figures, path: Path) -> None:
    """Draw a pair of bars, in milliseconds per token, for each of `CASES`."""
    measured = beside_peer(decode, peer)
    with _axes(path, 2.8) as (_, axes):
        for offset, engine, color, column in (
            (-0.2, "vLLM 0.25.1", GRAY, 2),
            (0.2, "jaxspec", COLORS[0], 1),
        ):
            heights = [row[column] for row in measured]
            places = [i + offset for i in range(len(measured))]
            bars = axes.bar(places, heights, 0.38, color=color, label=engine)
            axes.bar_label(bars, [f"{x:.2f}" for x in heights], padding=1, fontsize=7)
        names = [f"{size_of(case[0])}\n{plural(case[1], 'row')}" for case, *_ in measured]
        axes.set_xticks(range(len(measured)), names)
        axes.set_ylabel("milliseconds a token and row")
        axes.set_title("Decoding with 3 drafts, one H200, bfloat16: less is better", fontsize=9)
        axes.legend(frameon=False)


def traffic(cards: Sequence[Figures], peer: Figures, path: Path) -> None:
    """Draw a line for each of `curves`, a diamond for each batch, and vLLM's speed."""
    lines, diamonds = curves(cards), batches(cards)
    names = dict.fromkeys([*lines, *diamonds])
    with _axes(path, 4) as (figure, axes):
        for name, color in zip(names, itertools.cycle(COLORS), strict=False):
            for points, style in ((lines.get(name, []), "o-"), (diamonds.get(name, []), "D")):
                times, speeds = [[point[i] for point in points] for i in range(2)]
                axes.plot(times, speeds, style, color=color, markersize=4)
                for time, speed, text in points:
                    place = {"xytext": (4, -9), "textcoords": "offset points"}
                    axes.annotate(text, (time, speed), **place, fontsize=7)
            axes.plot([], [], "-", color=color, label=name)
        for case in peer["trace"]["results"]:
            if case["engine"] == "vllm":
                label = f"vLLM, trace, all at once, {card_of(peer)}"
                axes.axhline(case["tokens_per_second"], color=GRAY, ls="--", label=label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("milliseconds per token of a request (mean): less is better")
        axes.set_ylabel("tokens a second out: more is better")
        axes.set_title("Requests at a time (lines) or all at once (diamonds)", fontsize=9)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)


def curves(cards: Sequence[Figures]) -> dict[str, list[Point]]:
    """Return the closed loads without options, by lengths and card.

    Requests that wait for a row would hide the speed of rows, so there are at least as many rows as
    requests at a time; of several such engines the one with the fewest rows counts.
    """
    found: dict[str, dict[int, Point]] = {}
    for name, case in _by_defaults(cards):  # by numbers of requests, then of rows
        at_once = case["at_once"]
        if at_once and not is_all_at_once(case) and at_once <= case["rows"]:
            point = _point(case, str(at_once) if at_once >= FEWEST else "")
            found.setdefault(name, {}).setdefault(at_once, point)
    return {name: list(points.values()) for name, points in found.items()}


def batches(cards: Sequence[Figures]) -> dict[str, list[Point]]:
    """Return the loads that are sent at once without options, by lengths and card."""
    found: dict[str, list[Point]] = {}
    for name, case in _by_defaults(cards):
        if is_all_at_once(case):
            found.setdefault(name, []).append(_point(case, f"all {case['requests']}"))
    return found


def _by_defaults(cards: Sequence[Figures]) -> list[tuple[str, Figures]]:
    return [
        (f"{work_of(case)}, {card}", case)
        for card, case in by_load(cards)
        if not options_of(case) and "tpot_ms" in case
    ]


def _point(case: Figures, text: str) -> Point:
    return case["tpot_ms"], case["output_tokens_per_second"], text


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    folder = parser.parse_args().folder

    def read(pattern: str) -> list[Figures]:
        return [json.loads(file.read_text()) for file in sorted(RESULTS.glob(pattern))]

    decode, peer, peer_traffic = (read(name)[0] for name in (*PEER, PEER_TRAFFIC))
    against_vllm(decode, peer, folder / "against_vllm.svg")
    traffic(read(TRAFFIC), peer_traffic, folder / "traffic.svg")


if __name__ == "__main__":
    main()
