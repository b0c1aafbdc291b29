"""`python -m jaxspec "def fibonacci(n):"`: streamed text, then one line of figures.

Other commands are `python -m jaxspec inspect MODEL`, `serve MODEL` and `replay FILE`:
`jaxspec.inspection`, `jaxspec.server.command` and `jaxspec.replay`.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence

from jaxspec import replay
from jaxspec.arguments import engine_options, inspect_parser, parser, prompts_of
from jaxspec.inspection import inspect
from jaxspec.llm import LLM
from jaxspec.outputs import RequestOutput, TextDelta
from jaxspec.painted_text import PaintedText, TokenPieces, ansi, ansi_legend
from jaxspec.request import RequestMetrics
from jaxspec.sampling_params import SamplingParams


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns its exit status: 0; 1 if the model failed on a prompt or is refused, or a replay
    differs; 2 after an error that the user can mend; 130 after Ctrl-C and 141 when nobody reads the
    output any more, as shells count.
    """
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        command = _COMMANDS.get(words[0] if words else "")
        status = _complete(words) if command is None else command(words[1:])
        sys.stdout.flush()  # a closed pipe shows here, not when Python ends
        return status
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the shell's next line starts below the text
        return 130
    except BrokenPipeError:
        # Python flushes standard output once more when it ends.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ValueError, OSError) as error:
        print(f"jaxspec: {error}", file=sys.stderr)
        return 2


def _complete(words: Sequence[str]) -> int:
    """Complete the prompts of a command line; 1 if the model failed on one of them, else 0."""
    failed, total = _run(parser().parse_args(words))
    if not failed:
        return 0
    which = f" for {failed} of {total} prompts" if total > 1 else ""
    print(
        f"jaxspec: the model gave no finite logits (scores of the next token){which}, so the text "
        "ends early. Its weights may be damaged, or their values too large for the dtype: "
        "download them again, or try --dtype float32.",
        file=sys.stderr,
    )
    return 1


def _inspect(words: Sequence[str]) -> int:
    """Report on the model of a command line; 1 if it is refused, else 0."""
    args = inspect_parser().parse_args(words)
    found = inspect(**engine_options(args))
    print(found)
    return 1 if found.refused else 0


def _serve(words: Sequence[str]) -> int:
    """Serve the model of a command line, if the extra `server` is installed."""
    try:
        from jaxspec.server.command import main as serve
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "jaxspec":
            raise
        raise ValueError(
            f"`serve` needs the package {error.name}, which is not installed. It comes with "
            "`pip install 'jaxspec[server]'`."
        ) from error
    return serve(words)


# By the first word; any other is a prompt.
_COMMANDS = {"inspect": _inspect, "replay": replay.main, "serve": _serve}


def _run(args: argparse.Namespace) -> tuple[int, int]:
    """Complete the prompts; how many the model failed on, and how many there were."""
    prompts = prompts_of(args)
    if args.json and args.color:
        raise ValueError("--color is for text, and --json prints none. Drop one of the two.")
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
    )
    llm = LLM(**engine_options(args), max_num_seqs=min(len(prompts), 8))
    if args.verbose:
        print(f"The device holds\n{llm.memory_map()}", file=sys.stderr)
    if len(prompts) == 1 and not args.json:
        reasons = [_stream(llm, prompts[0], params, color=args.color)]
    else:
        reasons = _batch(llm, prompts, params, as_json=args.json, color=args.color)
    return reasons.count("error"), len(prompts)


def _stream(llm: LLM, prompt: str, params: SamplingParams, *, color: bool) -> str | None:
    """Print a completion as it comes; why it ended."""
    stream = llm.stream(prompt, params)  # compiles before it returns
    print(prompt, end="", flush=True)
    started, num_tokens, reason = time.perf_counter(), 0, None
    positions = list[int]()
    pieces = TokenPieces(llm.tokenizer) if color and llm.tokenizer else None
    for delta in stream:
        positions += delta.draft_positions
        num_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        print(delta.text if pieces is None else _painted(pieces, delta), end="", flush=True)
        if delta.metrics is not None:
            seconds = time.perf_counter() - started
            legend = f"{ansi_legend(positions)}\n" if color else ""
            print(f"\n\n{legend}{summary(delta.metrics, num_tokens, seconds)}")
    return reason


def _painted(pieces: TokenPieces, delta: TextDelta) -> str:
    """What a delta adds to a text in colours."""
    new = pieces.push(delta.token_ids, delta.draft_positions)
    return ansi(new + pieces.flush() if delta.finish_reason else new)


def _batch(
    llm: LLM, prompts: list[str], params: SamplingParams, *, as_json: bool, color: bool
) -> list[str | None]:
    """Print all completions when they are done; why each ended."""
    outputs = llm.generate(prompts, params)
    # The engine's own times, which leave out what compiling took.
    parts = ("plan_time", "dispatch_time", "wait_time", "collect_time")
    seconds = sum(llm.metrics()[part] for part in parts)
    for output in outputs:
        if as_json:
            print(json.dumps(_as_dict(output)))
        elif color:
            print(f"{PaintedText.of(output, llm.tokenizer)}\n{'-' * 60}")
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


def summary(metrics: RequestMetrics, num_tokens: int, seconds: float) -> str:
    """One line: tokens, tokens a verify step, acceptance by position, milliseconds a token."""
    if not num_tokens:
        return "0 tokens"
    line = f"{num_tokens} tokens, {1000 * seconds / num_tokens:.2f} ms per token"
    if not metrics.num_drafts:
        return f"{line}, no speculation"
    rates = " ".join(f"{n / metrics.num_drafts:.2f}" for n in metrics.accepted_per_position)
    return (
        f"{line}, {metrics.mean_acceptance_length:.2f} tokens per verify step, "
        f"acceptance by position {rates}"
    )


if __name__ == "__main__":
    sys.exit(main())
