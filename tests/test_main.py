"""The entry: Ctrl-C, a pipe that nobody reads, and which command runs."""

import os
import subprocess
import sys

import pytest

from jaxspec import LLM, TextDelta
from jaxspec.__main__ import main


@pytest.fixture
def stream_that(monkeypatch):
    """Let `stream` give a word and then do something else."""

    def patch(then):
        def stream(llm, prompt, params):
            yield TextDelta(" word", [1])
            then()
            yield TextDelta(" more", [2])

        monkeypatch.setattr(LLM, "stream", stream)

    return patch


def test_ctrl_c_ends_the_text_quietly(stream_that, capsys):
    def interrupt():
        raise KeyboardInterrupt

    stream_that(interrupt)
    assert main(["a"]) == 130
    assert capsys.readouterr() == ("a word", "\n")


def test_nobody_reading_any_more_is_no_error(stream_that, monkeypatch, capfd):
    reader, writer = os.pipe()
    stream_that(lambda: os.close(reader))  # as in `python -m jaxspec ... | head -1`
    with open(writer, "w") as pipe, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", pipe)
        assert main(["a"]) == 141
    assert capfd.readouterr() == ("", "")


def test_a_command_gets_the_words_behind_its_name_and_all_else_is_a_prompt(monkeypatch):
    seen = []

    def said(words):
        seen.append(words)
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxspec.commands.replay.main", said)
    monkeypatch.setattr("jaxspec.commands.complete.main", said)
    for words in (["replay", "a"], ["--", "replay"], ["replays"], []):
        assert main(words) == 130
    assert seen == [["a"], ["--", "replay"], ["replays"], []]


def test_the_version_is_told(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--version"])
    assert left.value.code == 0
    assert capsys.readouterr().out.startswith("jaxspec ")


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("complete", ["jaxspec.server", "jaxspec.commands.replay", "fastapi"]),
        ("chat", ["fastapi", "pydantic", "uvicorn"]),
    ],
)
def test_a_command_imports_nothing_of_the_others_and_of_no_extra(module, absent):
    code = f"import sys, jaxspec.__main__, jaxspec.commands.{module} as _; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not set(absent) & set(done.stdout.split())
