"""The benchmark of a server: what it asks, how it times answers, and what its figures mean."""

import importlib
import json
import sys

import pytest

from jaxspec.engine.engine import StepTimes
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.text.tokenizer import Tokenizer

serving = importlib.import_module("benchmarks.engine.serving")
load_generator = importlib.import_module("benchmarks.engine.load_generator")
host_times = importlib.import_module("benchmarks.measure.host_times")
words = importlib.import_module("benchmarks.measure.words")
tables = importlib.import_module("benchmarks.report.tables")


def test_every_id_of_the_made_up_tokenizer_has_a_text_of_its_own(tmp_path):
    words.write_words(tmp_path, 800)
    tokenizer = Tokenizer(tmp_path)
    texts = [tokenizer.decode([token]) for token in range(800)]
    assert len(set(texts)) == 800 and {*map(chr, range(32, 127))} <= set(texts)
    assert all(text[0] == " " and text[1:].isalpha() for text in texts if len(text) > 1)
    assert tokenizer.decode([3, 700, 3]) == texts[3] + texts[700] + texts[3]


def step(*times):
    return StepTimes(Program(4, 0, GREEDY), 4, 0, *times, None)


def test_the_stages_of_a_step_are_where_the_host_was():
    """The second is planned while the first runs; the third when the first was handed on."""
    steps = [step(0, 1, 3, 8, 12, 13), step(3, 4, 5, 20, 21, 23), step(15, 17, 20, 23, 24, 25)]
    assert host_times.stages(steps) == {
        "plan": [1, 1, 2],
        "dispatch": [2, 1, 3],
        "wait": [4, 1, 1],
        "collect": [1, 2, 1],
        "between": [2],
    }
    figures = host_times.figures([host_times.stages(steps)] * 2)
    assert (figures["plan_ms_p50"], figures["between_ms_p99"]) == (1000, 2000)


def test_processors_are_counted_by_thread():
    before = host_times.cpu_seconds()
    sum(range(10**6))
    after = host_times.cpu_seconds()
    assert after["MainThread"] > before["MainThread"] and after["all"] > before["all"]


def test_figures_are_those_of_the_run_in_the_middle():
    stages = {name: [0.001] for name in host_times.STAGES}
    three = []
    for seconds in (4.0, 2.0, 3.0):
        answer = load_generator.Answer(
            seconds - 0.13, [seconds - 0.03, seconds - 0.02, seconds], 120
        )
        served = load_generator.Served(0.0, {0: answer})
        three.append(serving.Run(served, {"llm": 2.0}, stages))
    figures = serving.figures_of(three)
    key = "output_tokens_per_second"
    assert [figures[key], figures[f"{key}_least"], figures[f"{key}_most"]] == [40, 30, 60]
    assert figures["processors"] == {"llm": pytest.approx(2 / 3)}
    assert figures["gap_ms_p50"] == pytest.approx(15) and figures["portions"] == 3
    assert "loop_lag_ms_p50" not in figures


def asked(words=""):
    return serving.parser().parse_args(words.split())


def test_by_default_the_trace_comes_64_at_a_time_and_at_once_then_one_by_one_then_many():
    cases = [(c.part, c.rows, c.lengths, c.requests, c.at_once) for c in serving.cases_of(asked())]
    assert cases == [
        ("throughput", 64, "trace", 256, 64),
        ("throughput", 64, "trace", 256, 256),
        ("first-token", 64, "512x8", 50, 1),
        ("streams", 256, "128x512", 128, 64),
        ("streams", 256, "128x512", 512, 256),
    ]


def test_streams_come_again_for_each_time_that_a_thread_keeps_the_lock():
    cases = serving.cases_of(asked("--parts streams --streams 64 --switch-ms 5 1"))
    assert [case.switch_ms for case in cases] == [None, 5, 1]


def test_both_engines_have_room_for_every_part_and_keep_no_prefix():
    args = asked("--max-model-len 64 --lengths 12x8 --first-lengths 512x8 --stream-lengths 40x30")
    options = serving.options_of(args, 7, {"page_size": 32})
    assert (options["max_num_seqs"], options["max_model_len"]) == (7, 520)
    assert (options["enable_prefix_caching"], options["page_size"]) == (False, 32)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--repeats 0", "must be positive"),
        ("--firsts 12", "--firsts must be tens, got 12"),
        ("--at-once 8 --requests 4", "at least as many as --at-once, got 4"),
        ("--stream-lengths foo", 'as "8192x1024"'),
        ("--parts all", "invalid choice: 'all'"),
    ],
)
def test_what_could_not_be_measured_is_refused_at_once(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["serving.py", *words.split()])
    with pytest.raises(SystemExit):
        serving.main()
    assert message in capsys.readouterr().err


def test_tables_say_where_nothing_was_measured():
    empty = {"device": "an abacus", "results": []}
    for table in ("serving", "serving: first token", "serving: streams"):
        assert tables.TABLES[table](empty) == "Not measured yet."


@pytest.mark.soak
def test_a_server_of_a_tiny_model_is_measured(monkeypatch, tmp_path):
    """All parts in one file. Times are not checked: a test's machine is busy."""
    file = tmp_path / "serving.json"
    sizes = "--rows 4 --max-model-len 64 --lengths 12x8 --requests 8 --at-once 4 --repeats 1"
    alone = "--first-lengths 12x4 --firsts 10"
    many = "--streams 8 --stream-rows 8 --stream-lengths 12x8 --switch-ms 5 --api-processes 1 2"
    monkeypatch.setattr(
        sys,
        "argv",
        [
            *f"serving.py --shape tiny {sizes} {alone} {many} --json {file}".split(),
            *f"--compilation-cache {tmp_path}/cache".split(),
            *["--options", "decode_buckets=(4,)", "prefill_buckets=(16,)"],
            *["--stream-options", "decode_buckets=(8,)", "prefill_buckets=(16,)"],
        ],
    )
    serving.main()
    figures = json.loads(file.read_text())
    both, first, many, again, *by_two = figures["results"]
    assert [x["part"] for x in (both, first, many)] == list(serving.PARTS)
    assert (many["switch_ms"], again["switch_ms"]) == (None, 5)
    for way in (both["llm"], both["http"], many):
        assert way["output_tokens_per_second"] > 0 and way["dispatches"] > 4
        assert 0 < way["plan_ms_p50"] <= way["plan_ms_p99"] and way["ttft_ms_p50"] > 0
    assert both["of_llm"] == pytest.approx(
        both["http"]["output_tokens_per_second"] / both["llm"]["output_tokens_per_second"], rel=1e-3
    )
    assert both["http"]["processors"].keys() == {"server", "event_loop", "engine", "generator"}
    assert first["overhead_ms"] == pytest.approx(
        first["http_ms_p50"] - first["llm_ms_p50"], rel=0.1
    )
    assert many["portions"] >= 2 * 16 and many["loop_lag_ms_p99"] > 0
    assert [each["api_processes"] for each in by_two] == [2, 2]
    assert "`--api-processes 2`" in tables.shown({"results": by_two}, "serving: streams")
    assert "| TINY, 12x8, 4 at a time |" in tables.shown(figures, "serving")
    assert "| TINY, 12x4, 1 at a time |" in tables.shown(figures, "serving: first token")
    assert "| TINY, 12x8, 8 at a time |" in tables.shown(figures, "serving: streams")
