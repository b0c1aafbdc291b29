"""The command: streamed text, a line of figures, JSON, and errors a person can act on."""

import json
import re

import pytest

from jaxspec.__main__ import main


def test_the_command_streams_text_and_then_one_line_of_figures(capsys):
    assert main(["def fibonacci(n):", "--max-tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def fibonacci(n):")
    figures = r"20 tokens, [\d.]+ ms per token, [\d.]+ tokens per verify step, acceptance by .*"
    assert re.fullmatch(figures, out.splitlines()[-1])


def test_json_gives_an_object_a_prompt(capsys, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("import os\n\ndef f(x):\n")
    assert main(["--json", "--max-tokens", "6", "--prompts-file", str(file)]) == 0
    several = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in several] == ["import os", "def f(x):"]
    assert main(["--json", "--max-tokens", "6", "def f(x):"]) == 0
    single = json.loads(capsys.readouterr().out)
    assert single["token_ids"] == several[1]["token_ids"] and single["num_drafts"] > 0


def test_speculation_can_be_turned_off(capsys):
    assert main(["import", "--max-tokens", "4", "--num-speculative-tokens", "0"]) == 0
    assert "4 tokens" in (last := capsys.readouterr().out.splitlines()[-1])
    assert last.endswith("no speculation")


@pytest.mark.parametrize(
    "args, message",
    [
        ([], "Nothing to complete"),
        (["x", "--temperature", "-1"], "temperature must be"),
        (["x", "--max-tokens", "0"], "max_tokens must be"),
        (["x", "--max-tokens", "5000"], "must fit max_model_len"),
        (["x", "--model", "/no/such/folder"], "no folder"),
        (["x", "--num-speculative-tokens", "99"], "1 to 8"),
        (["x", "--prompts-file", "/no/such/file"], "/no/such/file"),
    ],
)
def test_an_error_is_one_line_that_says_what_to_do(args, message, capsys):
    assert main(args) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("jaxspec: ") and "Traceback" not in error
