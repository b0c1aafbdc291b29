"""Tables of what `decode.py` measures."""

from typing import Any

from benchmarks.measure.model_shapes import SHAPES
from benchmarks.report.markdown_table import markdown

PROMPT = 512  # tokens; with others prefill is measured
Figures = dict[str, Any]


def decode(figures: Figures) -> str:
    """A line for each shape, number of rows, dtype of states and number of steps a dispatch.

    Without drafts and with 3.
    """
    by_case: dict[tuple[str, int, str, int], dict[int, Figures]] = {}
    for case in _cases(figures):
        if case["prompt"] == PROMPT:
            name = case["shape"], case["rows"], case["state_dtype"], case["steps_per_dispatch"]
            by_case.setdefault(name, {})[case["drafts"]] = case
    lines = []
    for name in sorted(by_case, key=lambda name: (list(SHAPES).index(name[0]), *name[1:])):
        (shape, rows, dtype, steps), by_drafts = name, by_case[name]
        qwen = shape.removeprefix("qwen3.5-")
        size = shape if qwen == shape else qwen.upper()
        line = [f"{size}, {rows}, {dtype}" + f", {steps} steps" * (steps > 1)]
        for drafts in (0, 3):
            case = by_drafts.get(drafts)
            if case is None:
                line += ["–"] * 4
                continue
            ratio = f"{case['times_peer']:.2f}" if "times_peer" in case else "–"
            line += [f"{case['ms_per_token']:.2f}", ratio, f"{case['of_roofline']:.0%}"]
            line.append(case["commit"])
        lines.append(line)
    head = ["vLLM's over it", "of the roofline", "commit"]
    return markdown(["shape, rows, states", "0 drafts: ms", *head, "3 drafts: ms", *head], lines)


def prefill(figures: Figures) -> str:
    lines = {}
    for case in _cases(figures):
        usual = case["drafts"], case["state_dtype"], case["steps_per_dispatch"]
        if usual == (0, "float32", 1):
            name = f"{case['shape']}, {case['rows']} x {case['prompt']}"
            rate = f"{case['prefill_tokens_per_second'] / 1000:.1f}"
            lines[name] = [name, rate, f"{1000 * case['first_token_seconds']:.1f}"]
    head = ["shape, prompts x tokens", "thousand tokens a second", "ms to the first token (mean)"]
    return markdown(head, lines.values())


def draft_head(figures: Figures) -> str:
    """One pass over the output head and one of all steps, by what drafts are scored in."""
    passes = {(p["features"], p["ids"], p["rows"], p["head"]): p["us"] for p in figures["passes"]}
    steps = {result["head"]: result for result in figures["results"]}
    lines = [
        [f"a draft's scores: {features} features, {ids:,} ids, {rows} rows", "us", us, eight]
        for features, ids, rows, head in sorted(passes)
        if head == "bfloat16"
        for us, eight in [
            [passes[features, ids, rows, each] for each in ("bfloat16", "float8_e4m3fn")]
        ]
    ]
    full, eight = steps["bfloat16"], steps["float8_e4m3fn"]
    sizes = f"9B, {full['rows']} rows, {full['drafts']} drafts, {full['steps_per_dispatch']} steps"
    for name, key in (("a step", "ms_per_step"), ("a token", "ms_per_token")):
        lines.append([f"{name}: {sizes} a dispatch", "ms", full[key], eight[key]])
    head = ["work", "unit", "in bfloat16", "in 8 bits", "gain"]
    return markdown(
        head, ([work, unit, f"{a:.4g}", f"{b:.4g}", f"{a / b:.2f}x"] for work, unit, a, b in lines)
    )


def _cases(figures: Figures) -> list[Figures]:
    """The cases with those options that the text names and the tables do not show."""
    shown = {"dtype": "bfloat16", "state_policy": "replay", "kv_dtype": None, "max_in_flight": 2}
    return [x for x in figures["results"] if "error" not in x and shown.items() <= x.items()]
