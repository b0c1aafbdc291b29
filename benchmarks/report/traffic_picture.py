"""The picture of docs/traffic.md: tokens a second against the time that a user waits for each."""

import argparse
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.report.traffic_tables import by_load, card_of, is_all_at_once, options_of, work_of

RESULTS = Path(__file__).parents[1] / "results"
PICTURE = Path(__file__).parents[2] / "docs" / "pictures" / "traffic.svg"
COLOURS = ["#3b6fb6", "#e08a2e", "#3a9d5d", "#8a4fa3", "#b0413e", "#4f8a8b"]
FEWEST = 8  # requests at a time whose number stands at the point
Figures = dict[str, Any]
Point = tuple[float, float, str]  # ms per token, tokens a second, how many at a time


def curves(cards: Sequence[Figures]) -> dict[str, list[Point]]:
    """For each lengths and card the loads that keep so many requests there, without an option.

    A request that waits for a row says nothing of how fast rows are, so there are as many rows. Of
    two engines that have room the one with fewer rows counts.
    """
    found: dict[str, dict[int, Point]] = {}
    for name, case in _by_defaults(cards):  # by numbers of requests, then of rows
        at_once = case["at_once"]
        if at_once and not is_all_at_once(case) and at_once <= case["rows"]:
            point = _point(case, str(at_once) if at_once >= FEWEST else "")
            found.setdefault(name, {}).setdefault(at_once, point)
    return {name: list(points.values()) for name, points in found.items()}


def batches(cards: Sequence[Figures]) -> dict[str, list[Point]]:
    """Likewise the loads that come all at once."""
    found: dict[str, list[Point]] = {}
    for name, case in _by_defaults(cards):
        if is_all_at_once(case):
            found.setdefault(name, []).append(_point(case, f"all {case['requests']}"))
    return found


def picture(cards: Sequence[Figures], peer: Figures, path: Path) -> None:
    """A line for each of `curves`, a diamond for each batch, and what vLLM reached, as SVG."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    lines, diamonds = curves(cards), batches(cards)
    names = dict.fromkeys([*lines, *diamonds])
    with plt.rc_context({"svg.hashsalt": "jaxspec", "font.size": 9}):
        figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
        for name, colour in zip(names, itertools.cycle(COLOURS), strict=False):
            for points, style in ((lines.get(name, []), "o-"), (diamonds.get(name, []), "D")):
                times, speeds = [[point[i] for point in points] for i in range(2)]
                axes.plot(times, speeds, style, color=colour, markersize=4)
                for time, speed, text in points:
                    axes.annotate(
                        text, (time, speed), (4, -9), textcoords="offset points", fontsize=7
                    )
            axes.plot([], [], "-", color=colour, label=name)
        for case in peer["trace"]["results"]:
            if case["engine"] == "vllm":
                label = f"vLLM, trace, all at once, {card_of(peer)}"
                axes.axhline(case["tokens_per_second"], color="#b0b0b0", ls="--", label=label)
        axes.set_xlim(left=0)
        axes.set_ylim(bottom=0)
        axes.set_xlabel("milliseconds per token of a request (mean): less is better")
        axes.set_ylabel("tokens a second out: more is better")
        axes.set_title("Requests at a time (lines) or all at once (diamonds)", fontsize=9)
        axes.spines[["top", "right"]].set_visible(False)
        figure.legend(loc="outside lower center", ncols=2, frameon=False, fontsize=7)
        figure.savefig(path, metadata={"Date": None})
        plt.close(figure)


def _by_defaults(cards: Sequence[Figures]) -> list[tuple[str, Figures]]:
    """Each result that was measured without an option, and has a time per token, by a name."""
    return [
        (f"{work_of(case)}, {card}", case)
        for card, case in by_load(cards)
        if not options_of(case) and "tpot_ms" in case
    ]


def _point(case: Figures, text: str) -> Point:
    return case["tpot_ms"], case["output_tokens_per_second"], text


def main() -> None:
    """Draw the picture anew."""
    parser = argparse.ArgumentParser(description="Draws the picture of docs/traffic.md.")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    args = parser.parse_args()
    cards = [json.loads(file.read_text()) for file in sorted(RESULTS.glob("traffic_h*.json"))]
    peer = json.loads((RESULTS / "traffic_peer_h200.json").read_text())
    picture(cards, peer, args.picture)


if __name__ == "__main__":
    main()
