"""Arguments shared by several commands: flags, their parsing, and input and output files."""

import argparse
import contextlib
import json
import sys
from pathlib import Path
from typing import Any, BinaryIO, Literal, NoReturn

from jaxspec.checks import shown
from jaxspec.options.engine_options import EngineConfig, default_of, meaning
from jaxspec.plan.step_shapes import MAX_DRAFTS

STANDARD = Path("-")
"""Path that means standard input or output."""
_MAX_FILE_BYTES = 2**28

# Placeholders for the values of `LLM` options in the help; none for one that is true or false.
_METAVARS = {
    "model": "MODEL",
    "revision": "REVISION",
    "load_format": "FORMAT",
    "dtype": "DTYPE",
    "kv_dtype": "DTYPE",
    "state_policy": "POLICY",
    "state_dtype": "DTYPE",
    "max_num_seqs": "N",
    "max_model_len": "N",
    "gpu_memory_utilization": "F",
    "tensor_parallel_size": "N",
    "enable_expert_parallel": "",
}
ENGINE_OPTIONS = (
    *("revision", "dtype", "kv_dtype", "state_policy", "state_dtype"),
    *("max_model_len", "gpu_memory_utilization"),
    *("tensor_parallel_size", "enable_expert_parallel"),
)
"""Options of `LLM`, apart from the model, that determine its memory use."""
FEW = "revision", "dtype", "kv_dtype", "max_model_len", "gpu_memory_utilization"
"""Options of `LLM` that most commands have as flags; others are passed in `--engine-options`."""


class CommandParser(argparse.ArgumentParser):
    """Argument parser that reports each error in one line."""

    def __init__(self, **options: Any):
        """Keep the line breaks of the description."""
        super().__init__(**{"formatter_class": argparse.RawDescriptionHelpFormatter, **options})

    def error(self, message: str) -> NoReturn:
        """Exit with a one-line message instead of the usage."""
        self.exit(2, f"jaxspec: {message}. See {self.prog} --help.\n")


def add_model(parser: Any, help: str = meaning("model")) -> None:
    """Add the model as an optional positional argument."""
    told = f"{help} (default: the embedded model)"
    parser.add_argument("model", nargs="?", metavar="MODEL", help=told)


def add_engine_options(parser: Any, *names: str) -> None:
    """Add options of `LLM` as flags, with their help and defaults from `EngineConfig`."""
    for name in names:
        metavar = _METAVARS[name]
        how: dict[str, Any] = {"action": argparse.BooleanOptionalAction}
        if metavar:
            how = {"type": {"N": int, "F": float}.get(metavar, str), "metavar": metavar}
        help = f"{meaning(name)} (default: {default_of(name)})"
        parser.add_argument(f"--{name.replace('_', '-')}", help=help, **how)


def add_other_engine_options(parser: Any) -> None:
    """Add `--engine-options`, a JSON object with any other options of `LLM`."""
    parser.add_argument(
        "--engine-options",
        default="{}",
        metavar="JSON",
        help="further options of docs/options.md, as a JSON object by name (default: {})",
    )


def add_color(parser: argparse.ArgumentParser) -> None:
    """Add `--color`, which colors each token by its origin."""
    parser.add_argument(
        "--color",
        action="store_true",
        help="color each token by its source: the model, or draft 1, 2, ... (default: off)",
    )


def add_speculation(parser: Any) -> None:
    """Add the flags for speculative decoding."""
    parser.add_argument(
        "--speculative-config",
        metavar="METHOD",
        help="draft method: its name, or a JSON object of the method and its options "
        "(docs/speculation.md; default: the checkpoint's draft head, if it has one)",
    )
    parser.add_argument(
        "--num-speculative-tokens",
        type=_count_or_auto,
        metavar="K",
        help=f"number of drafts per verify step, at most {MAX_DRAFTS}; auto chooses it in each "
        "step; 0 disables speculative decoding (default: set by the method, 3 for a draft head)",
    )
    parser.add_argument(
        "--draft-vocab",
        type=int,
        metavar="N",
        help="draft only the first N token ids: cheaper drafts, fewer of them accepted, the same "
        "text (default: all token ids)",
    )


def _count_or_auto(word: str) -> int | str:
    return word if word == "auto" else int(word)


def engine_options(args: argparse.Namespace, **defaults: Any) -> dict[str, Any]:
    """Return the options of `LLM` given on the command line.

    Args:
        args: The parsed arguments.
        **defaults: Options used where the command line gives none.

    Raises:
        ValueError: `--engine-options` is not a JSON object, has an unknown option or an invalid
            value, or repeats an option given as a flag; or as in `speculation_of`.
    """
    named = {name: each for name, each in vars(args).items() if name in _METAVARS}
    given = {name: each for name, each in named.items() if each is not None}
    speculation = speculation_of(args)
    if speculation != "auto":
        given["speculative_config"] = speculation
    others = _engine_json(args) if hasattr(args, "engine_options") else {}
    if twice := sorted(given.keys() & others.keys()):
        raise ValueError(
            f"{twice[0]} must be given once, got it both in --engine-options and as a flag. Drop "
            "one of the two."
        )
    told = {"model": args.model, "speculative_config": "auto", **defaults, **given, **others}
    try:
        EngineConfig.of(args.model, others)
    except TypeError as error:
        raise ValueError(f"In --engine-options: {error}") from error
    return told


def _engine_json(args: argparse.Namespace) -> dict[str, Any]:
    example = """--engine-options '{"max_num_seqs": 4}'"""
    try:
        found = json.loads(args.engine_options)
    except ValueError as error:
        raise ValueError(
            f"--engine-options must be a JSON object, and this is no JSON: {error}. Write it as in "
            f"{example}."
        ) from error
    if not isinstance(found, dict) or "model" in found:
        raise ValueError(
            "--engine-options must be a JSON object of options, without the model, got "
            f"{shown(found)}. Write it as in {example}."
        )
    return found


def speculation_of(args: argparse.Namespace) -> dict[str, Any] | Literal["auto"] | None:
    """Return the `speculative_config` given on the command line.

    Returns:
        A dict of fields, "auto" if no flag was given, or None for no drafts.

    Raises:
        ValueError: `--speculative-config` is invalid JSON, or a flag specifies drafts although
            `--num-speculative-tokens` is 0.
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
            f"{named} enables drafts, and --num-speculative-tokens 0 disables them. Drop one of "
            "the two."
        )
    return None


def _method(text: str) -> dict[str, Any]:
    """Parse a method's name, or a JSON object with the method and its options."""
    if not text.lstrip().startswith("{"):
        return {"method": text}
    try:
        return json.loads(text)
    except ValueError as error:
        raise ValueError(
            f"--speculative-config must be a method's name or a JSON object, and this is no JSON: "
            f'{error}. Write it as \'{{"method": "ngram"}}\'.'
        ) from error


def text_of(what: str, path: Path) -> str:
    """Read a UTF-8 text file with all line ends as newlines; `-` is standard input.

    Reading stops after 256 MiB, so a pipe or an endless device is safe.

    Args:
        what: Kind of file for error messages, such as "prompts file".
        path: The file, or `STANDARD`.

    Raises:
        ValueError: the file can't be read, is longer, or is not UTF-8.
    """
    name = "standard input" if path == STANDARD else str(path)
    try:
        with _binary(path) as file:
            content = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ValueError(
            f"The {what} {name} can't be read: {error.strerror}. Check the path."
        ) from error
    if len(content) > _MAX_FILE_BYTES:
        raise ValueError(
            f"The {what} {name} must have at most {_MAX_FILE_BYTES:,} bytes, and has more. "
            "Split it."
        )
    try:
        text = content.decode("utf-8-sig")  # some editors write a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(
            f"The {what} {name} must be UTF-8 text, and byte {error.start} is not. Save it "
            "as UTF-8."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _binary(path: Path) -> contextlib.AbstractContextManager[BinaryIO]:
    return contextlib.nullcontext(sys.stdin.buffer) if path == STANDARD else open(path, "rb")


def prompts_in(path: Path) -> list[str]:
    """Return the non-blank lines of a prompts file.

    Raises:
        ValueError: all lines are blank, or as in `text_of`.
    """
    lines = [line for line in text_of("prompts file", path).split("\n") if line.strip()]
    if not lines:
        raise ValueError(f"{path} must hold a prompt on each line, and all its lines are empty.")
    return lines


def begin_output(path: Path) -> None:
    """Create an empty output file, or truncate an existing one.

    Raises:
        ValueError: the file can't be written.
    """
    try:
        path.write_bytes(b"")
    except OSError as error:
        raise ValueError(
            f"The output file {path} can't be written: {error.strerror}. Check the path."
        ) from error
