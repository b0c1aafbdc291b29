"""The acceptance run: a tiny model on a CPU, and what it makes of outputs, errors and time."""

import dataclasses
import importlib
import itertools
import json
import sys
import types
from pathlib import Path

import jax.numpy as jnp
import pytest

from benchmarks.published.gemma import GEMMA_MODELS
from jaxspec import RequestMetrics, RequestOutput, SamplingParams, inspect
from jaxspec.models import unread_model_or_head
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import CompletionOutput

tables = importlib.import_module("benchmarks.report.tables")
features = importlib.import_module("benchmarks.acceptance.features")
job = importlib.import_module("benchmarks.acceptance.job")
command = importlib.import_module("benchmarks.acceptance.__main__")
SMALL = "--rows 2 --prompt 24 --tokens 4 --chunk 32 --processes 1"


def accept(monkeypatch, file, arguments):
    """The rows of a run of the tiny model by part and feature."""
    monkeypatch.setenv("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")
    given = [*arguments, *SMALL.split(), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", ["acceptance", *given])
    command.main()
    return {(row["part"], row["feature"]): row for row in json.loads(file.read_text())["results"]}


@pytest.mark.soak
def test_a_part_of_a_tiny_model_has_its_rows(monkeypatch, tmp_path, capsys):
    arguments = ["--only", "tiny", "--parts", "without drafts"]
    rows = accept(monkeypatch, tmp_path / "accepted.json", arguments)
    assert list(rows) == [("without drafts", "greedy"), ("without drafts", "part")]
    row = rows["without drafts", "greedy"]
    assert row["model"] == "tiny" and row["tokens_per_sample"] == 5
    assert row["ready_seconds"] > 0 and "ms_per_token" in row
    assert not {"error", "skipped"} & row.keys()


@pytest.mark.soak
def test_logits_processors_have_a_row(monkeypatch, tmp_path, capsys):
    arguments = ["--only", "tiny-all", "--parts", "logits processors"]
    rows = accept(monkeypatch, tmp_path / "accepted.json", arguments)
    row = rows["logits processors", features.PROCESSED.name]
    assert row["tokens_per_sample"] == 5 and "ms_per_token" in row


@pytest.mark.soak
def test_the_longest_parts_of_a_tiny_model_have_their_rows(monkeypatch, tmp_path, capsys):
    file, parts = tmp_path / "accepted.json", [*job.PARTS, "float8 weights and activations"]
    arguments = ["--only", "tiny-all", "--seconds", "1500", "--parts", *parts]
    try:
        accept(monkeypatch, file, arguments)
    except SystemExit as end:  # an engine without the fixed samplers compiles in calls
        assert "rows have errors" in str(end)
    rows = json.loads(file.read_text())["results"]
    errors = [row["error"] for row in rows if "error" in row]
    assert all("while a request waited" in error for error in errors)
    found = {(row["part"], row["feature"]): row for row in rows}
    assert {("features", feature.name) for feature in features.FULL_TABLE} <= found.keys()
    assert {part for part, _ in found} == set(parts)
    for name in ("drafts and none", "kernels and XLA", "n-gram drafts and none"):
        row = found["exact", name]
        assert row["differing"] == 0 and row["identical"] + row["ties"] == row["generations"] > 0
    assert found["exact", "n-gram drafts and none"]["drafts_accepted"] > 50
    assert found["exact", "generate and score"]["largest_difference"] < 1e-4
    assert found["serving", "kept prefix"]["cached_tokens"] > 0
    assert found["serving", "HTTP"]["clients"] == 64


@pytest.mark.soak
@pytest.mark.devices
@pytest.mark.parametrize(
    ("count", "name", "parts"),
    [
        ("2", "tiny", ["exact on two devices", "two devices"]),
        ("4", "tiny-of-four", ["exact on four devices"]),
    ],
)
def test_devices_have_the_tokens_of_one_and_all_features(
    count, name, parts, monkeypatch, tmp_path, capsys
):
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", count)
    arguments = ["--only", name, "--parts", *parts, "--seconds", "1500"]
    try:
        found = accept(monkeypatch, tmp_path / "accepted.json", arguments)
    except SystemExit as end:  # an engine without the fixed samplers compiles in calls
        assert "rows have errors" in str(end)
        rows = json.loads((tmp_path / "accepted.json").read_text())["results"]
        found = {(row["part"], row["feature"]): row for row in rows}
    row = found[parts[0], "devices and one"]
    assert row["differing"] == 0 and row["identical"] + row["ties"] == row["generations"] > 0
    for part, feature in itertools.product(parts[1:], features.SHORT_TABLE):
        assert "ms_per_token" in found[part, feature.name]


@pytest.mark.soak
@pytest.mark.parametrize(("part", "count"), [("exact in float8", 5), ("exact in 4 bits", 4)])
def test_quantised_folders_have_the_tokens_of_their_weights(
    part, count, monkeypatch, tmp_path, capsys
):
    arguments = ["--only", "tiny", "--parts", part, "--seconds", "1500"]
    found = accept(monkeypatch, tmp_path / "accepted.json", arguments)
    names = [name for _, name in found if name.endswith(("and none", "and dequantised"))]
    assert len(names) == count
    for name in names:
        row = found[part, name]
        if name.endswith("dequantised"):
            assert 0 < row["held_error"] == row["dequantised_error"]  # without a kernel
            continue
        assert row["differing"] == 0 and row["identical"] + row["ties"] == row["generations"] > 0
    assert {found[part, name]["held_gb"] for _, name in found if "held" in name[-4:]}


@pytest.mark.soak
def test_a_deterministic_engine_scores_what_it_generates(monkeypatch, tmp_path, capsys):
    arguments = ["--only", "tiny", "--parts", "deterministic", "--seconds", "1500"]
    found = accept(monkeypatch, tmp_path / "accepted.json", arguments)
    assert found["deterministic", "generate and score"]["largest_difference"] == 0.0


@pytest.mark.soak
def test_weights_in_float8_have_rows_of_features(monkeypatch, tmp_path, capsys):
    arguments = ["--only", "tiny", "--parts", "features in float8", "--seconds", "1500"]
    try:
        accept(monkeypatch, tmp_path / "accepted.json", arguments)
    except SystemExit as end:  # an engine without the fixed samplers compiles in calls
        assert "rows have errors" in str(end)
    rows = json.loads((tmp_path / "accepted.json").read_text())["results"]
    timed = {row["feature"] for row in rows if "ms_per_token" in row}
    assert {feature.name for feature in features.SHORT_TABLE} <= timed


def few_ids(model, **sizes):
    config = GEMMA_MODELS[model].small(4)
    config["text_config"] |= {"vocab_size": 512, "vocab_size_per_layer_input": 512}
    return config


@pytest.mark.soak
def test_the_folder_of_an_assistant_has_weights_beside_those_of_any_form(monkeypatch):
    """And an engine accepts both, held as published or dequantised."""
    exact = importlib.import_module("benchmarks.acceptance.exact")
    rows = types.SimpleNamespace(job=types.SimpleNamespace(model="gemma-4-e2b", is_small=True))
    monkeypatch.setattr(exact, "config_of", few_ids)
    for write in (exact.write_float8_weights, exact.write_int4_weights):
        with exact._written(rows, write) as folder:
            drafts = exact.drafts_of("gemma-4-e2b", folder)
            with unread_model_or_head(Path(drafts["model"]), jnp.dtype("bfloat16")) as found:
                assert found.read().draft_method == "assistant"
            for quantization in (None, "dequantise"):
                options = {"dtype": "bfloat16", "quantization": quantization}
                found = inspect(folder, speculative_config=drafts, **options)
                assert found.refused == () and found.num_drafts == 3


def test_a_part_that_fails_or_has_no_time_is_listed_and_ends_no_other(
    monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(command, "_CHILD", "print('x' * 9, file=__import__('sys').stderr); exit(3)")
    file = tmp_path / "accepted.json"
    with pytest.raises(SystemExit, match="2 rows have errors"):
        accept(monkeypatch, file, ["--only", "tiny", "qwen3-8b", "--parts", "features"])
    rows = json.loads(file.read_text())["results"]
    assert [row["error"] for row in rows if "error" in row] == ["x" * 9] * 2
    accept(monkeypatch, file, ["--only", "tiny", "--parts", "exact", "--seconds", "0"])
    written = json.loads(file.read_text())
    assert [row["model"] for row in written["results"] if "error" in row] == ["tiny", "qwen3-8b"]
    failures = tables.TABLES["not accepted"](written)
    assert "| tiny | exact | all | skipped: no time |" in failures
    assert "| qwen3-8b | features | all | xxxxxxxxx |" in failures


def test_parts_come_by_weight():
    planned = command.planned(["tiny", "tiny-all"], None)
    assert planned[:3] == [("tiny-all", part) for part in job.PARTS], "the long ones"
    assert planned[3:5] == [("tiny", "features"), ("tiny", "exact")]
    assert planned[5:7] == [("tiny", "without drafts"), ("tiny-all", "without drafts")]
    assert len(planned) == len(job.LIGHT_PARTS) + len(job.PARTS) + len(job.OPTIONS)
    before = frozenset({("tiny-all", "features"), ("tiny", "features")})
    again = command.planned(["tiny", "tiny-all"], None, before)
    assert set(again[-2:]) == before and sorted(again) == sorted(planned)


def test_a_later_call_completes_the_file_of_an_earlier_one(tmp_path):
    def row(part, **others):
        return {"model": "tiny", "part": part, "feature": "all"} | others

    file = tmp_path / "accepted.json"
    known = [row("features", ms=1.0), row("exact", skipped="no time"), row("serving", error="x")]
    file.write_text(json.dumps({"results": known}))
    assert command.accepted(file) == {("tiny", "features")}
    assert command.accepted(tmp_path / "none.json") == set()
    now = [row(part, skipped="no time") for part in ("features", "exact")] + [row("serving")]
    assert command.kept(file, now) == [row("features", ms=1.0), *now[1:]]
    partly = [row("features", ms=2.0), row("features", skipped="no time")]
    assert command.kept(file, partly) == known


def test_the_models_are_published_ones_and_all_families_are_there():
    models = importlib.import_module("benchmarks.acceptance.models")
    for name in models.MODELS:
        config = models.config_of(name)
        text = config.get("text_config", config)
        is_whole = models.MODELS[name].layers is None
        assert is_whole or text["num_hidden_layers"] == models.LAYERS
        assert models.config_of(name, exact=True) != config or not is_whole


def output_of(params, ids, text="", finish="length", logprobs=None):
    metrics = RequestMetrics()
    sample = CompletionOutput(0, text, ids, finish, metrics, logprobs=logprobs)
    return RequestOutput(None, [1, 2, 3], [sample] * params.n)


BROKEN = {
    "an id outside": ({}, [-1, 5], {}),
    "1 tokens with the end 'length'": ({}, [5], {}),
    "the end is 'error'": ({}, [5, 6], {"finish": "error"}),
    "not allowed": ({"allowed_token_ids": [5]}, [5, 6], {}),
    "a bad word": ({"bad_words": ["ci"]}, [5, 60], {}),
    "fewer than min_tokens": ({"min_tokens": 2}, [5], {"finish": "stop"}),
    "after a stop id": ({"stop_token_ids": [5]}, [5, 6], {}),
    "after a stop string": ({"stop": ["ci"]}, [5, 6], {"text": "f ci"}),
    "logprobs are missing": ({"logprobs": 1}, [5, 6], {}),
    "another mass than 1": (
        {"logprobs": 1, "top_k": 1, "logprobs_mode": "processed_logprobs"},
        [5, 6],
        {"logprobs": [{5: Logprob(0.0, 1)}, {6: Logprob(-0.1, 1)}]},
    ),
    "of its logits processor": ({"extra_args": {"step": 1}}, [4, 6], {}),
    "prompt_logprobs are missing": ({"prompt_logprobs": 1}, [5, 6], {}),
}


@pytest.mark.parametrize("why", BROKEN)
def test_an_output_that_breaks_a_promise_is_found(why):
    given, ids, about = BROKEN[why]
    params = SamplingParams(max_tokens=2, **given)
    assert why in features.violation(params, output_of(params, ids, **about), 512)


def test_an_output_that_keeps_all_promises_is_taken():
    about = {"logprobs": 1, "stop_token_ids": [6], "extra_args": {"host_step": 1}}
    params = SamplingParams(max_tokens=3, n=2, min_tokens=1, **about)
    entry = {5: Logprob(-1.0, 1)}
    output = output_of(params, [4, 5, 6], finish="stop", logprobs=[entry] * 3)
    assert features.violation(params, output, 512) is None
    assert "1 samples of 2" in features.violation(
        params, dataclasses.replace(output, outputs=output.outputs[:1]), 512
    )


def test_each_feature_makes_parameters_and_mixtures_take_turns():
    defaults = SamplingParams(temperature=0.6, top_k=20)
    for feature in features.FULL_TABLE:
        for tokens in (1, 65):
            (params,) = features.params_of(feature, 1, tokens, defaults)
            assert params.max_tokens == tokens
    mixed = features.params_of(features.FEW_MIXED, 4, 8, defaults)
    assert [params.top_k for params in mixed] == [-1, 20, 1000, -1]


def test_outputs_are_identical_or_part_at_a_tie_or_differ():
    exact = importlib.import_module("benchmarks.acceptance.exact")

    def tokens(*outputs):
        requests = [types.SimpleNamespace(output=list(ids), params="p") for ids in outputs]
        return exact.Tokens({"greedy": requests}, RequestMetrics())

    one, other = tokens("abc", "abc", "abc", "abc"), tokens("abc", "abd", "axc", "ab")
    ties = {(("c", "d"), 2): True, (("b", "x"), 1): False}
    row = exact.compare(one, other, lambda request, ids, place: ties[ids, place])
    assert (row["identical"], row["ties"], row["differing"]) == (1, 1, 2)
    assert "Tokens differ: greedy sample 3" in row["error"]


FIGURES = {"first_ms": 20.4, "again_ms": 10.0, "largest_gap_ms": 15.0, "compiled_in_calls": 0}


def rows_of(model, names):
    about = {"model": model, "part": "features"}
    speeds = [
        {**about, "feature": name, "ms_per_token": 2.0 + i, **FIGURES}
        for i, name in enumerate(names)
    ]
    return [{**about, "feature": "ready", "ready_seconds": 31.6}, *speeds]


def test_the_tables_have_a_line_for_each_feature_and_model():
    assert not tables.shown({"results": []}, "accepted models", "not accepted")
    names = [feature.name for feature in features.FULL_TABLE]
    short = [feature.name for feature in features.SHORT_TABLE]
    rows = rows_of("whole", names) + rows_of("thin", short)
    rows.append({"model": "whole", "part": "serving", "feature": "HTTP", "clients": 64})
    figures = {"results": rows}
    found = tables.TABLES["accepted features"](figures).splitlines()
    assert len(found) == 2 + len(names) and "thin" not in found[0]
    assert found[3] == "| published defaults | 3.00 | 1.50 | 20 | 10 | 15 |"
    line = tables.TABLES["accepted models"](figures).splitlines()[-1]
    assert line == "| thin | 32 | 2.00 | 3.00 | 4.00 | 5.00 | – | 20 | 15 | 0 |"
    parts = tables.TABLES["accepted parts"](figures)
    assert parts.splitlines()[-1] == "| whole | serving | HTTP | 64 clients |"
    assert tables.TABLES["not accepted"](figures) == "Nothing."
