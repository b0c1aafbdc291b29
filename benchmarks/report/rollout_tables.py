"""Tables of rollouts: acts on weights, samples with logprobs, and deterministic engines."""

from collections.abc import Iterator

from benchmarks.report.table import COMMIT, Figures, Table, results

Rows = Iterator[Figures]

ACTS = {
    "update_device": "`update_weights` from device arrays",
    "update_host": "`update_weights` from NumPy arrays",
    "sleep_1": "`sleep(1)`, weights to the host",
    "after_sleep_1": "`wake_up()` after it",
    "after_sleep_2": "`wake_up()` after `sleep(2)`, without weights",
}


def weight_updates(figures: Figures) -> Rows:
    """Yield a row per act on the weights of a running engine."""
    for case in results(figures):
        if case["part"] == "weights":
            for key, act in ACTS.items():
                yield case | {
                    "act": f"{case['size']}, {case['weight_gb']:.1f} GB: {act}",
                    "ms": case[f"{key}_ms"],
                    "pause_ms": case.get(f"{key}_pause_ms"),
                }


def rollout_samples(figures: Figures) -> Rows:
    """Yield a row without logprobs, and one with them."""
    for case in results(figures):
        if case["part"] == "samples":
            sizes = f"{case['prompts']} x {case['samples']} x {case['tokens']}"
            name = f"{case['size']}, {sizes}, {case['drafts']}"
            for key, logprobs in (("", "none"), ("logprobs_", "of the sampled token")):
                rate = case[f"{key}tokens_per_second"]
                yield case | {"name": name, "logprobs": logprobs, "rate": rate}


def deterministic(figures: Figures) -> Rows:
    """Yield a row per number of rows, of an engine with the option and one without."""
    beside: dict[tuple[str, int], dict[bool, Figures]] = {}
    for case in results(figures):
        beside.setdefault((case["size"], case["drafts"]), {})[case["deterministic"]] = case
    for (size, drafts), cases in beside.items():
        for key in cases[True] if len(cases) == 2 else ():
            if key.startswith("ms_per_token_"):
                ms = [cases[option][key] for option in (False, True)]
                name = f"{size}, {drafts}, {key.removeprefix('ms_per_token_')}"
                yield cases[True] | {"name": name, "ms": ms, "cost": ms[1] / ms[0] - 1}


TABLES = {
    "weight updates": Table(
        "rollouts_h200.json",
        weight_updates,
        ("act", "{act}"),
        ("ms", "{ms:,.0f}"),
        ("ms without a step", "{pause_ms:,.0f}"),
        COMMIT,
    ),
    "rollout samples": Table(
        "rollouts_h200.json",
        rollout_samples,
        ("prompts x samples x tokens, drafts", "{name}"),
        ("logprobs", "{logprobs}"),
        ("tokens a second", "{rate:,.0f}"),
        COMMIT,
    ),
    "deterministic": Table(
        "deterministic_h200.json",
        deterministic,
        ("model, drafts, rows", "{name}"),
        ("ms per token without the option", "{ms[0]:.2f}"),
        ("with it", "{ms[1]:.2f}"),
        ("longer by", "{cost:.0%}"),
        COMMIT,
    ),
}
