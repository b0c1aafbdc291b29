"""The first command a user runs: seconds with an empty and a filled compile cache, peak memory.

    python -m benchmarks.engine.first_command [--json benchmarks/results/first_command_cpu.json]

A new process a run: from its start to the first character behind the prompt, to its end, and the
most memory it held. The cache is jaxspec's own, in a cache folder (`XDG_CACHE_HOME`) that is new
for every pair of a cold and a warm start. Medians of the pairs; of the seconds the least and the
most too. "Cold" is the compile cache alone: Python's files stay in memory from run to run.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.measure import record
from benchmarks.report import tables

PROMPT = "def fibonacci(n):"
COMMAND = [sys.executable, "-m", "jaxspec", PROMPT]


def run(cache: str) -> dict[str, Any]:
    """Run the command once, with compiled programs under `cache`."""
    environment = {**os.environ, "XDG_CACHE_HOME": cache}
    environment.pop("JAX_COMPILATION_CACHE_DIR", None)  # would be taken instead
    begin = time.perf_counter()
    process = subprocess.Popen(
        COMMAND, env=environment, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    )
    text = process.stdout.read(len(PROMPT.encode()) + 1)
    first_character = time.perf_counter()
    text += process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)  # this child's memory, not the largest so far
    end = time.perf_counter()
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"{' '.join(COMMAND)!r} failed: run it alone to see why.")
    return {
        "first_character_seconds": round(first_character - begin, 1),
        "seconds": round(end - begin, 1),
        "peak_memory_mb": round(usage.ru_maxrss / 1024),
        "summary": text.decode().splitlines()[-1],
    }


def middle(runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the medians of `runs`, the spread of the seconds, and the last summary."""
    seconds = [one["seconds"] for one in runs]
    keys = ("first_character_seconds", "seconds", "peak_memory_mb")
    return {
        **{key: statistics.median(one[key] for one in runs) for key in keys},
        "seconds_least": min(seconds),
        "seconds_most": max(seconds),
        "summary": runs[-1]["summary"],
    }


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("--repeats", type=int, default=3, help="pairs of starts (default 3)")
    args = parser.parse_args()
    cold, warm = [], []
    for _ in range(args.repeats):
        with tempfile.TemporaryDirectory() as cache:
            cold.append(run(cache))
            if not any(Path(cache).rglob("*")):
                raise RuntimeError("Nothing was cached: the command keeps its programs elsewhere.")
            warm.append(run(cache))
        print(f"cold {cold[-1]['seconds']} s, warm {warm[-1]['seconds']} s", flush=True)
    figures = {"repeats": args.repeats, "cold": middle(cold), "warm": middle(warm)}
    print(tables.shown(figures, "first command"))
    record.write(args.json, figures)


if __name__ == "__main__":
    main()
