"""complete: streamed text, a line of figures, JSON; its errors are in test_messages.py."""

import json
import re

import pytest
from pairwise import soak

from jaxspec.__main__ import main


def test_the_command_streams_text_and_then_one_line_of_stats(capsys, short_model):
    typed = ["def fibonacci(n):", "--max-tokens", "20", "--model", str(short_model)]
    assert main(typed) == 0
    out = capsys.readouterr().out
    assert out.startswith("def fibonacci(n):")
    figures = r"20 tokens, [\d.]+ ms per token, [\d.]+ tokens per verify step, acceptance by .*"
    assert re.fullmatch(figures, out.splitlines()[-1])


@pytest.mark.soak
def test_json_gives_an_object_a_prompt(capsys, tmp_path, short_model):
    typed = ["--json", "--max-tokens", "6", "--model", str(short_model)]
    file = tmp_path / "prompts.txt"
    file.write_text("import os\n\ndef f(x):\n")
    assert main([*typed, "--prompts-file", str(file)]) == 0
    several = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["prompt"] for one in several] == ["import os", "def f(x):"]
    assert main([*typed, "def f(x):"]) == 0
    single = json.loads(capsys.readouterr().out)
    assert single["token_ids"] == several[1]["token_ids"] and single["num_drafts"] > 0
    assert len(single["draft_positions"]) == 6


@pytest.mark.soak
@pytest.mark.parametrize("prompts", [["def f(x):", "import os"], soak(["def f(x):"])])
def test_colours_change_no_text_and_a_legend_says_who_gave_how_much(prompts, capsys, short_model):
    typed = [*prompts, "--max-tokens", "12", "--model", str(short_model)]
    assert main(typed) == 0
    plain = capsys.readouterr().out.splitlines()
    assert main([*typed, "--color"]) == 0
    colored = capsys.readouterr().out
    assert colored.count("\x1b[38;5;16;48;5;151m") > 1  # draft 1, and its name
    lines = re.sub(r"\x1b\[[\d;]+m", "", colored).splitlines()
    legends = [line for line in lines if re.match(r"target \d+ \(\d+%\)   draft 1 \d", line)]
    assert len(legends) == len(prompts)
    for legend in legends:
        assert sum(map(int, re.findall(r"(\d+) \(", legend))) == 12
    figures = [line for line in lines if line not in legends and line][:-1]
    assert figures == [line for line in plain if line][:-1]


@pytest.mark.soak
def test_speculation_can_be_turned_off(capsys, short_model):
    typed = ["import", "--max-tokens", "4", "--num-speculative-tokens", "0", "--verbose"]
    assert main([*typed, "--model", str(short_model)]) == 0
    printed = capsys.readouterr()
    assert "4 tokens" in (last := printed.out.splitlines()[-1])
    assert last.endswith("no speculation")
    head, *parts, total, compiling = printed.err.splitlines()  # --verbose
    assert compiling.startswith("jaxspec: compiling ")
    assert head == "Device memory" and "weights" in {part.split()[0] for part in parts}
    assert re.fullmatch(r"  total +[\d.]+ MiB", total)


@pytest.mark.parametrize(
    ("options", "speculation"),
    [
        ("", "auto"),
        ("--num-speculative-tokens 0", None),
        ("--num-speculative-tokens 2", {"num_speculative_tokens": 2}),
        ("--num-speculative-tokens auto", {"num_speculative_tokens": "auto"}),
        ("--speculative-config ngram", {"method": "ngram"}),
        ("--speculative-config auto", "auto"),
        (
            '--speculative-config {"method":"ngram","prompt_lookup_max":3} '
            "--num-speculative-tokens 2",
            {"method": "ngram", "prompt_lookup_max": 3, "num_speculative_tokens": 2},
        ),
        ("--draft-vocab 9", {"draft_vocab": 9}),
        (
            "--draft-vocab 9 --num-speculative-tokens 2",
            {"num_speculative_tokens": 2, "draft_vocab": 9},
        ),
    ],
)
def test_what_is_said_of_drafts_is_passed_on(options, speculation, monkeypatch):
    seen = []

    def stop_there(model, *, speculative_config, **others):
        seen.append(speculative_config)
        raise KeyboardInterrupt

    monkeypatch.setattr("jaxspec.commands.complete.LLM", stop_there)
    assert main(["x", *options.split()]) == 130
    assert seen == [speculation]
