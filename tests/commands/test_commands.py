"""The table of commands: each can be asked for help, which fits a screen and is in the docs."""

import importlib

import pytest

from jaxspec.commands import COMMANDS, listing
from tools.docs import commands as page


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_is_a_function_of_a_module(name):
    module, _, function = COMMANDS[name].main.partition(":")
    assert callable(getattr(importlib.import_module(module), function))
    assert page.help_of([name]).startswith(f"usage: python -m jaxspec {name} ")


def test_a_line_tells_what_a_command_does():
    lines = listing().splitlines()
    assert [line.split()[0] for line in lines] == list(COMMANDS)
    assert all(len(line) <= 72 for line in lines)


@pytest.mark.parametrize(
    "words",
    [["run"], ["chat"], ["bench"], ["bench", "latency"], ["bench", "throughput"], ["inspect"]],
    ids=" ".join,
)
def test_a_command_has_help_that_fits_a_screen(words):
    lines = page.help_of(words).splitlines()
    assert len(lines) <= 52 and max(map(len, lines)) <= 100
    assert "exit status: 0 " in lines[-1]


def test_the_page_is_what_the_commands_say(monkeypatch, tmp_path, capsys):
    assert page.PATH.read_text() == page.page(), f"Run `{page.COMMAND}`."
    monkeypatch.setattr(page, "PATH", tmp_path / "commands.md")
    monkeypatch.setattr("sys.argv", ["commands.py", "--check"])
    assert page.main() == 1 and page.COMMAND in capsys.readouterr().err
    monkeypatch.setattr("sys.argv", ["commands.py"])
    assert page.main() == 0 and page.PATH.read_text() == page.page()
