"""Tables of what `serving.py` measures: what a server costs, and its host at many streams."""

from typing import Any

from benchmarks.report.markdown_table import markdown
from benchmarks.report.traffic_tables import options_of, work_of

NONE_YET = "Not measured yet."
Figures = dict[str, Any]


def beside_llm(*files: Figures) -> str:
    """Tokens a second and waits, through HTTP and by `LLM` in process."""
    lines = []
    for case in _of_part("throughput", files):
        llm, http = case["llm"], case["http"]
        speeds = [f"{way['output_tokens_per_second']:,.0f}" for way in (llm, http)]
        share = f"{case['of_llm']:.1%} ({case['of_llm_least']:.1%} to {case['of_llm_most']:.1%})"
        waits = [
            ", ".join(_time(way, name, ",.1f") for way in (llm, http)) for name in ("ttft", "gap")
        ]
        busy = http["processors"]
        processors = [f"{busy[name]:.0%}" for name in ("server", "event_loop", "generator")]
        lines.append([*_about(case), *speeds, share, *waits, *processors, case["commit"]])
    head = ["requests", "options", "`LLM`: tokens a second", "HTTP", "of `LLM`"]
    head += ["ms to the first token (p99): `LLM`, HTTP", "ms of a gap (p99): `LLM`, HTTP"]
    head += ["processors of the server", "its event loop", "what asks it", "commit"]
    return markdown(head, lines) if lines else NONE_YET


def first_token(*files: Figures) -> str:
    """Milliseconds to the first token of a request that is alone."""
    lines = []
    for case in _of_part("first-token", files):
        times = [_time(case, way) for way in WAYS]
        lines.append([*_about(case), *times, f"{case['overhead_ms']:.2f}", case["commit"]])
    head = ["requests", "options", "`LLM`: ms to the first token (p99)", "HTTP (p99)", "more"]
    return markdown([*head, "commit"], lines) if lines else NONE_YET


def streams(*files: Figures) -> str:
    """The host's stages in each step, and how late and busy the event loop is."""
    lines = []
    for case in _of_part("streams", files):
        speed = f"{case['output_tokens_per_second']:,.0f}"
        times = [_time(case, name) for name in STAGES]
        processors = [f"{case['processors'][name]:.0%}" for name in PROCESSORS]
        lines.append([*_about(case), speed, *times, *processors, case["commit"]])
    head = ["requests", "options", "tokens a second", "ms to plan a step (p99)", "to dispatch it"]
    head += ["to collect it", "to hand it on", "the event loop's lag", "a gap"]
    head += ["processors of the server", "its event loop", "its engine's thread", "what asks it"]
    return markdown([*head, "commit"], lines) if lines else NONE_YET


WAYS = "llm", "http"
STAGES = "plan", "dispatch", "collect", "between", "loop_lag", "gap"
PROCESSORS = "server", "event_loop", "engine", "generator"


def _of_part(part: str, files: tuple[Figures, ...]) -> list[Figures]:
    return [case for file in files for case in file["results"] if case["part"] == part]


def _time(case: Figures, name: str, form: str = ".2f") -> str:
    # Without two portions of one answer no gap was measured.
    if f"{name}_ms_p50" not in case:
        return "–"
    return f"{case[f'{name}_ms_p50']:{form}} ({case[f'{name}_ms_p99']:{form}})"


def _about(case: Figures) -> list[str]:
    options = [f"max_num_seqs={case['rows']}", *options_of(case)]
    if case.get("switch_ms") is not None:
        options.append(f"sys.setswitchinterval({case['switch_ms'] / 1000:g})")
    if case.get("api_processes", 1) > 1:
        options.append(f"--api-processes {case['api_processes']}")
    load = f"{work_of(case)}, {case['at_once']} at a time"
    return [load, ", ".join(f"`{option}`" for option in options)]
