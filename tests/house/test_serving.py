"""The benchmark of a server: what it asks, how it times answers, and what its figures mean."""

import asyncio
import contextlib
import importlib
import json
import sys

import pytest

from jaxspec.engine.engine import StepTimes
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.text.tokenizer import Tokenizer

serving = importlib.import_module("benchmarks.engine.serving")
runs = importlib.import_module("benchmarks.engine.serving_runs")
http_load = importlib.import_module("benchmarks.engine.http_load")
host_times = importlib.import_module("benchmarks.measure.host_times")
processes = importlib.import_module("benchmarks.engine.http_processes")
tables = importlib.import_module("benchmarks.report.tables")

HEAD = b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"
END = b"0\r\n\r\n"


def chunk(content):
    data = b"data: " + json.dumps(content, separators=(",", ":")).encode() + b"\n\n"
    return b"%x\r\n%b\r\n" % (len(data), data)


def text(finish=None):
    return chunk({"choices": [{"index": 0, "text": " ab", "finish_reason": finish}]})


USAGE = chunk({"choices": [], "usage": {"completion_tokens": 5}})


def test_every_id_of_the_made_up_tokenizer_has_a_text_of_its_own(tmp_path):
    processes.write_tokenizer(tmp_path, 800)
    tokenizer = Tokenizer(tmp_path)
    texts = [tokenizer.decode([token]) for token in range(800)]
    assert len(set(texts)) == 800 and all(text[0] == " " and text[1:].isalpha() for text in texts)
    assert tokenizer.decode([3, 700, 3]) == texts[3] + texts[700] + texts[3]


def test_portions_are_chunks_with_text():
    """Neither the head nor the usage is one; two chunks that come together are one portion."""
    parts = [(1.0, HEAD), (2.0, text()), (4.0, text() + text("length")), (5.0, USAGE + END)]
    assert http_load.Answer(0.5, parts).read() == ([2.0, 4.0], 5)


@pytest.mark.parametrize("last", [text("stop") + USAGE, text("length")])
def test_an_answer_that_is_not_whole_is_no_measurement(last):
    with pytest.raises(RuntimeError, match="ended early"):
        http_load.Answer(0.0, [(1.0, HEAD), (2.0, last + END)]).read()


def asked_of(answer, requests, at_once):
    """What the load makes of a server that answers every request with the same pieces."""
    seen, tasks = [], []

    async def serve(reader, writer):
        tasks.append(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.split(b"content-length: ")[1].split(b"\r\n")[0])
                seen.append(json.loads(await reader.readexactly(length)))
                for piece in answer:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0.002)
                if not b"".join(answer).endswith(END):
                    break
        writer.close()
        await writer.wait_closed()

    async def run():
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            bodies = [{"prompt": [number]} for number in range(requests)]
            try:
                return await asyncio.wait_for(http_load.ask_all(port, bodies, at_once), 30)
            finally:
                await asyncio.wait(tasks)

    return asyncio.run(run()), seen


def test_all_requests_are_asked_and_timed():
    """The end of an answer comes in two pieces, and connections are kept."""
    pieces = [HEAD + text(), text("length"), USAGE + END[:2], END[2:]]
    got, seen = asked_of(pieces, requests=5, at_once=2)
    assert sorted(body["prompt"] for body in seen) == [[number] for number in range(5)]
    assert got["tokens"] == 25 and len(got["ttft"]) == len(got["gaps"]) == 5
    assert min(got["ttft"]) > 0 and sum(got["gaps"]) / 2 < got["seconds"] and got["cpu_seconds"] > 0


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        ([b"HTTP/1.1 503 Service Unavailable\r\n\r\n" + END], "refuses: .*503"),
        ([HEAD, text()], "connection ended"),
    ],
)
def test_an_answer_that_is_none_ends_the_load(answer, message):
    with pytest.raises(ExceptionGroup) as raised:
        asked_of(answer, requests=1, at_once=1)
    assert raised.group_contains(RuntimeError, match=message)


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
    three = [
        runs.Run(seconds, 120, [0.1], [0.01, 0.02], {"llm": 2.0}, stages)
        for seconds in (4.0, 2.0, 3.0)
    ]
    figures = runs.figures_of(three)
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


def test_a_child_that_ends_is_told_of():
    with processes.Process("http_load") as child, pytest.raises(RuntimeError, match="ended with 1"):
        child.ask("no JSON")


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
