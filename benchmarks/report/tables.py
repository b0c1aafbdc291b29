"""Writes the tables of figures in the documents from the files in benchmarks/results.

    python -m benchmarks.report.tables [--check] [DOCUMENT ...]

A table stands between `<!-- table: NAME -->` and `<!-- end -->`, each on a line of its own, and is
made here. `--check` changes nothing and exits with 1 if a table is not what its files say. A new
table is a function from what the files hold to text, and a line in TABLES.
"""

import argparse
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.report import (
    acceptance_tables,
    against_peer,
    decode_tables,
    draft_tables,
    prefill_tables,
    prefix_tables,
    ready_tables,
    real_model_tables,
    serving_tables,
    traffic_tables,
)
from benchmarks.report.markdown_table import markdown

RESULTS = Path(__file__).parents[1] / "results"
ROOT = Path(__file__).parents[2]
_DOCS = "measurements", "prefix-caching", "sampling", "serving", "speculation", "traffic"
DOCUMENTS = [ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in _DOCS)]
TRAFFIC = "traffic_h*.json"  # one for each card
SERVING = "serving_h*.json"  # likewise, and there may be none yet
PEER = "decode_h200.json", "peer_h200.json"
PEER_TRAFFIC = "traffic_peer_h200.json"
PREFIXES, AGENTS = "prefixes_h200.json", "prefixes_h100.json"
ACCEPTED = "acceptance_h200.json"
MODEL = "qwen3.5-9b"  # whose layers the kernels' table shows
SMALL = "qwen3.5-0.8b"  # likewise, of products, which are kernels in small models
MAMBA2 = "nemotron-3-nano"  # likewise, of Mamba2
MIXTURE = "qwen3.5-35b-a3b"  # likewise, of experts
Figures = dict[str, Any]


def first_command(figures: Figures) -> str:
    head = ["compile cache", "seconds to the first character", "seconds in all", "MB at the peak"]
    keys = ["first_character_seconds", "seconds", "peak_memory_mb"]
    starts = {"empty": figures["cold"], "filled": figures["warm"]}
    return markdown(
        head,
        ([name, *(str(start[key]) for key in keys)] for name, start in starts.items()),
    )


def acceptance(figures: Figures) -> str:
    """By method and its options, tokens a step at each temperature."""
    by_way: dict[tuple[str, ...], dict[float, Figures]] = {}
    for result in figures["results"]:
        drawn = result.get("draft_sample_method") == "probabilistic"
        kind = f"drawn, {result.get('rejection_sample_method', 'standard')}" if drawn else "greedy"
        kind += ", scored in 8 bits" * ("draft_head_dtype" in result)
        way = f"`{result['method']}`", str(result["num_speculative_tokens"]), kind
        by_way.setdefault(way, {})[result["temperature"]] = result
    temperatures = sorted({result["temperature"] for result in figures["results"]})
    heads = ["method", "drafts", "drafts are"]
    for temperature in temperatures:
        heads += [f"tokens a step at {temperature:g}", "steps with drafts"]
    return markdown(
        heads,
        (
            [*way]
            + [
                cell
                for temperature in temperatures
                for cell in (
                    f"{given[temperature]['tokens_per_step']:.2f}",
                    f"{given[temperature]['share_of_steps_with_drafts']:.0%}",
                )
            ]
            for way, given in by_way.items()
        ),
    )


def ab(figures: Figures) -> str:
    """Speculation against plain decoding, by how tokens were chosen and what ended the texts."""
    head = ["tokens", "generations", "identical", "ties", "different", "ended by a stop", "short"]
    keys = ["generations", "identical", "ties", "differing", "ended_by_stop", "short"]
    return markdown(
        [*head, "short with drafts alone"],
        (
            [
                _params_name(result["params"]),
                *(f"{result[key]:,}" for key in [*keys, "short_with_drafts_alone"]),
            ]
            for result in figures["results"]
        ),
    )


def _params_name(params: Figures) -> str:
    temperature = params["temperature"]
    words = [f"temperature {temperature:g}" if temperature else "greedy"]
    if "stop" in params:
        words.append(f"stop string {json.dumps(params['stop'])}")
    if "stop_token_ids" in params:
        words.append(f"stop id {params['stop_token_ids'][0]}")
    return ", ".join(words)


def decoding(figures: Figures) -> str:
    cases = figures["greedy"]
    yardstick = max(
        (case["tokens_per_second"] for case in cases if case["engine"] == "transformers"), default=0
    )
    return markdown(
        ["greedy, 1 row", "tokens per second", "(least to most)", "times transformers", "same ids"],
        (
            [
                _case_name(case),
                f"{case['tokens_per_second']:.0f}",
                f"{case['tokens_per_second_least']:.0f} to {case['tokens_per_second_most']:.0f}",
                f"{case['tokens_per_second'] / yardstick:.1f}" if yardstick else "–",
                f"{case['same_ids']} of {figures['prompts']}",
            ]
            for case in cases
        ),
    )


def _case_name(case: Figures) -> str:
    if case["engine"] == "transformers":
        return f"transformers, {case['threads']} thread" + "s" * (case["threads"] > 1)
    return f"jaxspec, {case['drafts']} drafts"


def drafts(figures: Figures) -> str:
    rows = []
    for cases in (figures["greedy"], figures["sampled"]):
        plain, drafted = (case for case in cases if case["engine"] == "jaxspec")
        speed = [case["tokens_per_second"] for case in (plain, drafted)]
        row = [f"{speed[0]:.0f}", f"{speed[1]:.0f}", f"{speed[1] / speed[0]:.2f}"]
        rows.append([f"{plain['temperature']:g}", *row, f"{drafted['tokens_per_verify']:.2f}"])
    head = ["temperature", "tokens per second, 0 drafts", "3 drafts", "ratio", "tokens per verify"]
    return markdown(head, rows)


def scaling(figures: Figures) -> str:
    by_rows: dict[int, list[str]] = {}
    for case in figures["scaling"]:
        row = by_rows.setdefault(case["rows"], [str(case["rows"])])
        row += [f"{case['tokens_per_second']:.0f}", f"{case['ms_per_step']:.2f}"]
    head = ["rows", "tokens per second, 0 drafts", "ms a step", "3 drafts", "ms a step"]
    return markdown(head, by_rows.values())


def step_gap(figures: Figures) -> str:
    by_depth: dict[tuple[int, int], dict[int, Figures]] = {}
    for case in figures["results"]:
        depths = by_depth.setdefault((case["rows"], case["drafts"]), {})
        depths[case["max_in_flight"]] = case
    rows = []
    for (batch, num_drafts), of in by_depth.items():
        times = of[0]["engine_ms"], of[2]["engine_ms"], of[2]["back_to_back_ms"], of[2]["host_ms"]
        rows.append([f"{batch}, {num_drafts}", *(f"{ms:.2f}" for ms in times)])
    engine = ["engine, `max_in_flight` 0", "engine, 2"]
    return markdown(["rows, drafts", *engine, "back to back", "host a step (2)"], rows)


def kernels(figures: Figures) -> str:
    """The shapes of one model, at two batch sizes and two widths; the file has the others.

    A prefill has its number of prompts, and the tokens of each. Products are another model's, at
    all sizes, Mamba2 is a third one's, and experts are a fourth one's, at all sizes.
    """
    rows = []
    for case in figures["results"]:
        number, width = case.get("rows"), case.get("width", 1)
        shown = number in (1, 64) and width in (1, 4)
        if "seqs" in case:
            number, width, shown = case["seqs"], case["length"], True
        op, model = f"`{case['op']}`", MODEL
        if "product" in case:
            op, model, shown = f"{op} ({case['product']} of the 0.8B)", SMALL, True
        if case["op"].startswith(("mamba2", "gated_group_norm")):
            model = MAMBA2
        if case["op"].startswith("moe"):
            model, shown = MIXTURE, True
        if case.get("model", model) != model or not shown:
            continue
        name = f"{op}, {case.get('dtype', 'int32')}, {number} x {width}"
        if "context" in case:
            name += f", context {case['context']}"
        if "window" in case:
            name += f", ring of {case['window']}"
        reference = f"{case['reference_us']:.1f}" if "reference_us" in case else "–"
        public = f"{case['public_us']:.1f}" if "public_us" in case else "–"
        rate = f"{case['of_copy']:.0%}" if "of_copy" in case else f"{case['tb_per_s']:.1f} TB/s"
        if "tflop_per_s" in case:
            rate = f"{case['tflop_per_s']:.0f} TFLOP/s"
        times = f"{case['us']:.1f}", reference, public, rate
        rows.append([name, *times])
    head = [
        "op, dtype, rows x tokens",
        "microseconds",
        "reference",
        "public Triton kernel",
        "of the copy bandwidth, or rate",
    ]
    return markdown(head, rows)


# Name: the function, and the files whose contents it takes; a pattern stands for all that match.
TABLES: dict[str, tuple[Callable[..., str], *tuple[str, ...]]] = {
    "against vLLM": (against_peer.table, *PEER, PEER_TRAFFIC, TRAFFIC),
    "first command": (first_command, "first_command_cpu.json"),
    "acceptance": (acceptance, "acceptance_cpu.json"),
    "decoding": (decoding, "cpu_decoding.json"),
    "drafts": (drafts, "cpu_decoding.json"),
    "scaling": (scaling, "cpu_decoding.json"),
    "a/b": (ab, "ab_h200.json"),
    "real model": (real_model_tables.decoding, "real_model_cpu.json"),
    "n-gram drafts of a real model": (real_model_tables.acceptance, "real_model_cpu.json"),
    "step gap": (step_gap, "step_gap_h200.json"),
    "ready": (ready_tables.ready, "ready_h200.json"),
    "accepted models": (acceptance_tables.models, ACCEPTED),
    "accepted features": (acceptance_tables.features, ACCEPTED),
    "accepted parts": (acceptance_tables.others, ACCEPTED),
    "not accepted": (acceptance_tables.failures, ACCEPTED),
    "decode": (decode_tables.decode, "decode_h200.json"),
    "draft counts": (draft_tables.draft_counts, "draft_counts_h200.json"),
    "sampling": (draft_tables.sampling, "sampling_h200.json"),
    "draft head": (decode_tables.draft_head, "draft_head_h100.json"),
    "prefill": (decode_tables.prefill, "decode_h200.json"),
    "traffic by hand": (against_peer.traffic_by_hand, PEER_TRAFFIC),
    "traffic": (traffic_tables.served, TRAFFIC),
    "time of traffic": (traffic_tables.spent, TRAFFIC),
    "serving": (serving_tables.beside_llm, SERVING),
    "serving: first token": (serving_tables.first_token, SERVING),
    "serving: streams": (serving_tables.streams, SERVING),
    "long prompts": (prefill_tables.prompts_alone, "prefill_h200.json"),
    "mixed steps": (prefill_tables.prompts_beside_rows, "prefill_h200.json"),
    "prefixes found": (prefix_tables.first_token, PREFIXES),
    "agents": (prefix_tables.agents, AGENTS),
    "prefixes not found": (prefix_tables.decode, PREFIXES),
    "copies of states": (prefix_tables.copies, PREFIXES),
    "loading": (prefill_tables.loading, "load_h200.json"),
    "start-up": (prefill_tables.start_up, "startup_h200.json"),
    "kernels": (kernels, "kernels_h200.json"),
}
PLACE = re.compile(r"<!-- table: (.*?) -->\n((?:(?!<!--).)*)<!-- end -->", re.DOTALL)


def filled(text: str, results: Path = RESULTS) -> str:
    """`text` with every table made anew.

    Raises:
        ValueError: a table without its end, a name that TABLES does not have, no file for it.
    """
    if len(PLACE.findall(text)) != text.count("<!-- table:"):
        raise ValueError("A line `<!-- table: NAME -->` has no `<!-- end -->` after its table.")

    def fill(place: re.Match[str]) -> str:
        name = place[1]
        if name not in TABLES:
            raise ValueError(f"There is no table {name!r}; known are {', '.join(TABLES)}.")
        table, *files = TABLES[name]
        contents = []
        for file in files:
            found = sorted(results.glob(file))
            if not found:
                raise ValueError(
                    f"Table {name!r} needs {results / file}: run its benchmark with --json."
                )
            contents += [json.loads(each.read_text()) for each in found]
        made = table(*contents)
        return f"<!-- table: {name} -->\n{made}\n<!-- end -->"

    return PLACE.sub(fill, text)


def main() -> None:
    """Write the tables of every document, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare only")
    parser.add_argument("documents", nargs="*", type=Path, default=DOCUMENTS, metavar="DOCUMENT")
    args = parser.parse_args()
    for document in args.documents:
        text = document.read_text()
        try:
            new = filled(text)
        except ValueError as error:
            sys.exit(f"{document}: {error}")
        if new != text and args.check:
            sys.exit(
                f"{document}: a table is not what {RESULTS} says. Run "
                "`python -m benchmarks.report.tables` to write it."
            )
        if new != text:
            document.write_text(new)


if __name__ == "__main__":
    main()
