"""Commands of `python -m jaxspec COMMAND ...`, one module each, imported only when it runs.

Without a command name, the arguments are prompts to complete.
"""

import importlib
from collections.abc import Sequence
from typing import NamedTuple


class Command(NamedTuple):
    """Entry point, help text and dependencies of a command."""

    main: str
    """`module:function`; the function takes the arguments and returns the exit status."""
    help: str  # one line, for --help
    extra: str | None = None  # package extra with its dependencies


COMMANDS = {
    "serve": Command(
        "jaxspec.server.command:main",
        "serve a model over HTTP with OpenAI's and Anthropic's APIs",
        "server",
    ),
    "run": Command(
        "jaxspec.commands.run:main", "answer a file of requests, one per line", "server"
    ),
    "chat": Command("jaxspec.commands.chat:main", "chat with a model in the terminal"),
    "bench": Command("jaxspec.commands.bench:main", "measure a model's speed on this machine"),
    "inspect": Command(
        "jaxspec.commands.inspect:main", "report a model's structure, memory and support"
    ),
    "replay": Command("jaxspec.commands.replay:main", "run the steps of a recorded flight again"),
}
"""Commands by name, in the order of the help."""
_COMPLETE = Command("jaxspec.commands.complete:main", "complete prompts")


def run_command(words: Sequence[str]) -> int:
    """Run a command line and return its exit status.

    Raises:
        ValueError: the command needs an extra that is not installed, or the command raised it.
        OSError: the command raised it.
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
    """Return the help text of all commands, one line per command."""
    return "\n".join(f"  {name:<9}{command.help}" for name, command in COMMANDS.items())
