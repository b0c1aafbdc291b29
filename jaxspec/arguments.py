"""What the command understands: its options, and the prompts they name."""

import argparse
from pathlib import Path
from typing import Literal, NoReturn

_EXAMPLES = """\
examples:
  python -m jaxspec "def fibonacci(n):"
  python -m jaxspec "import os" "class Stack:" --temperature 0.8 --max-tokens 64 --seed 1
  python -m jaxspec --model Qwen/Qwen3.5-0.8B --prompts-file prompts.txt --json > out.jsonl

exit status: 0 done; 1 the model failed on a prompt; 2 an error in what was asked for
"""


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        """One line, as for every other error, not the whole usage."""
        self.exit(2, f"jaxspec: {message}. See python -m jaxspec --help.\n")


def parser() -> argparse.ArgumentParser:
    """What reads the command line; after an error it ends the process with status 2."""
    parser = _Parser(
        prog="python -m jaxspec",
        usage="python -m jaxspec [options] PROMPT ...",
        description="Complete prompts with a hybrid LLM and speculative decoding. One prompt is\n"
        "printed as it is completed, several when all are done; then comes a line of figures.",
        epilog=_EXAMPLES,
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
        "--verbose", action="store_true", help="first print what holds the memory (default: not)"
    )
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
        default="auto",
        metavar="POLICY",
        help="of recurrent states: snapshot keeps one a drafted token, replay one a prompt and "
        "what leads from it to the others; auto: replay where kernels run (default: auto)",
    )
    parser.add_argument(
        "--state-dtype",
        default="float32",
        metavar="DTYPE",
        help="of recurrent states: float32, float16 or bfloat16 (default: float32)",
    )
    parser.add_argument(
        "--gpu-memory-utilization",
        type=float,
        default=0.9,
        metavar="F",
        help="share of a GPU's memory, of what JAX may take, for weights and caches (default: 0.9)",
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


def prompts_of(args: argparse.Namespace) -> list[str]:
    """The prompts typed, then those of the file.

    Raises:
        ValueError: there is none, or the file can't be read.
    """
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


def speculation_of(args: argparse.Namespace) -> dict[str, int] | Literal["auto"] | None:
    """What of speculation was asked for, as `LLM` takes it."""
    asked = {"num_speculative_tokens": args.num_speculative_tokens, "draft_vocab": args.draft_vocab}
    asked = {name: value for name, value in asked.items() if value is not None}
    if asked.get("num_speculative_tokens") != 0:
        return asked or "auto"
    if args.draft_vocab is not None:
        raise ValueError(
            "--draft-vocab says what to draft, and --num-speculative-tokens 0 not to draft. Drop "
            "one of the two."
        )
    return None
