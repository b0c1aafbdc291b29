"""The benchmark of traffic: its cases, and what its figures mean."""

import importlib
import json
import sys
from pathlib import Path

import pytest
from stepped_llm import SteppedLLM

from jaxspec.engine.engine import StepTimes
from jaxspec.plan.plan import MOVES, Program
from jaxspec.requests.sampling_features import GREEDY

ROOT = Path(__file__).parents[2]
traffic = importlib.import_module("benchmarks.engine.traffic")
load_generator = importlib.import_module("benchmarks.engine.load_generator")


def step(program, decodes, prompt, start, end):
    return StepTimes(program, decodes, prompt, start, start, start, start, end, end, end)


def test_the_device_is_idle_where_nothing_is_dispatched():
    """A second of each kind; the second step waits for the first, and before the last is a gap."""
    steps = [
        step(Program(4, 64, GREEDY), 0, 40, 0.0, 1.0),
        step(Program(4, 64, GREEDY), 3, 40, 0.5, 2.0),
        step(Program(4, 0, GREEDY, num_steps=8), 3, 0, 0.6, 3.0),
        step(MOVES, 0, 0, 4.0, 5.0),
    ]
    shares = traffic.shares_of_time(steps)
    assert shares.pop("idle") == pytest.approx(0.2)
    assert shares == {
        kind: pytest.approx(0.2) for kind in ("prompts", "prompts and decode", "decode", "copies")
    }


def asked(words):
    """The cases of a command line."""
    return traffic.cases_of(traffic.parser().parse_args(words.split()), {})


def test_cases_are_each_lengths_under_each_load():
    cases = asked("--rows 8 --lengths trace 64x32 --at-once all 1 4 --shares 0.5")
    loads = [(case.lengths, case.requests, case.at_once, case.share) for case in cases]
    assert loads == [
        ("trace", 256, 256, None),
        ("trace", 4, 1, None),
        ("trace", 8, 4, None),
        ("trace", 256, None, 0.5),
        ("64x32", 8, 8, None),
        ("64x32", 4, 1, None),
        ("64x32", 8, 4, None),
        ("64x32", 8, None, 0.5),
    ]
    assert [case.is_one_batch for case in cases] == [i == 4 for i in range(8)]
    (waves,) = asked("--rows 4 --requests 8 --lengths 64x32")
    assert not waves.is_one_batch


def test_rates_of_drafts_that_there_are_not_are_no_part_of_a_case():
    assert asked("--drafts 0")[0].rates == []
    assert asked("--drafts 2 --rates 0.7 0.48 0.34")[0].rates == [0.7, 0.48]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--at-once 1 --shares 0.5", "--shares are of the speed with --at-once all"),
        ("--at-once 0", "must be positive"),
        ("--repeats 0", "must be positive"),
        ("--shares 0", "must be positive"),
        ("--at-once 8 --requests 4", "must be at least as many as --at-once, got 4"),
        ("--at-once 200", "has 256 requests, and 400 were asked for"),
        ("--lengths foo", 'as "8192x1024"'),
        ("--options max_num_seqs=8", "max_num_seqs is --rows"),
        ("--json benchmarks/results/traffic_peer_h200.json", "holds no results of this script"),
    ],
)
def test_what_could_not_be_measured_is_refused_at_once(words, message, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(sys, "argv", ["traffic.py", *words.split()])
    with pytest.raises(SystemExit):
        traffic.main()
    assert message in capsys.readouterr().err


def test_a_file_of_another_device_is_refused(tmp_path):
    file = tmp_path / "traffic.json"
    file.write_text(json.dumps({"device": "an abacus", "results": []}))
    args = traffic.parser().parse_args(["--json", str(file)])
    assert "holds results of an abacus; name another file" in traffic.refusal(args)


def test_amounts_tell_room_from_plans_and_plans_from_need(monkeypatch):
    """A prompt of 10 in a program of 64; then 2 rows of 4, twice 8 steps, for 3 verifies."""
    llm = SteppedLLM(rows=1)
    llm.set_clock(monkeypatch, load_generator)
    served = load_generator.serve(llm, [load_generator.Request([1] * 10, 6)])
    figures = traffic.speed(served)
    assert (figures["output_tokens_per_second"], figures["tpot_ms"]) == (1, 1000)
    assert figures["total_tokens_per_second"] == 16 / 6 and figures["ttft_ms"] == 1000
    served.metrics[0].accepted_per_position = [2]  # so that 3 verifies gave 5 tokens
    decode = step(Program(4, 0, GREEDY, num_steps=8), 2, 0, 1.0, 2.0)
    steps = [step(Program(1, 64, GREEDY), 0, 10, 0.0, 1.0), decode, decode]
    assert traffic.amounts(served, steps) == {
        "steps": 17,
        "dispatches": 3,
        "rows_computed": 1 + 2 * 32,
        "rows_planned": 2 * 16,
        "rows_real": 3,
        "prompt_tokens_computed": 64,
        "prompt_tokens_real": 10,
    }


def test_options_by_hand_are_of_their_own_types():
    words = ["steps_per_dispatch=8", "prefill_buckets=(64, 128)", "state_dtype=float16"]
    assert dict(map(traffic.by_hand, words)) == {
        "steps_per_dispatch": 8,
        "prefill_buckets": (64, 128),
        "state_dtype": "float16",
    }


@pytest.mark.soak
def test_traffic_measures_a_tiny_model(monkeypatch, tmp_path):
    """All at once, one at a time, and arrivals. Times are not checked: the machine is busy."""
    file = tmp_path / "traffic.json"
    work = "--lengths 12x6 --requests 5 --at-once all 1 --shares 0.5 --repeats 1"
    options = f"--shape tiny --rows 2 --max-model-len 32 {work} --copy-tb-per-s 0.01"
    by_hand = ["--options", "decode_buckets=(2,)", "prefill_buckets=(16,)"]
    monkeypatch.setattr(
        sys, "argv", ["traffic.py", *options.split(), *by_hand, "--json", str(file)]
    )
    traffic.main()
    results = json.loads(file.read_text())["results"]
    at_once, alone, arriving = results
    assert [x["at_once"] for x in results] == [5, 1, None]
    assert not [x for x in results if "ms_per_token" in x]  # five requests, and two rows
    assert arriving["arrivals_per_second"] == pytest.approx(
        0.5 * at_once["requests_per_second"], rel=1e-3
    )
    for result in results:
        speed = result["output_tokens_per_second"]
        assert speed == pytest.approx(5 * 6 / result["seconds"], rel=1e-3)
        assert result["total_tokens_per_second"] == pytest.approx(3 * speed, rel=1e-3)
        assert result["prompt_tokens_real"] == 60 <= result["prompt_tokens_computed"]
        assert 0 < result["rows_real"] <= result["rows_planned"] <= result["rows_computed"]
        assert sum(result["shares_of_time"].values()) == pytest.approx(1, abs=1e-3)
        assert 0 < result["tpot_ms"] <= result["tpot_ms_p99"]
        assert result["of_floor"] == pytest.approx(
            result["floor_seconds"] / result["traced_seconds"], rel=1e-3
        )
        assert result["preemptions"] == 0
    assert alone["prompt_tokens_computed"] == 5 * 16  # no two prompts share a step
