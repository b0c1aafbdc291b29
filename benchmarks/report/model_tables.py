"""Tables of the embedded model, of a model of the package index, and of the acceptance run."""

import json
import textwrap
from collections.abc import Iterator

from benchmarks.report.table import MISSING, Column, Figures, Table, plural

Rows = Iterator[Figures]
ACCEPTED = "acceptance_h200.json"

# The embedded model and a model of the package index


def first_command(figures: Figures) -> Rows:
    for name, start in (("empty", "cold"), ("filled", "warm")):
        yield {"cache": name, **figures[start]}


def acceptance(figures: Figures) -> Rows:
    """Yield a row per method and its options; `at` has a result per temperature."""
    ways: dict[tuple[str, ...], dict[float, Figures]] = {}
    for result in figures["results"]:
        is_drawn = result.get("draft_sample_method") == "probabilistic"
        kind = "greedy"
        if is_drawn:
            kind = f"drawn, {result.get('rejection_sample_method', 'standard')}"
        kind += ", scored in 8 bits" * ("draft_head_dtype" in result)
        way = result["method"], str(result["num_speculative_tokens"]), kind
        ways.setdefault(way, {})[result["temperature"]] = result
    for (method, drafts, kind), at in ways.items():
        ordered = [at.get(each, {}) for each in temperatures(figures)]
        yield {"method": method, "drafts": drafts, "kind": kind, "at": ordered}


def temperatures(figures: Figures) -> list[float]:
    return sorted({result["temperature"] for result in figures["results"]})


def ab(figures: Figures) -> Rows:
    for result in figures["results"]:
        params = result["params"]
        words = [f"temperature {params['temperature']:g}" if params["temperature"] else "greedy"]
        if "stop" in params:
            words.append(f"stop string {json.dumps(params['stop'])}")
        if "stop_token_ids" in params:
            words.append(f"stop id {params['stop_token_ids'][0]}")
        yield result | {"name": ", ".join(words)}


def decoding(figures: Figures) -> Rows:
    cases = figures["greedy"]
    speeds = [case["tokens_per_second"] for case in cases if case["engine"] == "transformers"]
    for case in cases:
        ratio = case["tokens_per_second"] / max(speeds) if speeds else None
        name = _engine(case, f"{case.get('drafts')} drafts")
        yield case | {"name": name, "ratio": ratio, "prompts": figures["prompts"]}


def real_model_decoding(figures: Figures) -> Rows:
    """Yield a row per engine; without ratios, which a busy machine distorts."""
    for case in figures["decoding"]:
        drafts = f"{case['drafts']} n-gram drafts" if case.get("drafts") else "no drafts"
        yield case | {"name": _engine(case, drafts), "prompts": figures["prompts"]}


def _engine(case: Figures, drafts: str) -> str:
    if case["engine"] == "transformers":
        return f"transformers, {plural(case['threads'], 'thread')}"
    return f"jaxspec, {drafts}"


def real_model_acceptance(figures: Figures) -> Rows:
    for case in figures["acceptance"]:
        name = "all" if case["prompts"] == "all" else f"{case['count']} {case['prompts']}"
        yield case | {"name": name}


def drafts(figures: Figures) -> Rows:
    for cases in (figures["greedy"], figures["sampled"]):
        plain, drafted = (case for case in cases if case["engine"] == "jaxspec")
        ratio = drafted["tokens_per_second"] / plain["tokens_per_second"]
        yield {"plain": plain, "drafted": drafted, "ratio": ratio}


def scaling(figures: Figures) -> Rows:
    by_rows: dict[int, dict[int, Figures]] = {}
    for case in figures["scaling"]:
        by_rows.setdefault(case["rows"], {})[case["drafts"]] = case
    return ({"rows": rows, "at": at} for rows, at in by_rows.items())


# The acceptance run

SHORT_TABLE = "greedy", "published defaults", "all in each request", "the three in one batch"
OTHER_PARTS = {  # formats of the values of other parts
    "ms_per_token": "{:.2f} ms per token",
    "generations": "{:,} generations",
    "identical": "{:,} identical",
    "ties": "{:,} ties",
    "differing": "{:,} different",
    "drafts_accepted": "{:,} drafts accepted",
    "largest_difference": "largest difference of log-probabilities {:.1e}",
    "mean_difference": "{:.1e} on average",
    "held_error": "error of a log-probability {:.4f}",
    "dequantised_error": "{:.4f} dequantised",
    "prompt_tokens": "{:,} prompt tokens",
    "cached_tokens": "{:,} found the third time",
    "in_turn": "{:,} found in the next turn",
    "tokens_before": "moved after {:,} tokens",
    "tokens_of_old": "updated after {:,} tokens",
    "tokens_awake": "slept after {:,} tokens",
    "same_tokens": "same tokens: {}",
    "clients": "{} clients",
    "tokens_per_second": "{:,.0f} tokens per second",
    "first_ms": "{:.0f} ms first",
    "again_ms": "{:.0f} ms again",
    "from_host_ms": "{:.0f} ms from the host",
    "from_device_ms": "{:.0f} ms from the device",
    "sleep_ms": "{:.0f} ms to sleep",
    "wake_ms": "{:.0f} ms to wake up",
    "first_token_ms": "{:.0f} ms to the last first token",
    "largest_gap_ms": "largest gap {:.0f} ms",
    "ready_seconds": "ready in {:.0f} s",
}


def accepted_models(figures: Figures) -> Rows:
    without = _by_feature(figures, "without drafts")
    for model, rows in _by_feature(figures, "features").items():
        speeds = [rows.get(name, {}) for name in SHORT_TABLE]
        speeds.append(without.get(model, {}).get("greedy", {}))
        waits, gaps, compiled = (
            [row[key] for row in rows.values() if key in row]
            for key in ("first_ms", "largest_gap_ms", "compiled_in_calls")
        )
        yield {
            "model": model,
            "ready": rows.get("ready", {}).get("ready_seconds"),
            "speeds": [_accepted_speed(row) for row in speeds],
            "first": max(waits, default=None),
            "gap": max(gaps, default=None),
            "compiled": sum(compiled) if compiled else None,
        }


def accepted_features(figures: Figures) -> Rows:
    """Yield a row per feature; `of` has a result per model of `models_with_all`."""
    found = _by_feature(figures, "features")
    models = [found[model] for model in models_with_all(figures)]
    for name in dict.fromkeys(name for rows in models for name in rows if name != "ready"):
        cells = []
        for rows in models:
            row = rows.get(name, {})
            of_greedy = {}
            greedy = rows.get(SHORT_TABLE[0], {}).get("ms_per_token")
            if greedy and row.get("ms_per_token"):
                of_greedy["of_greedy"] = row["ms_per_token"] / greedy
            cells.append(row | {"speed": _accepted_speed(row)} | of_greedy)
        yield {"name": name, "of": cells}


def models_with_all(figures: Figures) -> list[str]:
    found = _by_feature(figures, "features")
    return [model for model, rows in found.items() if len(rows) > 1 + len(SHORT_TABLE)]


def accepted_parts(figures: Figures) -> Rows:
    for row in figures["results"]:
        is_feature = row["part"] in ("features", "without drafts")
        if is_feature or row["feature"] in ("ready", "part", "all"):
            continue
        measured = [form.format(row[key]) for key, form in OTHER_PARTS.items() if key in row]
        yield row | {"result": _failure(row) or ", ".join(measured)}


def not_accepted(figures: Figures) -> Rows:
    return (row | {"why": why} for row in figures["results"] if (why := _failure(row)))


def _by_feature(figures: Figures, part: str) -> dict[str, dict[str, Figures]]:
    found: dict[str, dict[str, Figures]] = {}
    for row in figures["results"]:
        if row["part"] == part and row["feature"] not in ("part", "all"):
            found.setdefault(row["model"], {})[row["feature"]] = row
    return found


def _accepted_speed(row: Figures) -> str:
    if "skipped" in row:
        return "skipped"
    if "ms_per_token" in row:
        return f"{row['ms_per_token']:.2f}"
    return "failed" if "error" in row else MISSING


def _failure(row: Figures) -> str | None:
    if "skipped" in row:
        return f"skipped: {row['skipped']}"
    error = row.get("error", "").replace("|", "/").replace("\n", " ")
    return textwrap.shorten(error, 160, placeholder=" ...") or None


def _acceptance_columns(figures: Figures) -> list[Column]:
    columns = [("method", "`{method}`"), ("drafts", "{drafts}"), ("drafts are", "{kind}")]
    for i, temperature in enumerate(temperatures(figures)):
        columns += [
            (f"tokens a step at {temperature:g}", f"{{at[{i}][tokens_per_step]:.2f}}"),
            ("steps with drafts", f"{{at[{i}][share_of_steps_with_drafts]:.0%}}"),
        ]
    return columns


def _real_model_columns(figures: Figures) -> list[Column]:
    count = figures["drafts"]["num_speculative_tokens"]
    return [
        ("prompts", "{name}"),
        ("tokens", "{tokens:,}"),
        ("tokens a step", "{tokens_per_step:.2f}"),
        ("steps with drafts", "{share_of_steps_with_drafts:.0%}"),
        ("tokens a step with drafts", "{tokens_per_verify:.2f}"),
        *((f"draft {i + 1} stood", f"{{acceptance_by_position[{i}]:.0%}}") for i in range(count)),
    ]


def _feature_columns(figures: Figures) -> list[Column]:
    columns = [("requests", "{name}")]
    for i, model in enumerate(models_with_all(figures)):
        columns += [
            (f"{model}: ms per token", f"{{of[{i}][speed]}}"),
            ("of greedy", f"{{of[{i}][of_greedy]:.2f}}"),
            ("first request, ms", f"{{of[{i}][first_ms]:.0f}}"),
            ("next one", f"{{of[{i}][again_ms]:.0f}}"),
            ("gap, ms", f"{{of[{i}][largest_gap_ms]:.0f}}"),
        ]
    return columns


ENGINES = [
    ("tokens per second, 0 drafts", "{at[0][tokens_per_second]:.0f}"),
    ("ms a step", "{at[0][ms_per_step]:.2f}"),
    ("3 drafts", "{at[3][tokens_per_second]:.0f}"),
    ("ms a step", "{at[3][ms_per_step]:.2f}"),
]
PART = ("model", "{model}"), ("part", "{part}"), ("what", "{feature}")


def full_size(figures: Figures) -> Rows:
    """Yield a row per model and number of GPUs, with the figures of both ways to share experts."""
    for case in figures["results"]:
        if case["whole_experts"]:
            continue
        same = "model", "devices"
        whole = next(
            (
                other
                for other in figures["results"]
                if other["whole_experts"] and all(other[name] == case[name] for name in same)
            ),
            {},
        )
        if whole:
            case |= {"whole_weights": whole["weight_bytes"] / 2**30}
        yield case | {
            "weights": case["weight_bytes"] / 2**30,
            "bits": 8 if case["bits_8"] else 16,
            "token": case["token_bytes"] / 2**10,
            "state": case["request_bytes"] / 2**20,
            "floors": list(case["floor_ms"].values()),
        }


TABLES = {
    "full size": Table(
        "full_size.json",
        full_size,
        ("model", "{model}"),
        ("bits of weights", "{bits}"),
        ("GPUs", "{devices}"),
        ("GiB of weights on each: by width", "{weights:.1f}"),
        ("whole experts", "{whole_weights:.1f}"),
        ("KiB per token", "{token:.1f}"),
        ("MiB per request", "{state:.1f}"),
        ("requests of 8,192 tokens", "{requests:,}"),
        ("ms per token at least: 1 request", "{floors[0]:.2f}"),
        ("64 requests", "{floors[1]:.2f}"),
    ),
    "first command": Table(
        "first_command_cpu.json",
        first_command,
        ("compile cache", "{cache}"),
        ("seconds to the first character", "{first_character_seconds}"),
        ("seconds in all", "{seconds}"),
        ("MB at the peak", "{peak_memory_mb}"),
    ),
    "acceptance": Table("acceptance_cpu.json", acceptance, columns_of=_acceptance_columns),
    "decoding": Table(
        "cpu_decoding.json",
        decoding,
        ("greedy, 1 row", "{name}"),
        ("tokens per second", "{tokens_per_second:.0f}"),
        (
            "(least to most)",
            "{tokens_per_second_least:.0f} to {tokens_per_second_most:.0f}",
        ),
        ("times transformers", "{ratio:.1f}"),
        ("same ids", "{same_ids} of {prompts}"),
    ),
    "drafts": Table(
        "cpu_decoding.json",
        drafts,
        ("temperature", "{plain[temperature]:g}"),
        ("tokens per second, 0 drafts", "{plain[tokens_per_second]:.0f}"),
        ("3 drafts", "{drafted[tokens_per_second]:.0f}"),
        ("ratio", "{ratio:.2f}"),
        ("tokens per verify", "{drafted[tokens_per_verify]:.2f}"),
    ),
    "scaling": Table("cpu_decoding.json", scaling, ("rows", "{rows}"), *ENGINES),
    "a/b": Table(
        "ab_h200.json",
        ab,
        ("tokens", "{name}"),
        ("generations", "{generations:,}"),
        ("identical", "{identical:,}"),
        ("ties", "{ties:,}"),
        ("different", "{differing:,}"),
        ("ended by a stop", "{ended_by_stop:,}"),
        ("short", "{short:,}"),
        ("short with drafts alone", "{short_with_drafts_alone:,}"),
    ),
    "real model": Table(
        "real_model_cpu.json",
        real_model_decoding,
        ("greedy, 1 request", "{name}"),
        ("tokens per second", "{tokens_per_second:.1f}"),
        ("same ids", "{same_ids} of {prompts}"),
    ),
    "n-gram drafts of a real model": Table(
        "real_model_cpu.json", real_model_acceptance, columns_of=_real_model_columns
    ),
    "accepted models": Table(
        ACCEPTED,
        accepted_models,
        ("model", "{model}"),
        ("ready, s", "{ready:.0f}"),
        ("ms per token: greedy", "{speeds[0]}"),
        ("published defaults", "{speeds[1]}"),
        ("all features", "{speeds[2]}"),
        ("the three mixed", "{speeds[3]}"),
        ("greedy, no drafts", "{speeds[4]}"),
        ("longest first request, ms", "{first:.0f}"),
        ("largest gap, ms", "{gap:.0f}"),
        ("programs that a request waited for", "{compiled:d}"),
    ),
    "accepted features": Table(ACCEPTED, accepted_features, columns_of=_feature_columns),
    "accepted parts": Table(ACCEPTED, accepted_parts, *PART, ("result", "{result}")),
    "not accepted": Table(ACCEPTED, not_accepted, *PART, ("why", "{why}"), empty="Nothing."),
}
