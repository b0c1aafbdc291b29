"""On what machine and with which versions a benchmark ran, and the file its figures go to."""

import argparse
import dataclasses
import functools
import importlib.metadata
import importlib.util
import json
import os
import platform
import subprocess
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

Figures = dict[str, Any]
VERSIONS_OF = ("jax", "jaxlib", "torch", "transformers")


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser described by the first line of `doc`, with `--json FILE`."""
    _commit()  # now, because the files may change while the imported code is measured
    options = argparse.ArgumentParser(description=doc.splitlines()[0])
    options.add_argument("--json", type=Path, metavar="FILE", help="write figures and machine here")
    return options


def write(file: Path | None, figures: Figures) -> None:
    """Write `figures` and the machine of this process to `file`, if there is one."""
    if file:
        file.write_text(json.dumps({**machine(), **figures}, indent=1) + "\n")


def read(file: Path | None) -> Figures:
    """Return the content of `file`; an empty one if it does not exist."""
    return json.loads(file.read_text()) if file and file.exists() else {}


def completed(
    file: Path | None, new: Iterable[Figures], key: Callable[[Figures], Any]
) -> list[Figures]:
    """Return `new` after the results of `file` that have other keys."""
    new = list(new)
    replaced = [key(result) for result in new]
    known = read(file).get("results", [])
    return [result for result in known if key(result) not in replaced] + new


def keep(
    file: Path | None, case: Any, figures: Figures, implementations: Figures | None = None
) -> Figures:
    """Print the result of a case and write it into `file`, which keeps those of other cases.

    Args:
        file: File of results, or None.
        case: A dataclass; its fields identify the result.
        figures: Measurements.
        implementations: Of the ops; None means those of this process.

    Returns:
        The fields, the measurements rounded to five digits, and the commit.
    """
    # Not at the top: it imports JAX.
    from jaxspec.pallas import dispatch

    about = json.loads(json.dumps(dataclasses.asdict(case)))  # with lists, as a file has them
    result = rounded({**about, **figures, "commit": machine()["commit"]})
    print(json.dumps(result), flush=True)
    chosen = dispatch.implementations() if implementations is None else implementations
    results = completed(file, [result], lambda each: {name: each.get(name) for name in about})
    before = read(file).get("implementations", {})
    write(file, {"implementations": before | chosen, "results": results})
    return result


def rounded(value: Any) -> Any:
    """Return figures with five digits; repeats agree on fewer."""
    if isinstance(value, dict):
        return {name: rounded(part) for name, part in value.items()}
    return float(f"{value:.5g}") if isinstance(value, float) else value


def refusal(file: Path | None) -> str | None:
    """Return why results can't be added to `file`; None if they can."""
    known = read(file)
    if known and "results" not in known:
        return f"{file} holds no results of this script; name another file."
    if known and known.get("device", machine()["device"]) != machine()["device"]:
        return f"{file} holds results of {known['device']}; name another file."
    return None


def machine() -> dict[str, Any]:
    """Return the processor, versions, the measured commit and the date."""
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
    """Return whether a package can be imported."""
    return importlib.util.find_spec(name) is not None


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.processor() or platform.machine()


@functools.cache
def _commit() -> str | None:
    """Return the commit of the imported jaxspec, which may differ from this file's."""
    package = Path(importlib.util.find_spec("jaxspec").origin).parent
    command = ["git", "-C", package, "describe", "--always", "--dirty"]
    done = subprocess.run(command, capture_output=True, text=True)
    return done.stdout.strip() or None
