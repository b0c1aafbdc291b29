"""bench: vLLM's words and keys; figures that agree with each other; repeats find nothing cached."""

import json

import pytest

from jaxspec.__main__ import main

SIZES = ["--input-len", "12", "--output-len", "5", "--dtype", "float32"]
ENGINE = ["--engine-options", '{"decode_buckets": [2], "prefill_buckets": [64]}']


@pytest.mark.soak
@pytest.mark.few(1)
@pytest.mark.parametrize("has_texts", [False, True])
def test_throughput(has_texts, short_model, tmp_path, capsys):
    (tmp_path / "prompts.txt").write_text("def fibonacci(n):\nimport os\n")
    words = ["--num-prompts", "3", "--max-num-seqs", "2", "--output-json", str(tmp_path / "out")]
    words += ["--prompts-file", str(tmp_path / "prompts.txt")] if has_texts else []
    assert main(["bench", "throughput", str(short_model), *words, *SIZES, *ENGINE]) == 0
    printed = capsys.readouterr().out
    found = json.loads((tmp_path / "out").read_text())
    assert found["num_requests"] == 3 and found["max_num_seqs"] == 2
    if not has_texts:
        assert found["total_num_tokens"] == 3 * (12 + 5)
    assert found["requests_per_second"] == pytest.approx(3 / found["elapsed_time"])
    assert found["output_tokens_per_second"] == pytest.approx(15 / found["elapsed_time"])
    assert f"Throughput: {found['requests_per_second']:.2f} requests/s, " in printed
    assert found["mean_acceptance_length"] >= 1 and found["num_drafts"] > 0
    assert f"Drafts: {found['mean_acceptance_length']:.2f} tokens per verify step" in printed
    assert found["model"] == str(short_model) and found["versions"]["jax"]


@pytest.mark.soak
def test_latency(short_model, tmp_path, capsys):
    words = ["--batch-size", "2", "--num-iters", "3", "--output-json", str(tmp_path / "out")]
    words += ["--num-speculative-tokens", "0"]
    assert main(["bench", "latency", str(short_model), *words, *SIZES, *ENGINE]) == 0
    found = json.loads((tmp_path / "out").read_text())
    assert len(found["latencies"]) == 3 and found["max_num_seqs"] == found["batch_size"] == 2
    assert found["avg_latency"] == pytest.approx(sum(found["latencies"]) / 3)
    assert list(found["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    printed = capsys.readouterr().out
    assert printed.startswith(f"Avg latency: {found['avg_latency']:.4f} seconds\n")
    assert "Drafts:" not in printed and found["num_drafts"] == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["latency", "--batch-size", "0"], "--batch-size must be an integer of at least 1, got 0."),
        (["throughput", "--output-len", "-1"], "--output-len must be an integer of at least 1, "),
        (["latency", "--input-len", "2000"], "max_model_len must not exceed the model's 1024 "),
    ],
)
def test_sizes_are_checked_first(words, message, capsys):
    assert main(["bench", *words]) == 2
    assert capsys.readouterr().err.startswith(f"jaxspec: {message}")


@pytest.mark.parametrize("words", [[], ["speed"], ["latency", "--num-prompts", "3"]])
def test_what_is_none_of_its_words_is_one_line(words, capsys):
    with pytest.raises(SystemExit) as left:
        main(["bench", *words])
    (line,) = capsys.readouterr().err.splitlines()
    assert left.value.code == 2 and line.startswith("jaxspec: ")
