"""What the command understands: its options, and the prompts they name."""

import argparse
import json
from pathlib import Path
from typing import Any, Literal, NoReturn

from jaxspec.config import MAX_DRAFTS
from jaxspec.options import OPTIONS, default_of, meaning

_MAX_FILE_BYTES = 2**28  # of prompts
_EXAMPLES = """\
examples:
  python -m jaxspec "def fibonacci(n):"
  python -m jaxspec "import os" "class Stack:" --temperature 0.8 --max-tokens 64 --seed 1
  python -m jaxspec --model Qwen/Qwen3.5-0.8B --prompts-file prompts.txt --json > out.jsonl
  python -m jaxspec "class Stack:" --color
  python -m jaxspec inspect MODEL  (what it is and needs, and whether it runs; `inspect --help`)
  python -m jaxspec serve MODEL    (as a server that OpenAI's clients know; `serve --help`)
  python -m jaxspec replay FILE    (runs what a flight recorder wrote; `replay --help` says more)

exit status: 0 done; 1 the model failed on a prompt; 2 an error in what was asked for
"""

# The options of `LLM` that the command has too, and what stands for their values in its help.
_ENGINE_OPTIONS = {
    "model": "MODEL",
    "revision": "REVISION",
    "dtype": "DTYPE",
    "kv_dtype": "DTYPE",
    "state_policy": "POLICY",
    "state_dtype": "DTYPE",
    "max_model_len": "N",
    "gpu_memory_utilization": "F",
}


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        """One line, as for every other error, not the whole usage."""
        self.exit(2, f"jaxspec: {message}. See {self.prog} --help.\n")


def parser() -> argparse.ArgumentParser:
    """What reads the command line; after an error it ends the process with status 2."""
    parser = CommandParser(
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
    for name, metavar in _ENGINE_OPTIONS.items():
        _add_engine_option(parser, name, metavar)
    _add_sampling(parser)
    add_speculation(parser)
    parser.add_argument(
        "--verbose", action="store_true", help="first print what holds the memory (default: not)"
    )
    parser.add_argument(
        "--color",
        action="store_true",
        help="colour each token by who gave it, the model itself or draft 1, 2, ... (default: not)",
    )
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object a prompt (default: text)"
    )
    return parser


def inspect_parser() -> argparse.ArgumentParser:
    """What reads the command line of `inspect`, as `parser` does."""
    parser = CommandParser(
        prog="python -m jaxspec inspect",
        usage="python -m jaxspec inspect [options] [MODEL]",
        description="Say what a model is, what it takes, how many requests fit on this device,\n"
        "and what would be refused and why. No weights are loaded, and none are downloaded.",
        epilog="exit status: 0 it runs; 1 it is refused; 2 an error in what was asked for",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        help="a folder with config.json, with or without weights; a config.json; a GGUF file; or a "
        "Hugging Face hub id, whose config.json is downloaded (default: the embedded model)",
    )
    for name, metavar in _ENGINE_OPTIONS.items():
        if name != "model":
            _add_engine_option(parser, name, metavar)
    add_speculation(parser)
    return parser


def _add_engine_option(parser: argparse.ArgumentParser, name: str, metavar: str) -> None:
    """An option of `LLM`, with the help and the default that it has there."""
    parser.add_argument(
        f"--{name.replace('_', '-')}",
        type={"N": int, "F": float}.get(metavar, str),
        default=OPTIONS[name].default,
        metavar=metavar,
        help=f"{meaning(name)} (default: {default_of(name)})",
    )


def _add_sampling(parser: argparse.ArgumentParser) -> None:
    """How tokens are chosen, and how many."""
    parser.add_argument(
        "--max-tokens",
        type=int,
        default=128,
        metavar="N",
        help="most tokens to add to a prompt (default: 128)",
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


def add_speculation(parser: Any) -> None:
    """How to draft, and how much."""
    parser.add_argument(
        "--speculative-config",
        metavar="METHOD",
        help="how to draft: a method's name, or a JSON object with the method and what it is told, "
        "as docs/speculation.md says (default: by the checkpoint's own head, if it has one)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=_count_or_auto,
        metavar="K",
        help=f"tokens drafted in each step, up to {MAX_DRAFTS}; auto chooses in each step; 0 turns "
        "speculation off (default: the method's own number, 3 for a draft head)",
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="draft only the first N token ids, which costs less and accepts fewer; the text stays "
        "the same (default: draft any token)",
    )


def _count_or_auto(word: str) -> int | str:
    return word if word == "auto" else int(word)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """What was said of the engine, as `LLM` takes it."""
    options = {name: getattr(args, name) for name in _ENGINE_OPTIONS}
    return options | {"speculative_config": speculation_of(args)}


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
    """The lines of a file that are not blank; it may be a pipe, or a device without an end."""
    try:
        with open(path, "rb") as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"The prompts file {path} can't be read: {error.strerror}. Check the path."
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(
            f"The prompts file {path} must have at most {_MAX_FILE_BYTES:,} bytes, and has more. "
            "Split it."
        )
    try:
        text = content.decode("utf-8-sig")  # some editors write a mark first
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The prompts file {path} must be UTF-8 text, and byte {error.start} is not. Save it "
            "as UTF-8."
        ) from error
    lines = text.replace("\r\n", "\n").replace("\r", "\n").split("\n")
    return [line for line in lines if line.strip()]


def speculation_of(args: argparse.Namespace) -> dict[str, Any] | Literal["auto"] | None:
    """What was said of speculation, as `LLM` takes it.

    Raises:
        ValueError: it is no JSON object, or says what to draft and not to draft.
    """
    names = ("num_speculative_tokens", "draft_vocab")
    fields = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    typed = args.speculative_config
    told = {} if typed in (None, "auto") else _method(typed)
    if fields.get("num_speculative_tokens") != 0:
        return told | fields or "auto"
    if told or args.draft_vocab is not None:
        named = "--speculative-config" if told else "--draft-vocab"
        raise ValueError(
            f"{named} says what to draft, and --num-speculative-tokens 0 not to draft. Drop one of "
            "the two."
        )
    return None


def _method(text: str) -> dict[str, Any]:
    """A method's name, or a JSON object with the method and its options."""
    if not text.lstrip().startswith("{"):
        return {"method": text}
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"--speculative-config must be a method's name or a JSON object, and this is no JSON: "
            f'{error}. Write it as \'{{"method": "ngram"}}\'.'
        ) from error
