"""Commands: `python -m jaxspec COMMAND ...`. A module each, which is imported when it is asked for.

What names no command is prompts to complete.
"""

import importlib
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """A command: what runs it, what it does, and what it needs."""

    main: str
    """Module and function, which takes the words behind the name and returns the exit status."""
    help: str  # one line
    extra: str | None = None  # of the package, which brings what it imports


COMMANDS = {
    "serve": Command(
        "jaxspec.server.command:main",
        "serve a model by HTTP, as OpenAI's clients know it",
        "server",
    ),
    "run": Command("jaxspec.commands.run:main", "answer a file of requests, one a line", "server"),
    "chat": Command("jaxspec.commands.chat:main", "talk with a model in the terminal"),
    "bench": Command("jaxspec.commands.bench:main", "measure a model's speed on this machine"),
    "inspect": Command(
        "jaxspec.commands.inspect:main", "say what a model is and needs, and whether it runs here"
    ),
    "replay": Command("jaxspec.replay:main", "run again what a flight recorder wrote"),
}
"""The commands by the first word, in the order of the help."""
_COMPLETE = Command("jaxspec.commands.complete:main", "complete prompts")


def run_command(words: Sequence[str]) -> int:
    """Run a command line; its exit status.

    Raises:
        ValueError: the command needs an extra that is not installed; and as the command.
        OSError: as the command.
    """
    name = words[0] if words else ""
    command, rest = (COMMANDS[name], words[1:]) if name in COMMANDS else (_COMPLETE, words)
    module, _, function = command.main.partition(":")
    try:
        main = getattr(importlib.import_module(module), function)
    except ModuleNotFoundError as error:
        if command.extra is None or (error.name or "").partition(".")[0] == "jaxspec":
            raise
        raise ValueError(
            f"`{name}` needs the package {error.name}, which is not installed. It comes with "
            f"`pip install 'jaxspec[{command.extra}]'`."
        ) from error
    return main(rest)


def listing() -> str:
    """The commands for people, a line each."""
    return "\n".join(f"  {name:<9}{command.help}" for name, command in COMMANDS.items())
