"""On what machine and with which versions a benchmark ran, and the file its figures go to."""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import time
from pathlib import Path
from typing import Any

VERSIONS_OF = ("jax", "jaxlib", "torch", "transformers")


def parser(doc: str) -> argparse.ArgumentParser:
    """A command line described by the first line of `doc`, with `--json FILE`."""
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--json", type=Path, metavar="FILE", help="write figures and machine here")
    return options


def write(file: Path | None, figures: dict[str, Any]) -> None:
    """Write `figures` and what they were measured on; None: nothing is asked for."""
    if file:
        file.write_text(json.dumps({**machine(), **figures}, indent=1) + "\n")


def refusal(file: Path | None) -> str | None:
    """Why a list of results can't be kept in `file`, if it can't."""
    if file is None or not file.exists():
        return None
    known = json.loads(file.read_text())
    if "results" not in known:
        return f"{file} holds no results of this script; name another file."
    if known["device"] != machine()["device"]:
        return f"{file} holds results of {known['device']}; name another file."
    return None


def machine() -> dict[str, Any]:
    """Processor, versions, the commit measured and the day."""
    # Not at the top: a process that only starts others should hold no accelerator meanwhile.
    import jax

    versions = {name: importlib.metadata.version(name) for name in VERSIONS_OF if installed(name)}
    return {
        "device": jax.devices()[0].device_kind,
        "cpu": _cpu_model(),
        "cpu_count": os.cpu_count(),
        "python": platform.python_version(),
        **versions,
        "commit": _commit(),
        "date": time.strftime("%F"),
    }


def installed(name: str) -> bool:
    """Whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


def _commit() -> str | None:
    """The commit of the jaxspec that was imported, which may not be the one beside this file."""
    package = Path(importlib.util.find_spec("jaxspec").origin).parent
    command = ["git", "-C", package, "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None
