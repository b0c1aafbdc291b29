"""The first command a user runs: seconds with an empty and a filled compile cache, peak memory.

python benchmarks/first_command.py [--json FILE]
"""

import argparse
import json
import os
import platform
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax

COMMAND = [sys.executable, "-m", "jaxspec", "def fibonacci(n):"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    results = {}
    with tempfile.TemporaryDirectory() as cache:
        for start in ("cold", "warm"):
            begin = time.perf_counter()
            done = subprocess.run(
                COMMAND,
                env={**os.environ, "JAX_COMPILATION_CACHE_DIR": cache},
                capture_output=True,
                text=True,
                check=True,
            )
            results[start] = {
                "seconds": round(time.perf_counter() - begin, 1),
                "summary": done.stdout.splitlines()[-1],
            }
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    results |= {
        "peak_memory_mb": round(peak / 1024),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        "jax": jax.__version__,
        "date": time.strftime("%F"),
    }
    text = json.dumps(results, indent=1)
    print(text)
    if args.json:
        args.json.write_text(text + "\n")


if __name__ == "__main__":
    main()
