"""The command: streamed text, a line of figures, JSON; its errors are in test_messages.py."""

import json
import os
import re
import sys

import pytest
from gguf_files import write_gguf

from jaxspec import LLM, TextDelta
from jaxspec.__main__ import main


def test_the_command_streams_text_and_then_one_line_of_figures(capsys):
    assert main(["def fibonacci(n):", "--max-tokens", "20"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("def fibonacci(n):")
    figures = r"20 tokens, [\d.]+ ms per token, [\d.]+ tokens per verify step, acceptance by .*"
    assert re.fullmatch(figures, out.splitlines()[-1])


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


@pytest.mark.parametrize("prompts", [["def f(x):"], ["def f(x):", "import os"]])
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


def test_speculation_can_be_turned_off(capsys, short_model):
    typed = ["import", "--max-tokens", "4", "--num-speculative-tokens", "0", "--verbose"]
    assert main([*typed, "--model", str(short_model)]) == 0
    printed = capsys.readouterr()
    assert "4 tokens" in (last := printed.out.splitlines()[-1])
    assert last.endswith("no speculation")
    head, weights, *_, total, compiling = printed.err.splitlines()  # --verbose
    assert compiling.startswith("jaxspec: compiling ")
    assert head == "The device holds" and weights.split()[0] == "weights"
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

    monkeypatch.setattr("jaxspec.__main__.LLM", stop_there)
    assert main(["x", *options.split()]) == 130
    assert seen == [speculation]


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


def test_inspect_reports_on_a_model_and_says_by_its_status_whether_it_runs(capsys, tmp_path):
    assert main(["inspect"]) == 0
    assert capsys.readouterr().out.startswith("the embedded model: Qwen3_5ForCausalLM\n")
    config = tmp_path / "config.json"
    config.write_text('{"architectures": ["GPT2LMHeadModel"]}')
    assert main(["inspect", str(config)]) == 1
    printed = capsys.readouterr()
    assert "REFUSED, for 1 reason:" in printed.out and printed.err == ""
    assert main(["inspect", str(tmp_path / "absent")]) == 2
    printed = capsys.readouterr()
    assert (
        printed.out == ""
        and "must be a folder, a GGUF file or a Hugging Face hub id" in printed.err
    )


def test_a_gguf_file_is_inspected_and_generates(capsys, tmp_path):
    path = str(write_gguf("llama", tmp_path / "model.gguf", "Q8_0"))
    assert main(["inspect", path]) == 0
    assert "metadata and the headers of" in (report := capsys.readouterr().out)
    assert "LlamaForCausalLM" in report and "Q8_0" in report
    assert main(["hello", "--model", path, "--max-tokens", "4"]) == 0
    assert "4 tokens, " in capsys.readouterr().out


def test_inspect_takes_the_options_of_an_engine(capsys):
    typed = "inspect --dtype bfloat16 --state-policy replay --num-speculative-tokens 1"
    assert main([*typed.split(), "--max-model-len", "200"]) == 0
    report = capsys.readouterr().out
    assert "bfloat16 keys and values" in report and "with 1 draft," in report
    assert "(replay, float32)" in report and re.search("^ +200 ", report, re.MULTILINE)
    with pytest.raises(SystemExit) as end:
        main(["inspect", "--max-tokens", "3"])
    assert end.value.code == 2
    assert "See python -m jaxspec inspect --help." in capsys.readouterr().err
