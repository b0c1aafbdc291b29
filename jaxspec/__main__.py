"""`python -m jaxspec "def fibonacci(n):"`: streamed text, then one line of figures."""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, NoReturn

from jaxspec.llm import LLM
from jaxspec.outputs import RequestOutput
from jaxspec.request import RequestMetrics, SamplingParams

EXAMPLES = """\
examples:
  python -m jaxspec "def fibonacci(n):"
  python -m jaxspec "import os" "class Stack:" --temperature 0.8 --max-tokens 64 --seed 1
  python -m jaxspec --model Qwen/Qwen3.5-0.8B --prompts-file prompts.txt --json > out.jsonl

exit status: 0 done; 1 the model failed on a prompt; 2 an error in what was asked for
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns its exit status: 0; 1 if the model failed on a prompt; 2 after an error that the user
    can mend; 130 after Ctrl-C and 141 when nobody reads the output any more, as shells count.
    """
    args = _parser().parse_args(argv)
    try:
        failed, total = _run(args)
        sys.stdout.flush()  # a closed pipe shows here, not when Python ends
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


def _run(args: argparse.Namespace) -> tuple[int, int]:
    """Complete the prompts; how many the model failed on, and how many there were."""
    prompts = _prompts(args)
    params = SamplingParams(
        temperature=args.temperature, max_tokens=args.max_tokens, seed=args.seed
    )
    llm = LLM(
        args.model,
        speculative_config=_speculation(args),
        dtype=args.dtype,
        kv_dtype=args.kv_dtype,
        state_policy=args.state_policy,
        state_dtype=args.state_dtype,
        max_num_seqs=min(len(prompts), 8),
        max_model_len=args.max_model_len,
    )
    if len(prompts) == 1 and not args.json:
        reasons = [_stream(llm, prompts[0], params)]
    else:
        reasons = _batch(llm, prompts, params, as_json=args.json)
    return reasons.count("error"), len(prompts)


def _speculation(args: argparse.Namespace) -> dict[str, int] | Literal["auto"] | None:
    """What of speculation was asked for."""
    asked = {"num_speculative_tokens": args.num_speculative_tokens, "draft_vocab": args.draft_vocab}
    asked = {name: value for name, value in asked.items() if value is not None}
    return None if asked.get("num_speculative_tokens") == 0 else asked or "auto"


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other error, not the whole usage."""
        self.exit(2, f"jaxspec: {message}. See python -m jaxspec --help.\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="python -m jaxspec",
        usage="python -m jaxspec [options] PROMPT ...",
        description="Complete prompts with a hybrid LLM and speculative decoding. One prompt is\n"
        "printed as it is completed, several when all are done; then comes a line of figures.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )

    parser.add_argument(
        "prompts",
        nargs="*",
        metavar="PROMPT",
        help="texts to complete; write -- before one that starts with a dash",
    )
    parser.add_argument(
        "--prompts-file",
        type=Path,
        metavar="FILE",
        help="a UTF-8 text file with one prompt a line (default: none)",
    )
    parser.add_argument(
        "--model", help="a folder or a Hugging Face hub id (default: the embedded model)"
    )
    parser.add_argument(
        "--dtype",
        default="auto",
        help="float32, bfloat16 or auto: bfloat16 on a GPU, float32 elsewhere (default: auto)",
    )
    _add_caches(parser)
    _add_limits(parser)
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a prompt (default: text)"
    )
    return parser


def _add_caches(parser: argparse.ArgumentParser) -> None:
    """What is kept between steps, and how."""
    parser.add_argument(
        "--kv-dtype",
        metavar="DTYPE",
        help="of keys and values: bfloat16 or float8_e4m3fn (default: as --dtype)",
    )
    parser.add_argument(
        "--state-policy",
        default="snapshot",
        metavar="POLICY",
        help="of recurrent states: snapshot keeps one a drafted token, replay one a prompt and "
        "what leads from it to the others (default: snapshot)",
    )
    parser.add_argument(
        "--state-dtype",
        default="float32",
        metavar="DTYPE",
        help="of recurrent states: float32, float16 or bfloat16 (default: float32)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """The options that are numbers."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="most tokens to add to a prompt (default: 128)",
    )
    parser.add_argument(
        "--max-model-len",
        type=int,
        metavar="N",
        help="most tokens of a prompt and its completion together (default: as many as the model "
        "was made for, but not above 8192)",
    )
    parser.add_argument(
        "--temperature",
        type=float,
        default=0.0,
        metavar="T",
        help="0 takes the likeliest token; 1 draws with the model's own probabilities, less is "
        "tamer, more is wilder (default: 0)",
    )
    parser.add_argument(
        "--seed",
        type=int,
        metavar="N",
        help="another seed draws other tokens (default: a fixed one)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="tokens drafted in each step, up to 8; 0 turns speculation off (default: 3 if the "
        "checkpoint has a draft head, else 0)",
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="draft only the first N token ids, which costs less and accepts fewer; the text stays "
        "the same (default: draft any token)",
    )


def _prompts(args: argparse.Namespace) -> list[str]:
    prompts, path = list(args.prompts), args.prompts_file
    if path is not None:
        lines = _lines(path)
        if not lines:
            raise ValueError(
                f"{path} must hold a prompt on each line, and all its lines are empty."
            )
        prompts += lines
    if not prompts:
        raise ValueError(
            'Nothing to complete: give a prompt, as in `python -m jaxspec "def f(x):"`.'
        )
    return prompts


def _lines(path: Path) -> list[str]:
    """The lines of a file that are not blank."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # some editors write a mark first
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The prompts file {path} must be UTF-8 text, and byte {error.start} is not. Save it "
            "as UTF-8."
        ) from error
    except OSError as error:
        raise ValueError(
            f"The prompts file {path} can't be read: {error.strerror}. Check the path."
        ) from error
    return [line for line in text.split("\n") if line.strip()]


def _stream(llm: LLM, prompt: str, params: SamplingParams) -> str | None:
    """Print a completion as it comes; why it ended."""
    stream = llm.stream(prompt, params)  # compiles before it returns
    print(prompt, end="", flush=True)
    started, num_tokens, reason = time.perf_counter(), 0, None
    for delta in stream:
        num_tokens += len(delta.token_ids)
        reason = delta.finish_reason
        print(delta.text, end="", flush=True)
        if delta.metrics is not None:
            seconds = time.perf_counter() - started
            print(f"\n\n{summary(delta.metrics, num_tokens, seconds)}")
    return reason


def _batch(
    llm: LLM, prompts: list[str], params: SamplingParams, *, as_json: bool
) -> list[str | None]:
    """Print all completions when they are done; why each ended."""
    outputs = llm.generate(prompts, params)
    # The engine's own times, which leave out what compiling took.
    parts = ("plan_time", "dispatch_time", "wait_time", "collect_time")
    seconds = sum(llm.metrics()[part] for part in parts)
    for output in outputs:
        if as_json:
            print(json.dumps(_as_dict(output)))
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
