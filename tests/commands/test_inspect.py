"""inspect: a report, and by its status whether the model runs."""

import re

import pytest
from gguf_files import write_gguf

from jaxspec.__main__ import main


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


@pytest.mark.soak
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
