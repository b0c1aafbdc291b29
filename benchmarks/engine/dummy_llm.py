"""LLMs of a published shape with random weights, and the common parts of their benchmarks.

A script describes its measurements by cases (a subclass of `Case`), takes options from `parser`,
and passes the cases and a function that measures one to `run`.
"""

import argparse
import contextlib
import dataclasses
import gc
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks.measure import record
from benchmarks.measure.model_shapes import SHAPES
from benchmarks.measure.weights import BLOCK, FLOAT4, int4_of
from jaxspec import LLM, RequestMetrics, SamplingParams

RATES = (0.80, 0.60, 0.45)  # of the first draft, of the first two, of all three
PAGE_SIZE = 16
# Values of `Case.quantization` that config.json declares; "fp8" is an option of the engine.
DECLARED = {"w4a16": int4_of(BLOCK), "nvfp4": FLOAT4}
Prompts = list[dict[str, list[int]]]
Figures = dict[str, Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """The model of a result, and the options that it ran with."""

    shape: str
    drafts: int | str  # "auto": the engine chooses in each step, 3 at most
    draft_vocab: int | None
    dtype: str
    state_policy: str
    state_dtype: str
    kv_dtype: str | None
    max_in_flight: int
    steps_per_dispatch: int
    tensor_parallel_size: int = 1
    quantization: str | None = None  # "fp8", or of `DECLARED`
    activation_dtype: str | None = None

    @property
    def weight_dtype(self) -> str | None:
        """Dtype of the matrices of layers, as `floor.step_bytes` takes it."""
        if self.quantization is None:
            return None
        return "int4" if self.quantization in DECLARED else "float8_e4m3fn"


def parser(doc: str) -> argparse.ArgumentParser:
    """Return a parser with the fields of a `Case` except drafts, and the options of `run`."""
    options = record.parser(doc)
    options.add_argument("--shape", choices=SHAPES, default="qwen3.5-9b")
    options.add_argument("--draft-vocab", type=int, metavar="N", help="default: the model's")
    options.add_argument("--dtype", default="bfloat16")
    options.add_argument("--state-policy", default="replay", choices=("snapshot", "replay"))
    options.add_argument("--state-dtype", default="float32")
    options.add_argument("--kv-dtype")
    options.add_argument("--quantization", choices=("fp8", *DECLARED))
    options.add_argument("--activation-dtype", choices=("float8_e4m3fn",))
    options.add_argument("--max-in-flight", type=int, default=2)
    options.add_argument("--steps-per-dispatch", type=int, default=1)
    options.add_argument("--tensor-parallel-size", type=int, default=1)
    options.add_argument("--repeats", type=int, default=3)
    options.add_argument("--compilation-cache", type=Path, metavar="FOLDER")
    return options


def fields_given(kind: type[Case], args: argparse.Namespace) -> Figures:
    """Return the fields of a case that are options."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in vars(args).items() if name in names}


def make_llm(case: Case, folder: Path, **sizes: Any) -> LLM:
    """Create an engine for the model in `folder`; `sizes`: other options."""
    same = "dtype", "state_policy", "state_dtype", "kv_dtype", "max_in_flight"
    more = "steps_per_dispatch", "tensor_parallel_size", "activation_dtype"
    given = {name: getattr(case, name) for name in (*same, *more)}
    given["quantization"] = None if case.quantization in DECLARED else case.quantization
    options = options_of(case.drafts, draft_vocab=case.draft_vocab, page_size=PAGE_SIZE)
    return LLM(folder, **options, **given, **sizes)


def options_of(
    drafts: int | str,
    rates: Sequence[float] = RATES,
    draft_vocab: int | None = None,
    **others: Any,
) -> dict[str, Any]:
    """Return the options of an `LLM` with random weights, without cached prefixes.

    Args:
        drafts: Per step; "auto" lets the engine choose.
        rates: Share of steps that accept the first draft, the first two, ...
        draft_vocab: Number of ids that are drafted; None means the model's.
        others: Other options, which replace these.
    """
    speculation = {
        "num_speculative_tokens": drafts,
        "draft_vocab": draft_vocab,
        "synthetic_acceptance_rates": rates_of(drafts, rates),
    }
    return {
        "load_format": "dummy",
        "speculative_config": speculation if drafts else None,
        "show_progress": False,
        "background_compilation": False,  # nothing else runs while steps are timed
        "enable_prefix_caching": False,  # the same prompts are sent again
        **others,
    }


def rates_of(drafts: int | str, rates: Sequence[float] = RATES) -> list[float]:
    """Return as many rates as there are drafts."""
    return list(rates if drafts == "auto" else rates[:drafts])


def num_pages(lengths: Iterable[int]) -> int:
    """Return the number of pages for requests of these lengths, with the null page."""
    return 1 + sum(-(-length // PAGE_SIZE) for length in lengths)


@contextlib.contextmanager
def model_folder(shape: str, quantization: str | None = None) -> Iterator[Path]:
    """Yield a folder with the config.json of a shape; see `Case.quantization`."""
    fields = SHAPES[shape].config()
    if quantization in DECLARED:
        fields["quantization_config"] = DECLARED[quantization]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(json.dumps(fields))
        yield folder


def random_prompts(shape: str, count: int, length: int) -> Prompts:
    """Return `count` prompts of random ids, the same in each call."""
    ids = np.random.default_rng(0).integers(0, SHAPES[shape].vocab, (count, length))
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def started(make: Callable[[], LLM], kind: Any = "greedy") -> tuple[LLM, Figures]:
    """Return an engine with all programs of a kind, and its load and compile times."""
    llm, load = timed(make)
    _, compiled = timed(lambda: llm.warm_up(kind))
    by_program = llm.metrics()["compile_seconds"]
    seconds = {"load_seconds": load, "compile_seconds": compiled}
    return llm, {**seconds, "compile_seconds_by_program": by_program}


@dataclasses.dataclass(frozen=True)
class Completion:
    """One call of `generate`."""

    seconds: float
    steps: int
    requests: list[RequestMetrics]


def complete(llm: LLM, prompts: Prompts, tokens: int) -> Completion:
    """Give every prompt `tokens` new tokens."""
    params = greedy(tokens)
    steps = llm.metrics()["num_steps"]
    outputs, seconds = timed(lambda: llm.generate(prompts, params))
    if any(len(output.outputs[0].token_ids) != tokens for output in outputs):
        raise RuntimeError(f"{[o.outputs[0].finish_reason for o in outputs]}: a row ended early.")
    return Completion(seconds, llm.metrics()["num_steps"] - steps, [o.metrics for o in outputs])


def greedy(tokens: int) -> SamplingParams:
    """Return greedy parameters for exactly `tokens` tokens."""
    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)


def timed(call: Callable[[], Any]) -> tuple[Any, float]:
    """Return the result of a call, and its seconds."""
    begin = time.perf_counter()
    result = call()
    return result, time.perf_counter() - begin


def spread(name: str, values: Sequence[float]) -> Figures:
    """Return the median, minimum and maximum of the repeats."""
    return {
        name: statistics.median(values),
        f"{name}_least": min(values),
        f"{name}_most": max(values),
    }


def run(
    cases: Iterable[Case],
    measure: Callable[[Any, Path, argparse.Namespace], Figures],
    args: argparse.Namespace,
) -> list[Figures]:
    """Measure each case, print and write its result; a case that does not fit has an `error`."""
    results = []
    with model_folder(args.shape, args.quantization) as folder:
        for case in cases:
            try:
                figures = measure(case, folder, args)
            except (ValueError, jax.errors.JaxRuntimeError) as error:
                told = ("gpu_memory_utilization", "RESOURCE_EXHAUSTED")
                if not any(words in str(error) for words in told):
                    raise
                figures = {"error": "out of memory"}
            gc.collect()  # the weights, before others are drawn
            results.append(record.keep(args.json, case, figures))
    return results
