"""Seconds from the start of a process to its first token, by what it finds on disk.

    python -m benchmarks.engine.startup --shape qwen3.5-9b [--drafts auto] [--json FILE]

A model with random weights, and every program that an engine with the default buckets needs. Each
start is a process of its own, and all share one folder of compiled programs:

* cold: the folder is empty.
* autotuned: the programs are taken out, what XLA's autotuner found is left, which is what serves
  programs that changed.
* warm: nothing is taken out.

The seconds of a start are those of its parts, one after the other: `import` (Python itself
included), `device` (until JAX has it), `load` (weights and caches), `compile` (all programs, side
by side) and `generate` (a prompt's first token). `trace` and `lower` lie within these: there JAX
writes programs out for XLA, in this process. Those on disk are read (`program_cache.py`), and other
processes may have put them there meanwhile (`trace_processes.py`).
"""

import argparse
import contextlib
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import jax

from benchmarks.engine import dummy_llm, traffic
from benchmarks.engine.dummy_llm import Figures, timed
from benchmarks.measure import record
from benchmarks.report import tables
from jaxspec import LLM
from jaxspec.pallas import dispatch
from jaxspec.requests.sampling_features import SAMPLERS

STARTS = ("cold", "autotuned", "warm")
DURATIONS = {
    "/jax/core/compile/jaxpr_trace_duration": "trace",
    "/jax/core/compile/jaxpr_to_mlir_module_duration": "lower",
}
COUNTS = {
    "/jax/compilation_cache/compile_requests_use_cache": "programs",
    "/jax/compilation_cache/cache_hits": "programs_from_disk",
}
AUTOTUNER = "xla_gpu_per_fusion_autotune_cache_dir"  # JAX's name for its folder in the cache


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case(dummy_llm.Case):
    """Fields that identify a result."""

    steps_per_dispatch: int | None  # None: the default
    start: str = STARTS[0]
    rows: int
    max_model_len: int
    step_tokens: int | None  # verified and prefilled; None: the default
    variants: list[str]
    prompt: int


def started(case: Case, folder: Path) -> Figures:
    """Measure the start of a new process with the same options and the programs in `folder`."""
    programs = [*folder.glob("*-cache"), *folder.glob("jaxspec-programs/*")]
    if case.start == "cold" and programs:
        raise SystemExit(f"A cold start needs an empty folder, and {folder} has programs.")
    if case.start == "autotuned":
        for program in programs:
            program.unlink()
    begun = ["--begun", str(time.monotonic()), "--compilation-cache", str(folder)]
    figures = json.loads(new_process([*sys.argv[1:], *begun]))
    files = [file for file in folder.rglob("*") if file.is_file()]
    return figures | {
        "autotuner_files": sum(AUTOTUNER in file.parts for file in files),
        "cache_bytes": sum(file.stat().st_size for file in files),
    }


def new_process(arguments: list[str]) -> str:
    """Return the last line that this script prints in a new process."""
    command = [sys.executable, "-m", "benchmarks.engine.startup", *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
    return done.stdout.splitlines()[-1]


def first_token(case: Case, args: argparse.Namespace) -> Figures:
    """Time a start in this process, which began at `args.begun` (`time.monotonic`)."""
    parts = {"import": time.monotonic() - args.begun}
    model_folder = dummy_llm.model_folder(case.shape, case.quantization)
    with jax_says() as said, model_folder as folder:
        _, parts["device"] = timed(jax.devices)
        llm, parts["load"] = timed(lambda: make_llm(case, folder, args))
        _, parts["compile"] = timed(lambda: llm.warm_up(case.variants))
        prompts = dummy_llm.random_prompts(case.shape, 1, case.prompt)
        _, parts["generate"] = timed(lambda: dummy_llm.complete(llm, prompts, 1))
    return {
        "seconds": sum(parts.values()),
        **parts,
        **said,
        "compile_seconds_by_program": llm.metrics()["compile_seconds"],
        "implementations": dispatch.implementations(),
    }


def make_llm(case: Case, folder: Path, args: argparse.Namespace) -> LLM:
    return dummy_llm.make_llm(
        dataclasses.replace(case, steps_per_dispatch=case.steps_per_dispatch or "auto"),
        folder,
        max_num_seqs=case.rows,
        max_model_len=case.max_model_len,
        max_num_batched_tokens=case.step_tokens,
        compilation_cache=args.compilation_cache,
    )


@contextlib.contextmanager
def jax_says() -> Iterator[Figures]:
    """Yield JAX's seconds of tracing and lowering and counts of programs, updated in the block."""
    said: Figures = dict.fromkeys([*DURATIONS.values(), *COUNTS.values()], 0)

    def add(event: str, duration_secs: float, **_: object) -> None:
        if event in DURATIONS:
            said[DURATIONS[event]] += duration_secs

    def count(event: str, **_: object) -> None:
        if event in COUNTS:
            said[COUNTS[event]] += 1

    jax.monitoring.register_event_duration_secs_listener(add)
    jax.monitoring.register_event_listener(count)
    try:
        yield said
    finally:
        jax.monitoring.unregister_event_duration_listener(add)
        jax.monitoring.unregister_event_listener(count)


def main() -> None:
    parser = dummy_llm.parser(__doc__)
    parser.set_defaults(steps_per_dispatch=None)
    parser.add_argument("--starts", nargs="+", default=STARTS, choices=STARTS)
    parser.add_argument("--rows", type=int, default=64, help="of the largest batch (default 64)")
    parser.add_argument("--drafts", default="auto", type=traffic.drafts, metavar="K")
    parser.add_argument("--max-model-len", type=int, default=16384)
    parser.add_argument("--step-tokens", type=int, help="verified and prefilled")
    parser.add_argument("--variants", nargs="+", default=["greedy"], choices=list(SAMPLERS))
    parser.add_argument("--prompt", type=int, default=512, help="tokens (default 512)")
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args()
    fixed = dummy_llm.fields_given(Case, args)
    if args.begun is not None:
        print(json.dumps(first_token(Case(**fixed), args)))
        return
    cases = [Case(**fixed, start=name) for name in args.starts]
    with tempfile.TemporaryDirectory() as folder:
        measured = [started(case, args.compilation_cache or Path(folder)) for case in cases]
    results = []  # not earlier: this takes the device
    for case, figures in zip(cases, measured, strict=True):
        chosen = figures.pop("implementations")
        results.append(record.keep(args.json, case, figures, chosen))
    print(tables.shown({"results": results}, "start-up"))


if __name__ == "__main__":
    main()
