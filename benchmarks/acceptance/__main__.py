"""The assembled product on one GPU: every feature and model, and what each costs.

    python -m benchmarks.acceptance [--json FILE] [--only NAME ...] [--seconds N]

Models have random weights and published shapes: Qwen3.5-0.8B is whole, and the others are cut to
4 layers of full width. Each part of a model is a process of its own. Some run at a time, and while
one of them measures the others are stopped:

* features: requests of each kind. The first one of a kind comes beside a greedy stream, and tells
  what it waits for (`first_ms`, then `again_ms`) and what the stream does (`largest_gap_ms`).
  Then a batch of all rows gives the milliseconds per token.
* serving: kept prefixes, requests that move to a second engine, updates of weights, AsyncLLM, and
  HTTP.
* exact: in float32, the tokens with drafts are those without, and those of kernels are XLA's. Where
  biases of 1e-3 change the token, either may come; such ties are counted. Log-probabilities of
  generated tokens are the scores of the same texts.
* two devices, exact on two devices, and the same with four and eight (with `--parts`, on a machine
  that has them): the features of every model on a tensor-parallel group, and its tokens in float32
  beside those of one device.
* exact in float8 (with `--parts`): folders in FP8 by blocks and per row, and one that is rounded at
  load, in bfloat16: tokens with drafts and without; log-probabilities, held in FP8 and
  dequantised, beside those in float32.
* exact in 4 bits (with `--parts`): the same for integers in groups of 128 columns, and NVFP4.
* deterministic (with `--parts`): log-probabilities of generated tokens in bfloat16 have the bits of
  their scores.
* features in float8, serving in float8 (with `--parts`): as above, with weights in FP8.
* options: 8-bit keys and values, 8-bit weights (and activations), float16 states, "auto" drafts, no
  drafts and logits processors.

It ends with status 1 if anything failed, if a program was compiled while a request waited, or if
tokens differ. Parts that there was no time for are listed as skipped; a later call with the same
FILE begins with those that it lacks.
"""

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks.acceptance.job import NAMED, OPTIONS, PARTS, parts_of
from benchmarks.acceptance.models import ALL_MODELS, MODELS, Sizes
from benchmarks.measure import record
from benchmarks.report import tables

Row = dict[str, Any]
SECONDS = 500.0  # what runs then may take some more, and so do the tables
LEAST_SECONDS = 25.0  # of a part that is begun
STACK_FRAME = "    @ "  # begins the lines of a C++ stack trace
OVERTIME = 30.0  # after which a process is ended
_CHILD = "import sys; from benchmarks.acceptance.job import main; main(sys.argv[1])"


class Parts:
    """Runs the parts of all models, some at a time."""

    def __init__(self, args: argparse.Namespace, folder: Path):
        """`folder`: for the files that the parts share."""
        self._args, self._folder = args, folder
        self._end = time.monotonic() + args.seconds
        self._lock = threading.Lock()
        self._running: set[subprocess.Popen[str]] = set()
        self._alone: subprocess.Popen[str] | None = None  # the others are stopped
        self.rows: list[Row] = []

    def run(self) -> list[Row]:
        parts = planned(self._args.only, self._args.parts, accepted(self._args.json))
        with ThreadPoolExecutor(self._args.processes) as pool:
            try:
                list(pool.map(self._part, parts))
            except BaseException:  # an interrupt
                self._end = 0.0
                for process in tuple(self._running):
                    _kill(process)
                raise
        return self.rows

    def _part(self, part: tuple[str, str]) -> None:
        model, name = part
        left = self._end - time.monotonic()
        about = {"model": model, "part": name}
        if left < LEAST_SECONDS:
            self._add({**about, "feature": "all", "skipped": "no time"})
            return
        start = time.monotonic()
        code, error = self._process(about, left)
        if code:
            self._add({**about, "feature": "all", "error": error})
        self._add({**about, "feature": "part", "seconds": time.monotonic() - start})

    def _process(self, about: Row, left: float) -> tuple[int, str]:
        """Add the rows that a process prints; its status and the last line of its errors."""
        job = {
            **about,
            "sizes": list(self._args.sizes),
            "seconds": left,
            "lock": str(self._folder / "lock"),
            "cache": str(self._args.compilation_cache or self._folder / "programs"),
            "is_small": self._args.small,
        }
        errors = self._folder / f"{about['model']}-{about['part']}.txt"
        with (
            errors.open("w") as said,
            subprocess.Popen(
                [sys.executable, "-c", _CHILD, json.dumps(job)],
                stdout=subprocess.PIPE,
                stderr=said,
                text=True,
                env={**os.environ, **self._environment(about["part"])},
                start_new_session=True,
            ) as process,
        ):
            self._started(process)
            timer = threading.Timer(left + OVERTIME, _kill, [process])
            timer.start()
            for line in process.stdout:
                row = json.loads(line)
                if "alone" in row:
                    self._leave_alone(process, row["alone"])
                else:
                    self._add(row)
            self._leave_alone(process, False)
            code = process.wait()
            timer.cancel()
            _kill(process)  # what it started
            with self._lock:
                self._running.discard(process)
        lines = errors.read_text(errors="replace").strip().splitlines()
        lines = [line for line in lines if not line.startswith(STACK_FRAME)]
        if code == -signal.SIGKILL:
            return code, f"It was ended after {left + OVERTIME:.0f} seconds."
        return code, (lines[-1] if lines else f"It ended with {code}.")[:500]

    def _started(self, process: subprocess.Popen[str]) -> None:
        with self._lock:
            self._running.add(process)
            if self._alone is not None:
                os.killpg(process.pid, signal.SIGSTOP)

    def _leave_alone(self, process: subprocess.Popen[str], is_alone: bool) -> None:
        """Stop all processes except one that measures, or continue them."""
        with self._lock:
            if is_alone:
                self._alone = process
            elif self._alone is process:
                self._alone = None
            else:
                return  # the next one was faster
            for each in self._running:
                is_stopped = self._alone not in (None, each)
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(each.pid, signal.SIGSTOP if is_stopped else signal.SIGCONT)

    def _environment(self, part: str) -> dict[str, str]:
        """Return each process's share of the GPU's memory; a process that serves starts another."""
        share = 0.92 / self._args.processes / (2 if part == "serving" else 1)
        return {"XLA_PYTHON_CLIENT_MEM_FRACTION": f"{share:.3f}"}

    def _add(self, row: Row) -> None:
        with self._lock:
            self.rows.append(row)
            print(json.dumps(row), flush=True)


def planned(
    only: list[str], parts: list[str] | None, before: frozenset[tuple[str, str]] = frozenset()
) -> list[tuple[str, str]]:
    """Return models and parts: the long ones first, so that no process is left with one alone.

    Those of `before` come last.
    """
    order = [*PARTS, *OPTIONS, *NAMED]
    named = NAMED if parts else ()
    listed = [(model, part) for model in only for part in (*parts_of(model), *named)]

    def rank(each: tuple[str, str]) -> tuple[bool, bool, int]:
        model, part = each
        return each in before, part in OPTIONS or not ALL_MODELS[model].has_all, order.index(part)

    listed.sort(key=rank)
    return [each for each in listed if parts is None or each[1] in parts]


def _kill(process: subprocess.Popen) -> None:
    """Kill a process and its children."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def accepted(file: Path | None) -> frozenset[tuple[str, str]]:
    """Return the models and parts that the file has without an error or a skipped row."""
    rows = record.read(file).get("results", [])
    failed = {_part_of(row) for row in rows if {"error", "skipped"} & row.keys()}
    return frozenset(map(_part_of, rows)) - failed


def kept(file: Path | None, rows: list[Row]) -> list[Row]:
    """The rows, after those that the file has of other models and parts.

    A part without time now does not replace one that was accepted before.
    """
    before = {_part_of(row) for row in rows if "skipped" in row} & accepted(file)
    return record.completed(file, (row for row in rows if _part_of(row) not in before), _part_of)


def _part_of(row: Row) -> tuple[str, str]:
    return row["model"], row["part"]


def parser() -> argparse.ArgumentParser:
    options = record.parser(__doc__)
    add = options.add_argument
    add("--only", nargs="+", choices=ALL_MODELS, default=list(MODELS), metavar="NAME")
    parts = [*PARTS, *OPTIONS, *NAMED]
    add("--parts", nargs="+", choices=parts, metavar="PART", help="default: all of one device")
    add("--seconds", type=float, default=SECONDS, help="after which no part begins")
    add("--processes", type=int, default=3, help="parts at a time")
    add("--rows", type=int, default=Sizes().rows, help="at a time (default 64)")
    add("--prompt", type=int, default=Sizes().prompt, help="tokens (default 512)")
    add("--tokens", type=int, default=Sizes().tokens, help="new ones of a request (default 64)")
    add("--chunk", type=int, default=Sizes().chunk, help="prompt tokens of a step (default 512)")
    add("--small", action="store_true", help="narrow models, for a CPU")
    add("--compilation-cache", type=Path, metavar="FOLDER", help="default: an empty one")
    return options


def main() -> None:
    args = parser().parse_args()
    args.sizes = Sizes(args.rows, args.prompt, args.tokens, args.chunk)
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        rows = Parts(args, Path(folder)).run()
    seconds = round(time.monotonic() - start, 1)
    commit = record.machine()["commit"]  # not earlier: this takes the device
    rows = [{**row, "commit": commit} for row in rows]
    figures = {"sizes": args.sizes._asdict(), "processes": args.processes, "seconds": seconds}
    figures["results"] = kept(args.json, rows)
    record.write(args.json, figures)
    names = "accepted features", "accepted models", "accepted parts", "not accepted"
    print(tables.shown(figures, *names))
    if failed := [row for row in rows if "error" in row]:
        sys.exit(f"{len(failed)} rows have errors.")


if __name__ == "__main__":
    main()
