"""`python -m jaxspec chat`: a conversation in the terminal, or with lines from a pipe."""

import argparse
import asyncio
import contextlib
import dataclasses
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from jaxspec.api.async_llm import AsyncLLM
from jaxspec.commands.conversation import Conversation
from jaxspec.engine.errors import ServiceError
from jaxspec.options.arguments import (
    FEW,
    CommandParser,
    add_color,
    add_engine_options,
    add_model,
    add_other_engine_options,
    add_speculation,
    engine_options,
)
from jaxspec.requests.sampling_params import SamplingParams

_WORDS = """\
  /reset         forget the messages
  /system TEXT   set the system prompt; without TEXT, remove it
  /stats         stats of all answers
  /save FILE     write the messages as JSON
  /quit          exit, as Ctrl-D does
  //...          a message that begins with /
Ctrl-C stops an answer; the part so far is kept."""
_LLM_DEFAULTS = {
    "max_num_seqs": 1,
    "enable_prefix_caching": True,
    "background_compilation": False,  # all requests share their sampling features
}


def main(words: Sequence[str]) -> int:
    """Chat until the input ends; return 1 if the model failed on an answer, else 0."""
    args = parser().parse_args(words)
    options = engine_options(args, **_LLM_DEFAULTS)
    is_terminal = sys.stdin.isatty() and sys.stdout.isatty()
    with asyncio.Runner() as runner, _loaded(runner, options) as llm:
        params = _params(args, llm.get_default_sampling_params())
        runner.run(llm.warm_up([params]))
        conversation = Conversation(
            llm,
            params,
            system=args.system_prompt,
            color=args.color,
            is_terminal=is_terminal,
        )
        if is_terminal:
            print(f"{llm.model_name}; /help lists the commands.")
        return _talk(runner, conversation, is_terminal)


def parser() -> argparse.ArgumentParser:
    made = CommandParser(
        prog="python -m jaxspec chat",
        usage="python -m jaxspec chat [options] [MODEL]",
        description="Chat with a model: each line is a message, and a line of stats follows each\n"
        "answer. Earlier messages are read from the prefix cache. Commands in place of a message:\n"
        + _WORDS,
        epilog="exit status: 0 done; 1 the model failed; 2 invalid arguments or input",
    )
    add_model(made)
    made.add_argument("--system-prompt", metavar="TEXT", help="the system prompt (default: none)")
    add_color(made)
    made.add_argument(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens per answer (default: as many as fit)",
    )
    for name, kind, metavar, help in (
        ("temperature", float, "T", "sampling temperature; 0 is greedy"),
        ("seed", int, "N", "seed of the sampling noise"),
    ):
        shown = f"{help} (default: {_DEFAULTS[name]})"
        made.add_argument(f"--{name}", type=kind, metavar=metavar, help=shown)
    add_engine_options(made, *FEW)
    add_speculation(made)
    add_other_engine_options(made)
    return made


_DEFAULTS = {"temperature": "the checkpoint's", "seed": "a new one for each answer"}


def _params(args: argparse.Namespace, own: SamplingParams) -> SamplingParams:
    """Return the checkpoint's default parameters, overridden by the given arguments."""
    given = {name: value for name in _DEFAULTS if (value := getattr(args, name)) is not None}
    return dataclasses.replace(own, **given, max_tokens=args.max_tokens)


@contextlib.contextmanager
def _loaded(runner: asyncio.Runner, options: dict) -> Iterator[AsyncLLM]:
    llm = AsyncLLM(**options)
    try:
        yield llm
    finally:
        runner.run(llm.close())


def _lines(is_terminal: bool) -> Iterator[str]:
    """Yield input lines; at a terminal Ctrl-C discards an unfinished line."""
    if is_terminal:
        with contextlib.suppress(ImportError):  # importing it enables line editing
            importlib.import_module("readline")
    while True:
        try:
            yield input("> " if is_terminal else "")
        except EOFError:
            return
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print("\nCtrl-D or /quit ends.")


def _talk(runner: asyncio.Runner, conversation: Conversation, is_terminal: bool) -> int:
    """Answer each line, or run its slash command; return the exit status."""
    status = 0
    for line in _lines(is_terminal):
        word, _, rest = line.strip().partition(" ")
        if word == "/quit":
            break
        try:
            if word.startswith("/") and not word.startswith("//"):
                _obey(conversation, word, rest.strip())
            elif word:
                is_sound = runner.run(conversation.answer(line.strip()[word.startswith("//") :]))
                status = status if is_sound else 1
        except KeyboardInterrupt:
            if not is_terminal:  # at a terminal, only the answer is stopped
                raise
        except ServiceError as error:
            print(f"jaxspec: {error}", file=sys.stderr)
            return 1
        except (ValueError, OSError) as error:
            print(f"jaxspec: {error}", file=sys.stderr)
    return status


def _obey(conversation: Conversation, word: str, rest: str) -> None:
    """Run a slash command.

    Raises:
        ValueError: the command is unknown, or lacks its file.
        OSError: the file can't be written.
    """

    def save() -> None:
        if not rest:
            raise ValueError("/save needs a file to write to, as in `/save chat.json`.")
        conversation.save(Path(rest))

    def say_system() -> None:
        conversation.system = rest

    words: dict[str, Callable[[], None]] = {
        "/help": lambda: print(_WORDS),
        "/reset": conversation.reset,
        "/save": save,
        "/stats": lambda: print(conversation.stats),
        "/system": say_system,
    }
    if word not in words:
        raise ValueError(f"There is no {word}. /help lists the commands, and // begins a message.")
    words[word]()
