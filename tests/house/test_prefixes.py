"""The benchmark of kept prefixes: what its agents share, when they speak, and what it refuses."""

import contextlib
import importlib
import itertools
import json
import sys
from types import SimpleNamespace

import pytest
from stepped_llm import SteppedLLM

from jaxspec.requests.request import Finish, RequestMetrics

prefixes = importlib.import_module("benchmarks.engine.prefixes")
agents = importlib.import_module("benchmarks.engine.prefix_agents")
hits = importlib.import_module("benchmarks.engine.prefix_parts")

SIZES = agents.Sizes(agents=3, turns=3, system=20, first=5, more=4, output=2)
Turn = agents.Turn


def asked(words=""):
    return prefixes.parser().parse_args(words.split())


def test_by_default_64_requests_of_65536_tokens_share_nine_tenths():
    args = asked()
    names = "agents", "turns", "system", "first", "more", "output"
    sizes = agents.Sizes(**{name: getattr(args, name) for name in names})
    lengths = [sizes.prompt(turn) for turn in range(sizes.turns)] * sizes.agents
    assert len(lengths) == 64 and sum(lengths) == 64 * 65_536
    assert sizes.longest <= 73_728
    everyone = agents.Agents(sizes, 1000)
    shared = sum(everyone.shared(turn) for turn in everyone.turns)
    assert shared / sum(lengths) == pytest.approx(0.9, abs=1e-4)
    cold = [sizes.prompt(turn.turn) for turn in everyone.sample(12)]
    assert sum(cold) == 12 * 65_536


def common(a, b):
    """Tokens that both begin with."""
    pairs = zip(a, b, strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))


def test_what_is_shared_is_what_an_earlier_request_began_with():
    everyone, texts = agents.Agents(SIZES, 10_000), []
    for turn in everyone.turns:
        prompt = everyone.prompt(turn)
        assert len(prompt) == SIZES.prompt(turn.turn)
        assert everyone.shared(turn) == max([0, *(common(prompt, text) for text in texts)])
        output = [10_000 + 10 * turn.agent + turn.turn] * SIZES.output
        everyone.hear(turn, output)
        texts.append(prompt + output)


def test_answers_that_are_made_up_leave_all_requests_ready():
    everyone = agents.Agents(SIZES, 1000)
    last = Turn(1, 2)
    assert everyone.is_ready(Turn(1, 0)) and not everyone.is_ready(last)
    everyone.make_up_answers()
    assert everyone.is_ready(last) and len(everyone.prompt(last)) == SIZES.prompt(2)
    everyone.forget()
    assert not everyone.is_ready(last)


def test_so_many_agents_are_served_at_a_time_and_go_on_from_their_answers():
    """Three agents, two places, two tokens each: the third speaks first where a place is free."""
    llm, everyone = SteppedLLM(), agents.Agents(SIZES, 1000)
    turns = everyone.turns
    served = agents.AgentsClient(llm, everyone, turns).run(len(turns), at_once=2)
    assert llm.num_there == [2] * 8 + [1] * 2
    samples = dict(zip((turns[index] for index in served.answers), served.samples, strict=True))
    assert list(samples)[:4] == [Turn(0, 0), Turn(1, 0), Turn(2, 0), Turn(0, 1)]
    assert set(samples) == set(turns)
    for turn, sample in samples.items():
        if turn.turn:
            before = samples[Turn(turn.agent, turn.turn - 1)].request
            assert list(sample.request.prompt[: len(before.tokens)]) == before.tokens
    assert agents.speed(served)["requests"] == 9
    for sample in served.samples:
        sample.request.num_cached_tokens = 10
    figures = agents.found(served, everyone, turns)
    shared = 2 * 20 + 3 * (27 + 33)
    assert figures["shared_tokens"] == shared
    assert (figures["cached_tokens"], figures["of_shared"]) == (90, 90 / shared)


def test_an_agent_that_is_cut_short_is_no_measurement():
    everyone = agents.Agents(SIZES, 1000)
    with pytest.raises(RuntimeError, match="ended early"):
        agents.AgentsClient(SteppedLLM(end=Finish.ABORT), everyone, everyone.turns).run(
            9, at_once=2
        )


def test_a_hit_that_finds_too_little_is_no_measurement():
    output = SimpleNamespace(num_cached_tokens=3, metrics=RequestMetrics())
    llm = SimpleNamespace(generate=lambda *_: [output], metrics=lambda: {"prefix_cache": {}})
    with pytest.raises(RuntimeError, match="'hit' must find 4 of its 9 tokens, and found 3"):
        hits.timed(llm, hits.Probe("hit", [1] * 9, 4))


def test_prompts_part_where_it_is_said_and_on_pages_where_there_are_no_states():
    args = asked("--shape tiny --prompt 50 --shared 39")
    for num_checkpoints, repeated, found in ((5, 49, (0, 39)), (0, 48, (32, 32))):
        llm = SimpleNamespace(shapes=SimpleNamespace(num_checkpoints=num_checkpoints, page_size=16))
        cold, again, parts, hit = hits.parted(llm, args, hits.Texts(args))
        assert cold.prompt == again.prompt and (cold.least, again.least) == (0, repeated)
        assert (parts.least, hit.least) == found
        for probe in (parts, hit):
            assert common(probe.prompt, cold.prompt) == 39 and len(probe.prompt) == 50


def test_without_a_host_tier_that_part_says_so(monkeypatch, capsys):
    monkeypatch.setattr(hits, "OPTIONS", {})
    assert list(hits.host(asked("--shape tiny"))) == []
    assert "no option kv_offloading_size" in json.loads(capsys.readouterr().out)["skipped"]


def test_a_prefix_comes_back_from_the_host_when_others_took_its_place(monkeypatch):
    """More of them than the device has pages for, between the hit there and the one here."""
    order, shapes = [], SimpleNamespace(num_checkpoints=5, page_size=16)
    llm = SimpleNamespace(shapes=shapes, reset_prefix_cache=lambda: order.append("reset"))
    llm.metrics = lambda: {"prefix_cache": {"num_hits": 7}}

    def timed(llm, probe):
        order.append(probe.name)
        figures = {"prompt_tokens": len(probe.prompt), "cached_tokens": probe.least}
        return figures | {"ttft_ms": float(len(order))}

    @contextlib.contextmanager
    def engine(args, kv_offloading_size):
        assert kv_offloading_size == 2.5
        yield llm

    monkeypatch.setattr(hits, "OPTIONS", {hits.HOST_TIER: None})
    monkeypatch.setattr(hits, "small_engine", engine)
    monkeypatch.setattr(hits, "timed", timed)
    words = "--shape tiny --prompt 50 --shared 39 --suffixes 4 --repeats 1 --host-gib 2.5"
    device, back = hits.host(asked(words))
    a_round = ["reset", "cold", "the same again", "parts", "hit", *["other"] * 9, "back"]
    assert order == 2 * a_round
    assert (device[0], back[0]) == ("hit on the device", "hit in host memory")
    assert device[2]["cached_tokens"] == back[2]["cached_tokens"] == 39
    assert (device[2]["ttft_ms"], back[2]["ttft_ms"]) == (20, 30)
    assert back[2]["prefix_cache"] == {"num_hits": 7}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--shared 8192", "must be above 0 and less than --prompt, got 8192"),
        ("--repeats 0", "must be positive"),
        ("--cold-requests 65", "at most --agents times --turns, got 65"),
        ("--parts all", "invalid choice: 'all'"),
    ],
)
def test_what_could_not_be_measured_is_refused_at_once(words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["prefixes.py", *words.split()])
    with pytest.raises(SystemExit):
        prefixes.main()
    assert message in capsys.readouterr().err


def test_a_file_of_another_device_is_refused(tmp_path):
    file = tmp_path / "prefixes.json"
    file.write_text(json.dumps({"device": "an abacus", "results": []}))
    assert "name another file" in prefixes.refusal(asked(f"--json {file}"))
    file.write_text(json.dumps({"results": []}))
    assert prefixes.refusal(asked(f"--json {file}")) is None


@pytest.mark.soak
def test_prefixes_of_a_tiny_model_are_measured(monkeypatch, tmp_path, capsys):
    """All parts in one file. Times are not checked: a test's machine is busy."""
    file = tmp_path / "prefixes.json"
    alone = "--prompt 48 --shared 32 --suffixes 5 20"
    talk = "--agents 3 --turns 2 --system 32 --first 10 --more 9 --output 6 --at-once 2"
    decode = "--rows 1 2 --lengths 16x8 --cold-requests 3 --repeats 1 --copy-tb-per-s 0.01"
    options = f"--shape tiny {alone} {talk} {decode} --options prefill_buckets=(32,) --json {file}"
    monkeypatch.setattr(sys, "argv", ["prefixes.py", *options.split()])
    prefixes.main()
    results = json.loads(file.read_text())["results"]
    by_part = {part: [x for x in results if x["part"] == part] for part in prefixes.PARTS}
    found = {x["name"]: x["cached_tokens"] for x in by_part["first-token"]}
    assert found["cold"] == 0 and found["hit"] == 32
    assert found["hit, 5 more"] == found["hit, 20 more"] == 32
    kept, without = by_part["agents"]
    assert (kept["requests"], without["requests"]) == (6, 3)
    assert 0.5 < kept["of_shared"] <= 1 and "of_shared" not in without
    assert kept["num_checkpoints"] > 0 == without["num_checkpoints"]
    assert [x["sizes"]["rows"] for x in by_part["decode"]] == [1, 2]
    assert all(x["prefix_cache"]["num_hits"] == 0 for x in by_part["decode"])
    assert [x["name"] for x in by_part["copies"]] == ["export", "restore"]
    for result in by_part["copies"]:
        assert result["bytes_moved"] > 2 * 3 * 4 * 16 * 16 * 4  # a state
    assert "| TINY, hit, 20 more | 52 | 32 |" in capsys.readouterr().out
