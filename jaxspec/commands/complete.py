"""`python -m jaxspec "def fibonacci(n):"`: complete prompts, then print a line of stats."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from jaxspec import commands
from jaxspec.api.llm import LLM
from jaxspec.commands.conversation import by_draft, plain
from jaxspec.commands.stats import failure, summary
from jaxspec.flight.about import version_of
from jaxspec.options.arguments import (
    ENGINE_OPTIONS,
    CommandParser,
    add_color,
    add_engine_options,
    add_speculation,
    engine_options,
    prompts_in,
)
from jaxspec.requests.outputs import RequestOutput
from jaxspec.requests.request import RequestMetrics
from jaxspec.requests.sampling_params import SamplingParams
from jaxspec.viz.colored_tokens import ColoredText, ansi_legend

_EXAMPLES = """\
examples:
  python -m jaxspec "def fibonacci(n):"
  python -m jaxspec "import os" "class Stack:" --temperature 0.8 --max-tokens 64 --seed 1
  python -m jaxspec --model Qwen/Qwen3.5-0.8B --prompts-file prompts.txt --json > out.jsonl
  python -m jaxspec "class Stack:" --color

exit status: 0 done; 1 the model failed on a prompt; 2 invalid arguments or input
"""


def main(words: Sequence[str]) -> int:
    """Complete the prompts; return 1 if the model failed on one of them, else 0."""
    failed, total = _run(parser().parse_args(words))
    if failed:
        print(failure(failed, total), file=sys.stderr)
    return 1 if failed else 0


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="python -m jaxspec",
        usage="python -m jaxspec [options] PROMPT ...\n       python -m jaxspec COMMAND ...",
        description="Complete prompts with a hybrid LLM and speculative decoding. One prompt is\n"
        "streamed, several are printed when all are done; a line of stats follows.\n\n"
        f"commands, each with its own --help:\n{commands.listing()}",
        epilog=_EXAMPLES,
    )
    made.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="texts to complete; write -- before one that starts with a dash or is a command's "
        "name",
    )
    made.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="a UTF-8 text file with one prompt per line; - is standard input (default: none)",
    )
    add_engine_options(made, "model", *ENGINE_OPTIONS)
    _add_sampling(made)
    add_speculation(made)
    made.add_argument(
        "--verbose", action="store_true", help="print the use of device memory first (default: off)"
    )
    add_color(made)
    made.add_argument(
        "--json", action="store_true", help="print one JSON object per prompt (default: text)"
    )
    made.add_argument(
        "--version",
        action="version",
        version=f"jaxspec {version_of('jaxspec') or 'from its sources'}",
        help="print the version and exit",
    )
    return made


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="maximum number of generated tokens (default: 128)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="sampling temperature; 0 is greedy, 1 keeps the model's probabilities (default: 0)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="seed of the sampling noise (default: a fixed one)",
    )


def _prompts_of(args: argparse.Namespace) -> list[str]:
    """Return the prompts of the command line, then those of the file.

    Raises:
        ValueError: there are no prompts, or the file can't be read.
    """
    path = args.prompts_file
    prompts = [*args.prompts, *(prompts_in(path) if path is not None else ())]
    if not prompts:
        raise ValueError(
            'Nothing to complete: give a prompt, as in `python -m jaxspec "def f(x):"`.'
        )
    return prompts


def _run(args: argparse.Namespace) -> tuple[int, int]:
    """Complete the prompts; return the number that failed and the total."""
    prompts = _prompts_of(args)
    if args.json and args.color:
        raise ValueError("--color is for text, and --json prints none. Drop one of the two.")
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
    )
    options: dict[str, Any] = engine_options(args) | {
        "max_num_seqs": min(len(prompts), 8),
        "background_compilation": False,  # all requests share their sampling features
    }
    if len(prompts) == 1:
        options["enable_prefix_caching"] = False  # no later request can share the prefix
    llm = LLM(**options)
    if args.verbose:
        print(f"Device memory\n{llm.memory_map()}", file=sys.stderr)
    if len(prompts) == 1 and not args.json:
        reasons = [_stream(llm, prompts[0], params, color=args.color)]
    else:
        reasons = _batch(llm, prompts, params, as_json=args.json, color=args.color)
    return reasons.count("error"), len(prompts)


def _stream(llm: LLM, prompt: str, params: SamplingParams, *, color: bool) -> str | None:
    """Print a completion as it is generated; return its finish reason."""
    stream = llm.stream(prompt, params)  # compiles before it returns
    print(prompt, end="", flush=True)
    started, num_tokens, reason = time.perf_counter(), 0, None
    positions = list[int]()
    look = by_draft(llm.tokenizer) if color and llm.tokenizer else plain
    for delta in stream:
        positions += delta.draft_positions
        num_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        print(look(delta, ()), end="", flush=True)
        if delta.metrics is not None:
            seconds = time.perf_counter() - started
            legend = f"{ansi_legend(positions)}\n" if color else ""
            print(f"\n\n{legend}{summary(delta.metrics, num_tokens, seconds)}")
    return reason


def _batch(
    llm: LLM, prompts: list[str], params: SamplingParams, *, as_json: bool, color: bool
) -> list[str | None]:
    outputs = llm.generate(prompts, params)
    # The engine's times exclude compilation.
    parts = ("plan_time", "dispatch_time", "wait_time", "collect_time")
    seconds = sum(llm.metrics()[part] for part in parts)
    for output in outputs:
        if as_json:
            print(json.dumps(_as_dict(output)))
        elif color:
            print(f"{ColoredText.of(output, llm.tokenizer)}\n{'-' * 60}")
        else:
            print(f"{output.prompt}{output.outputs[0].text}\n{'-' * 60}")
    if not as_json:
        total = RequestMetrics.total([output.metrics for output in outputs])
        print(summary(total, sum(len(o.outputs[0].token_ids) for o in outputs), seconds))
    return [output.outputs[0].finish_reason for output in outputs]


def _as_dict(output: RequestOutput) -> dict[str, object]:
    metrics = output.metrics
    return {
        "prompt": output.prompt,
        "text": output.outputs[0].text,
        "token_ids": output.outputs[0].token_ids,
        "draft_positions": output.outputs[0].draft_positions,
        "finish_reason": output.outputs[0].finish_reason,
        "num_drafts": metrics.num_drafts,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "drafted_per_position": metrics.drafted_per_position,
        "accepted_per_position": metrics.accepted_per_position,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "ttft": metrics.ttft,
        "tpot": metrics.tpot,
    }
