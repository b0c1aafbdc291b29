"""The benchmark of traffic: what requests are, when they are sent, and what its figures mean."""

import importlib
import json
import sys

import numpy as np
import pytest

from jaxspec.engine import StepTimes
from jaxspec.plan import MOVES, Program
from jaxspec.sampler import GREEDY

traffic = importlib.import_module("benchmarks.engine.traffic")
workload = importlib.import_module("benchmarks.engine.workload")


def test_the_trace_is_the_one_that_other_engines_served():
    requests = workload.lengths("trace")
    assert len(requests) == 256 and requests[:2] == [(289, 224), (1429, 479)]
    assert sum(prompt for prompt, _ in requests) == 154_950
    assert workload.lengths("trace", 3) == requests[:3]
    assert workload.lengths("1024x32", 2) == [(1024, 32)] * 2


@pytest.mark.parametrize("name", ["traces", "1024", "0x32", "8x-1", "x"])
def test_lengths_that_mean_nothing_are_refused(name):
    with pytest.raises(ValueError, match='as "8192x1024", got'):
        workload.lengths(name)


def test_a_longer_trace_than_there_is_is_refused():
    with pytest.raises(ValueError, match="has 256 requests, and 257 were asked for"):
        workload.lengths("trace", 257)


def test_requests_are_the_same_each_time():
    first, again = (workload.prompts([(3, 1), (5, 1)], 100) for _ in range(2))
    assert first == again and [len(ids) for ids in first] == [3, 5]
    assert {id for ids in first for id in ids} <= set(range(100))


def test_arrivals_are_poisson():
    """The gaps are exponential: their mean is that asked for, and as large as their deviation."""
    arrivals = workload.poisson(4000, 50.0)
    assert arrivals[0] == 0 and arrivals == workload.poisson(4000, 50.0)
    gaps = np.diff(arrivals)
    assert gaps.mean() == pytest.approx(1 / 50, rel=0.05) == pytest.approx(gaps.std(), rel=0.1)


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


@pytest.fixture
def asked(monkeypatch):
    """The cases of a command line."""

    def cases(words):
        return traffic.cases_of(traffic.parser().parse_args(words.split()), {})

    return cases


def test_cases_are_each_lengths_under_each_load(asked):
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
    assert [case.is_equal_and_at_once for case in cases] == [i == 4 for i in range(8)]


def test_a_share_needs_the_speed_that_it_is_of(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["traffic.py", "--at-once", "1", "--shares", "0.5"])
    with pytest.raises(SystemExit):
        traffic.main()
    assert "--shares are of the speed with --at-once all" in capsys.readouterr().err


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
    assert "ms_per_token" in at_once and "ms_per_token" not in alone
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
            result["floor_seconds"] / result["seconds"], rel=1e-3
        )
        assert result["preemptions"] == 0
    assert alone["prompt_tokens_computed"] == 5 * 16  # no two prompts share a step
