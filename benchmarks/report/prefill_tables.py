"""Tables of what `prefill.py`, `startup.py` and `load.py` measure."""

from typing import Any

from benchmarks.report.markdown_table import markdown

USUAL = {
    "drafts": 0,
    "dtype": "bfloat16",
    "state_policy": "replay",
    "state_dtype": "float32",
    "kv_dtype": None,
    "max_in_flight": 2,
    "steps_per_dispatch": 1,
}
Figures = dict[str, Any]


def prompts_alone(figures: Figures) -> str:
    """A line for each number, length and chunk of prompts, with nothing else to do."""
    lines = []
    for case in _measured(figures):
        if case["rows"] == 0:
            name = f"{_model(case)}, {case['prompts']} x {case['prompt']}, {case['chunk']}"
            rate = f"{case['prefill_tokens_per_second'] / 1000:.1f}"
            first = f"{1000 * case['first_token_seconds']:.1f}"
            lines.append([name, rate, first, case["commit"]])
    head = ["thousand tokens a second", "ms to the first token (mean)", "commit"]
    return markdown(["shape, prompts x tokens, tokens a step", *head], lines)


def prompts_beside_rows(figures: Figures) -> str:
    """Rows that decode while prompts come, and while none does."""
    lines = []
    for case in _measured(figures):
        if case["rows"]:
            name = f"{_model(case)}, {case['rows']}, {case['chunk']}"
            line = [name, f"{case['prefill_tokens_per_second'] / 1000:.1f}"]
            for steps in (case["mixed"], case["unmixed"]):
                line.append(f"{steps['decode_tokens_per_second']:.0f}")
                line.append(f"{steps['ms_per_step']:.1f} ({steps['ms_per_step_p99']:.1f})")
            lines.append([*line, case["commit"]])
    columns = ["tokens decoded a second", "ms a step (99th percentile)"]
    head = [f"{column}, {when}" for when in ("mixed", "not mixed") for column in columns]
    head = ["shape, rows, tokens a chunk", "thousand prompt tokens a second", *head, "commit"]
    return markdown(head, lines)


def loading(figures: Figures) -> str:
    """A checkpoint's way to the device."""
    sizes = f"{figures['layers']} layers, {figures['gigabytes']:.1f} GB"
    line = [f"{_size(figures)}, {sizes}"]
    speeds = "dd_gigabytes_per_second", "gigabytes_per_second"
    line += [f"{figures[name]:.1f}" for name in speeds]
    line += [f"{100 * figures[name]:.0f}%" for name in ("of_dd", "again_of_dd")]
    held = "host_peak_gigabytes", "host_peak_allowed_gigabytes", "device_excess_gigabytes"
    line += [f"{figures[name]:.2f}" for name in held]
    head = ["`dd`: GB a second", "loading: GB a second", "of `dd`", "the second time"]
    head += ["GB held on the host", "that may be held", "GB on the device besides the weights"]
    return markdown(["checkpoint", *head, "commit"], [[*line, figures["commit"]]])


def start_up(figures: Figures) -> str:
    """Seconds of each start, whole and by part."""
    parts = ["import", "device", "load", "compile", "generate"]
    lines = []
    for case in _measured(figures):
        name = f"{_model(case)}, {case['rows']} rows: {case['start']}"
        seconds = [f"{case[part]:.1f}" for part in ("seconds", *parts)]
        lowered = f"{case['trace'] + case['lower']:.1f}"
        programs = f"{case['programs_from_disk']} of {case['programs']}"
        lines.append([name, *seconds, lowered, programs, case["commit"]])
    head = ["shape: start", "seconds to the first token", *parts]
    return markdown([*head, "traced and lowered", "programs from disk", "commit"], lines)


def _measured(figures: Figures) -> list[Figures]:
    return [case for case in figures["results"] if "error" not in case]


def _model(case: Figures) -> str:
    """A shape and what is unusual about how it ran: "9B, drafts 3"."""
    unusual = [f"{name} {case[name]}" for name, usual in USUAL.items() if case[name] != usual]
    return ", ".join([_size(case), *unusual])


def _size(case: Figures) -> str:
    return case["shape"].removeprefix("qwen3.5-").upper()
