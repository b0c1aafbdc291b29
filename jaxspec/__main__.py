"""`python -m jaxspec "def fibonacci(n):"`: streamed text, then one line of figures."""

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from jaxspec.llm import LLM
from jaxspec.outputs import RequestOutput
from jaxspec.request import RequestMetrics, SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; the exit status: 0, or 2 after an error that the user can mend."""
    args = _parser().parse_args(argv)
    try:
        prompts = _prompts(args)
        params = SamplingParams(
            temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
        )
        drafts = args.num_speculative_tokens
        speculative = {"num_speculative_tokens": drafts} if drafts else None
        llm = LLM(
            args.model,
            speculative_config="auto" if drafts is None else speculative,
            max_num_seqs=min(len(prompts), 8),
        )
        if len(prompts) == 1 and not args.json:
            _stream(llm, prompts[0], params)
        else:
            _batch(llm, prompts, params, as_json=args.json)
    except (ValueError, OSError) as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m jaxspec",
        description="Complete prompts with a hybrid LLM and speculative decoding.",
    )
    parser.add_argument("prompts", nargs="*", metavar="PROMPT", help="texts to complete")
    parser.add_argument("--model", help="folder or hub id (default: the embedded model)")
    parser.add_argument("--max-tokens", type=int, default=128, help="tokens to make (default 128)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0 is greedy, the default")
    parser.add_argument("--seed", type=int, help="of the sampling noise")
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="drafts a step, 0 turns speculation off (default: 3 if the model has a draft head)",
    )
    parser.add_argument("--prompts-file", type=Path, help="a file with one prompt a line")
    parser.add_argument("--json", action="store_true", help="one JSON object a prompt")
    return parser


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts = list(args.prompts)
    if args.prompts_file:
        lines = args.prompts_file.read_text(encoding="utf-8").splitlines()
        prompts += [line for line in lines if line.strip()]
    if not prompts:
        raise ValueError(
            'Nothing to complete: give a prompt, as in `python -m jaxspec "def f(x):"`.'
        )
    return prompts


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> None:
    stream = llm.stream(prompt, params)  # compiles before it returns
    print(prompt, end="", flush=True)
    started, num_tokens = time.perf_counter(), 0
    for delta in stream:
        num_tokens += len(delta.token_ids)
        print(delta.text, end="", flush=True)
        if delta.metrics is not None:
            seconds = time.perf_counter() - started
            print(f"\n\n{summary(delta.metrics, num_tokens, seconds)}")


def _batch(llm: LLM, prompts: list[str], params: SamplingParams, *, as_json: bool) -> None:
    llm.warm_up([params.variant])
    started = time.perf_counter()
    outputs = llm.generate(prompts, params)
    seconds = time.perf_counter() - started
    if as_json:
        for output in outputs:
            print(json.dumps(_as_dict(output)))
        return
    for output in outputs:
        print(f"{output.prompt}{output.outputs[0].text}\n{'-' * 60}")
    total = RequestMetrics.total([output.metrics for output in outputs])
    print(summary(total, sum(len(o.outputs[0].token_ids) for o in outputs), seconds))


def _as_dict(output: RequestOutput) -> dict[str, object]:
    metrics = output.metrics
    return {
        "prompt": output.prompt,
        "text": output.outputs[0].text,
        "token_ids": output.outputs[0].token_ids,
        "finish_reason": output.outputs[0].finish_reason,
        "num_drafts": metrics.num_drafts,
        "num_draft_tokens": metrics.num_draft_tokens,
        "num_accepted_tokens": metrics.num_accepted_tokens,
        "accepted_per_position": metrics.accepted_per_position,
        "mean_acceptance_length": metrics.mean_acceptance_length,
        "ttft": metrics.ttft,
        "tpot": metrics.tpot,
    }


def summary(metrics: RequestMetrics, num_tokens: int, seconds: float) -> str:
    """One line: tokens, tokens a verify step, acceptance by position, milliseconds a token."""
    line = f"{num_tokens} tokens, {1000 * seconds / max(num_tokens, 1):.2f} ms per token"
    if not metrics.num_drafts:
        return f"{line}, no speculation"
    rates = " ".join(f"{n / metrics.num_drafts:.2f}" for n in metrics.accepted_per_position)
    return (
        f"{line}, {metrics.mean_acceptance_length:.2f} tokens per verify step, "
        f"acceptance by position {rates}"
    )


if __name__ == "__main__":
    sys.exit(main())
