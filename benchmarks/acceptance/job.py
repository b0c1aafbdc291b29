"""A job: a part of the acceptance of one model, in a process of its own, which prints its rows."""

import contextlib
import dataclasses
import fcntl
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks.acceptance.models import ALL_MODELS, Sizes, options_of
from benchmarks.measure.record import rounded
from jaxspec import LLM

Row = dict[str, Any]
PARTS = "features", "exact", "serving"
OPTIONS: dict[str, dict[str, Any]] = {  # parts that are an option of the engine
    "without drafts": {"speculative_config": None},
    "float8 keys and values": {"kv_dtype": "float8_e4m3fn"},
    "float8 weights": {"quantization": "fp8"},
    "float8 weights and activations": {
        "quantization": "fp8",
        "activation_dtype": "float8_e4m3fn",
    },
    "float16 states": {"state_dtype": "float16"},
    "auto drafts": {"speculative_config": "auto"},
    # In an engine of its own, because programs are compiled for them.
    "logits processors": {
        "logits_processors": [
            "benchmarks.acceptance.processors:Step",
            "benchmarks.acceptance.processors:HostStep",
        ]
    },
}
DEVICES = {"two": 2, "four": 4, "eight": 8}
EXACT_ON_DEVICES = {f"exact on {word} devices": count for word, count in DEVICES.items()}
ON_DEVICES = {f"{word} devices": count for word, count in DEVICES.items()}
IN_FLOAT8 = "exact in float8", "features in float8", "serving in float8"
IN_4_BITS = ("exact in 4 bits",)
NAMED = (
    *EXACT_ON_DEVICES,
    *ON_DEVICES,
    *IN_FLOAT8,
    *IN_4_BITS,
    "deterministic",
)  # run only if they are named
NAMED_OPTIONS: dict[str, dict[str, Any]] = {
    **{part: {"tensor_parallel_size": count} for part, count in ON_DEVICES.items()},
    "features in float8": {"quantization": "fp8"},
    "serving in float8": {"quantization": "fp8"},
}
SECONDS_TO_STOP = 0.1  # of the others
LIGHT_PARTS = "features", "exact", "without drafts"


@dataclasses.dataclass(frozen=True)
class Job:
    """A part of a model for a process, and the seconds that it may take."""

    model: str
    part: str
    sizes: Sizes
    seconds: float
    lock: str
    cache: str
    is_small: bool = False

    def options(self, folder: Path) -> dict[str, Any]:
        """Return the options of the engine that runs the model in `folder`."""
        own = OPTIONS.get(self.part) or NAMED_OPTIONS.get(self.part, {})
        return options_of(self.model, folder, self.sizes, Path(self.cache), **own)


def parts_of(model: str) -> tuple[str, ...]:
    """Return the parts of a model, longest first."""
    return (*PARTS, *OPTIONS) if ALL_MODELS[model].has_all else LIGHT_PARTS


class Rows:
    """Prints rows, and skips those without enough time."""

    def __init__(self, job: Job):
        self.job, self._end = job, time.monotonic() + job.seconds

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Stop the other processes of this run within the block."""
        with Path(self.job.lock).open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            try:
                print(json.dumps({"alone": True}), file=_answers(), flush=True)
                time.sleep(SECONDS_TO_STOP)
                yield
            finally:
                print(json.dumps({"alone": False}), file=_answers(), flush=True)

    def add(self, feature: str, **figures: Any) -> None:
        """Print a row."""
        row = {"model": self.job.model, "part": self.job.part, "feature": feature, **figures}
        print(json.dumps(rounded(row)), file=_answers(), flush=True)

    def measure(self, feature: str, call: Callable[[], Row], needs: float = 5.0) -> Row:
        """Add what `call` returns, or its error, or that fewer than `needs` seconds are left."""
        figures: Row = {"skipped": "no time"}
        if self._end - time.monotonic() >= needs:
            try:
                figures = call()
            except Exception as error:
                figures = {"error": f"{type(error).__name__}: {error}"[:500]}
        self.add(feature, **figures)
        return figures


def ready(folder: Path, options: dict[str, Any], kinds: Any = None) -> tuple[LLM, Row]:
    """Return an engine with all its programs, and the seconds until it was ready and had them."""
    start = time.perf_counter()
    llm = LLM(folder, **options)
    loaded = time.perf_counter()
    llm.get_ready()
    is_ready = time.perf_counter()
    llm.warm_up(kinds)
    return llm, {
        "load_seconds": loaded - start,
        "ready_seconds": is_ready - start,
        "all_programs_seconds": time.perf_counter() - start,
        "programs": len(llm.metrics()["compile_seconds"]),
    }


_ANSWERS: list[Any] = []


def _answers() -> Any:
    """Standard output as it was at the start; what libraries print goes to standard error."""
    if not _ANSWERS:
        _ANSWERS.append(os.fdopen(os.dup(1), "w"))
        os.dup2(2, 1)
    return _ANSWERS[0]


def main(argument: str) -> None:
    """Run the job that the parent wrote as JSON."""
    # Not at the top: they import this module.
    from benchmarks.acceptance import exact, serving, speed

    _answers()
    fields = json.loads(argument)
    job = Job(**fields | {"sizes": Sizes(*fields["sizes"])})
    rows = Rows(job)
    parts = {
        "features": speed.features,
        "serving": serving.serving,
        "exact": exact.exact,
        **dict.fromkeys(EXACT_ON_DEVICES, exact.exact_on_devices),
        "exact in float8": exact.exact_in_float8,
        "exact in 4 bits": exact.exact_in_4_bits,
        "deterministic": exact.deterministic,
        **dict.fromkeys(ON_DEVICES, speed.short_features),
        "features in float8": speed.short_features,
        "serving in float8": serving.serving,
    }
    code = 0
    try:
        parts.get(job.part, speed.option)(rows)
    except Exception:
        traceback.print_exc()
        code = 1
    sys.stderr.flush()
    os._exit(code)  # programs that compile in the background are not needed any more
