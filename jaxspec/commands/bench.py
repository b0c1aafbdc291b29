"""`python -m jaxspec bench latency | throughput`: benchmarks with vLLM's metric names."""

import argparse
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from jaxspec import device
from jaxspec.api.llm import LLM
from jaxspec.checks import integer
from jaxspec.commands.stats import acceptance, failure
from jaxspec.flight.about import version_of
from jaxspec.options.arguments import (
    FEW,
    CommandParser,
    add_engine_options,
    add_model,
    add_other_engine_options,
    add_speculation,
    begin_output,
    engine_options,
    prompts_in,
)
from jaxspec.requests.outputs import RequestOutput
from jaxspec.requests.prompts import Prompt
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams

Results = dict[str, Any]
Texts = list[str] | None  # prompts; None means random token ids
_PERCENTILES = (10, 25, 50, 75, 90, 99)
_EPILOG = "exit status: 0 done; 1 the model failed on a prompt; 2 invalid arguments or input"


def main(words: Sequence[str]) -> int:
    """Measure, print and write the results; return 1 if the model produced NaN, else 0."""
    args = parser().parse_args(words)
    for name in ("batch_size", "num_iters", "num_prompts", "input_len", "output_len"):
        if hasattr(args, name):
            integer(f"--{name.replace('_', '-')}", getattr(args, name), 1)
    defaults = {
        "max_model_len": args.input_len + args.output_len,
        "background_compilation": False,  # no compilation while steps are timed
        "enable_prefix_caching": False,  # each repeat must compute its prompts again
        **({"max_num_seqs": args.batch_size} if "batch_size" in args else {}),
    }
    options = engine_options(args, **defaults)
    texts = None if args.prompts_file is None else prompts_in(args.prompts_file)
    if args.output_json is not None:
        begin_output(args.output_json)
    with LLM(**options) as llm:
        try:
            results = args.measure(llm, args, texts)
        except FloatingPointError as error:
            print(error, file=sys.stderr)
            return 1
        if args.output_json is not None:
            written = {**_machine(llm), **results}
            args.output_json.write_text(json.dumps(written, indent=1) + "\n")
    return 0


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="python -m jaxspec bench",
        description="Measure a model on this machine, without a server. Each benchmark has --help.",
        epilog=_EPILOG,
    )
    kinds = made.add_subparsers(metavar="KIND", required=True)
    latency = _add(kinds, "latency", _latency, "measure the seconds per batch of prompts")
    _add_number(latency, "batch-size", 8, "number of prompts per batch")
    _add_number(latency, "num-iters-warmup", 1, "number of batches before the timed ones")
    _add_number(latency, "num-iters", 10, "number of timed batches")
    _add_shared(latency)
    throughput = _add(
        kinds, "throughput", _throughput, "measure the tokens per second of many prompts"
    )
    _add_number(
        throughput, "num-prompts", 64, "number of prompts; max-num-seqs run at the same time"
    )
    _add_shared(throughput)
    add_engine_options(throughput, "max_num_seqs")
    return made


def _add(kinds: Any, name: str, measure: Callable[[LLM, Any, Texts], Results], help: str) -> Any:
    kind = kinds.add_parser(
        name,
        prog=f"python -m jaxspec bench {name}",
        usage=f"python -m jaxspec bench {name} [options] [MODEL]",
        help=help,
        description=f"{help[0].upper()}{help[1:]}.",
        epilog=_EPILOG,
    )
    kind.set_defaults(measure=measure)
    add_model(kind)
    return kind


def _add_number(kind: Any, name: str, default: int, help: str) -> None:
    shown = f"{help} (default: {default})"
    kind.add_argument(f"--{name}", type=int, default=default, metavar="N", help=shown)


def _add_shared(kind: Any) -> None:
    _add_number(kind, "input-len", 128, "number of tokens per prompt")
    _add_number(kind, "output-len", 128, "generated tokens per prompt; end tokens are ignored")
    kind.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="a UTF-8 text file with one prompt per line, truncated to the last input-len tokens "
        "and repeated as needed (default: random token ids, for which fewer drafts are accepted "
        "than for texts)",
    )
    kind.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature (default: 0)",
    )
    _add_number(kind, "seed", 0, "seed of random token ids and of the sampling noise")
    kind.add_argument(
        "--output-json",
        type=Path,
        metavar="FILE",
        help="also write the results as JSON (default: no)",
    )
    add_engine_options(kind, *(name for name in FEW if name != "max_model_len"), "load_format")
    add_speculation(kind)
    add_other_engine_options(kind)


def _latency(llm: LLM, args: argparse.Namespace, texts: Texts) -> Results:
    prompts, params = _prompts(llm, args, texts, args.batch_size), _params(args)
    for _ in range(args.num_iters_warmup):
        _generate(llm, prompts, params)
    outputs, latencies = list[RequestOutput](), list[float]()
    for _ in range(args.num_iters):
        seconds, done = _generate(llm, prompts, params)
        latencies.append(seconds)
        outputs += done
    average = statistics.mean(latencies)
    percentiles = {str(each): float(np.percentile(latencies, each)) for each in _PERCENTILES}
    print(f"Avg latency: {average:.4f} seconds")
    for percent, seconds in percentiles.items():
        print(f"{percent}% percentile latency: {seconds:.4f} seconds")
    return {
        "batch_size": args.batch_size,
        "avg_latency": average,
        "latencies": latencies,
        "percentiles": percentiles,
        **_of_requests(outputs, args),
    }


def _throughput(llm: LLM, args: argparse.Namespace, texts: Texts) -> Results:
    prompts, params = _prompts(llm, args, texts, args.num_prompts), _params(args)
    _generate(llm, prompts[: llm.shapes.max_num_seqs], params)  # compiles and warms up
    seconds, outputs = _generate(llm, prompts, params)
    num_output = sum(len(output.outputs[0].token_ids) for output in outputs)
    num_total = num_output + sum(len(output.prompt_token_ids) for output in outputs)
    print(
        f"Throughput: {len(outputs) / seconds:.2f} requests/s, {num_total / seconds:.2f} total "
        f"tokens/s, {num_output / seconds:.2f} output tokens/s"
    )
    return {
        "num_requests": len(outputs),
        "elapsed_time": seconds,
        "total_num_tokens": num_total,
        "requests_per_second": len(outputs) / seconds,
        "tokens_per_second": num_total / seconds,
        "output_tokens_per_second": num_output / seconds,
        **_of_requests(outputs, args),
    }


def _generate(
    llm: LLM, prompts: Sequence[Prompt], params: SamplingParams
) -> tuple[float, list[RequestOutput]]:
    """Generate all outputs; return the seconds taken and the outputs.

    Raises:
        FloatingPointError: the model produced NaN logits.
    """
    begin = time.perf_counter()
    outputs = llm.generate(prompts, params, use_tqdm=False)
    seconds = time.perf_counter() - begin
    failed = [output.outputs[0].finish_reason for output in outputs].count("error")
    if failed:
        raise FloatingPointError(failure(failed, len(outputs)))
    return seconds, outputs


def _prompts(llm: LLM, args: argparse.Namespace, texts: Texts, count: int) -> list[Prompt]:
    if texts is not None:
        return list(itertools.islice(itertools.cycle(texts), count))
    drawn = np.random.default_rng(args.seed).integers(llm.vocab_size, size=(count, args.input_len))
    return [{"prompt_token_ids": ids} for ids in drawn.tolist()]


def _params(args: argparse.Namespace) -> SamplingParams:
    return SamplingParams(
        temperature=args.temperature,
        seed=args.seed,
        max_tokens=args.output_len,
        ignore_eos=True,
        truncate_prompt_tokens=args.input_len,
    )


def _of_requests(outputs: Sequence[RequestOutput], args: argparse.Namespace) -> Results:
    """Print and return the median latencies and the acceptance of drafts."""
    ttft = statistics.median(output.metrics.ttft or 0.0 for output in outputs)
    tpot = statistics.median(output.metrics.tpot or 0.0 for output in outputs)
    line = f"Medians: {1000 * ttft:.2f} ms to the first token, {1000 * tpot:.2f} ms per token"
    total = RequestMetrics.total([output.metrics for output in outputs])
    if total.num_drafts:
        line += (
            f"\nDrafts: {total.mean_acceptance_length:.2f} tokens per verify step, acceptance by "
            f"position {acceptance(total)}"
        )
    print(line)
    return {
        "input_len": args.input_len,
        "output_len": args.output_len,
        "median_ttft": ttft,
        "median_tpot": tpot,
        "num_drafts": total.num_drafts,
        "mean_acceptance_length": total.mean_acceptance_length,
        "drafted_per_position": total.drafted_per_position,
        "accepted_per_position": total.accepted_per_position,
    }


def _machine(llm: LLM) -> Results:
    """Return the model, settings, device and versions that were measured."""
    return {
        "model": llm.model_name,
        "max_num_seqs": llm.shapes.max_num_seqs,
        "num_speculative_tokens": llm.shapes.num_drafts,
        "device": device.default_device().device_kind,
        "versions": {name: version_of(name) for name in ("jaxspec", "jax", "jaxlib")},
        "date": time.strftime("%F"),
    }
