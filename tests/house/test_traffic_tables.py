"""What documents make of traffic's figures: two tables, a picture, and two lines of README's."""

import importlib
import json
import re

import pytest

tables = importlib.import_module("benchmarks.report.tables")
pictures = importlib.import_module("benchmarks.report.pictures")
loads = importlib.import_module("benchmarks.report.load_tables")

FILES = sorted(tables.RESULTS.glob(loads.TRAFFIC))
CASE = {
    "shape": "qwen3.5-9b",
    "rows": 64,
    "drafts": 3,
    "draft_vocab": None,
    "rates": [0.8, 0.6, 0.45],
    "options": {},
    "lengths": "trace",
    "requests": 256,
    "at_once": 256,
    "share": None,
    "sampling": "greedy",
    "output_tokens_per_second": 5000.4,
    "total_tokens_per_second": 19000.0,
    "ttft_ms": 4000.0,
    "ttft_ms_p99": 8000.0,
    "tpot_ms": 8.0,
    "tpot_ms_p99": 11.0,
    "gap_ms": 20.0,
    "gap_ms_p99": 28.0,
    "shares_of_time": {"idle": 0.1, "prompts and decode": 0.6, "decode": 0.3},
    "prompt_tokens_real": 90,
    "prompt_tokens_computed": 100,
    "rows_real": 30,
    "rows_computed": 40,
    "of_floor": 0.5,
    "copy_tb_per_s": 3.0,
    "commit": "abcdef0",
    "date": "2027-01-02",
}
EQUAL = CASE | {"lengths": "512x256", "requests": 64, "at_once": 64, "ms_per_token": 4.0}
ARRIVING = CASE | {"at_once": None, "share": 0.7, "arrivals_per_second": 15.94}


def file(*results, device="NVIDIA H100 80GB HBM3"):
    return {"device": device, "results": list(results)}


def at_a_time(count, rows=64, **figures):
    return CASE | {"rows": rows, "at_once": count, "requests": max(4, 2 * count)} | figures


def test_a_line_says_what_users_see_of_a_load_and_on_which_card():
    one_token = {
        k: v for k, v in at_a_time(1, rows=128).items() if not k.startswith(("tpot", "gap"))
    }
    _, _, *lines = tables.TABLES["traffic"](file(EQUAL, CASE, ARRIVING, one_token)).splitlines()
    assert lines == [
        "| 9B, trace, 1 at a time | `max_num_seqs=128` | H100 | 5,000 | 19,000 | 4,000 (8,000) "
        "| – | – | – | abcdef0 |",
        "| 9B, trace, 15.9 a second (70%) | defaults | H100 | 5,000 | 19,000 | 4,000 (8,000) "
        "| 8.0 (11.0) | 28.0 | – | abcdef0 |",
        "| 9B, trace, all 256 at once | defaults | H100 | 5,000 | 19,000 | 4,000 (8,000) "
        "| 8.0 (11.0) | 28.0 | – | abcdef0 |",
        "| 9B, 512x256, all 64 at once | defaults | H100 | 5,000 | 19,000 | 4,000 (8,000) "
        "| 8.0 (11.0) | 28.0 | 4.00 | abcdef0 |",
    ]


def test_a_line_says_where_the_time_of_a_load_goes():
    by_hand = CASE | {"options": {"state_dtype": "float16"}, "draft_vocab": 32768}
    _, _, line = tables.TABLES["time of traffic"](file(by_hand)).splitlines()
    assert line == (
        "| 9B, trace, all 256 at once | `draft_vocab=32768`, `state_dtype='float16'` | H100 "
        "| 10% | 0% | 60% | 30% | 90% | 75% | 50% (3.00 TB/s) | abcdef0 |"
    )


def test_what_is_unusual_of_drafts_is_part_of_the_work():
    assert loads.work_of(CASE | {"drafts": 0, "rates": []}) == "9B, 0 drafts, trace"
    other = CASE | {"rates": [0.7, 0.48, 0.34]}
    assert loads.work_of(other) == "9B, drafts accepted at 70%/48%/34%, trace"
    assert loads.work_of(CASE | {"sampling": "Qwen"}) == "9B, Qwen, trace"


def test_the_same_load_on_two_cards_stands_side_by_side():
    cards = file(EQUAL, CASE), file(CASE, EQUAL, device="NVIDIA H200")
    found = [(card, case["lengths"]) for card, case in loads.by_load(cards)]
    lengths = "trace", "trace", "512x256", "512x256"
    assert found == list(zip(("H100", "H200") * 2, lengths, strict=True))


def test_a_table_takes_the_file_of_each_card(tmp_path):
    place = "<!-- table: traffic -->\n<!-- end -->\n"
    with pytest.raises(ValueError, match=r"'traffic' needs .*traffic_h\*.json: run its benchmark"):
        tables.filled(place, tmp_path)
    for name, device in (("h100", "NVIDIA H100 PCIe"), ("h200", "NVIDIA H200")):
        (tmp_path / f"traffic_{name}.json").write_text(json.dumps(file(CASE, device=device)))
    assert re.findall(r"\| (H\d00) \|", tables.filled(place, tmp_path)) == ["H100", "H200"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_holds_results_of_the_card_that_it_is_named_after(path):
    """A file names one device, that of its last result; so a second card needs its own."""
    assert path.stem == f"traffic_{loads.card_of(json.loads(path.read_text())).lower()}"


@pytest.fixture
def peer():
    return json.loads((tables.RESULTS / loads.PEER_TRAFFIC).read_text())


@pytest.fixture
def beside(peer):
    """The last two lines of README's table, beside these results of jaxspec."""
    decode, speeds = (json.loads((tables.RESULTS / name).read_text()) for name in loads.PEER)

    def lines(*cards):
        made = tables.TABLES["against vLLM"](decode, speeds, peer, *cards).splitlines()[-2:]
        return [line.strip("| ").split(" | ")[2:] for line in made]

    return lines


def test_defaults_stand_beside_the_peer_only_where_both_ran_on_one_card(beside):
    former = [
        ["6.27", "–", "7.20 (2026-11-24)", "0.87x"],
        ["4,110", "–", "4,735 (2026-11-24)", "1.15x"],
    ]
    results = EQUAL, CASE
    assert beside() == beside(file(*results)) == former
    assert beside(file(*results, device="NVIDIA H200")) == [
        ["6.27", "–", "4.00 (2027-01-02)", "1.57x"],
        ["4,110", "–", "5,000 (2027-01-02)", "1.22x"],
    ]
    for other in ({"options": {"steps_per_dispatch": 8}}, {"rows": 32}, {"requests": 128}):
        assert beside(file(*(x | other for x in results), device="NVIDIA H200")) == former
    assert beside(file(ARRIVING, device="NVIDIA H200")) == former


def test_a_curve_has_a_point_for_each_number_of_requests_that_finds_places():
    """Two engines had room for 64: that with 64 rows counts. 128 had to wait for its places."""
    wide, narrow = (at_a_time(64, rows=rows, tpot_ms=rows / 10.0) for rows in (128, 64))
    by_hand = at_a_time(4, options={"steps_per_dispatch": 8})
    results = [wide, narrow, at_a_time(128), at_a_time(2, tpot_ms=3.0), by_hand, CASE, ARRIVING]
    curves = pictures.curves([file(*results)])
    assert curves == {"9B, trace, H100": [(3.0, 5000.4, ""), (6.4, 5000.4, "64")]}
    assert pictures.batches([file(*results)]) == {"9B, trace, H100": [(8.0, 5000.4, "all 256")]}


@pytest.mark.parametrize("results", [[], [ARRIVING], [CASE, at_a_time(8), EQUAL]])
def test_the_picture_is_drawn_of_few_results_too_and_the_same_each_time(results, peer, tmp_path):
    drawn = []
    for name in ("one.svg", "two.svg"):
        cards = [file(*results), file(*results, device="NVIDIA H200")]
        pictures.traffic(cards, peer, tmp_path / name)
        drawn.append((tmp_path / name).read_text())
    assert drawn[0] == drawn[1] and "<!-- vLLM, trace, all at once, H200 -->" in drawn[0]
    names = set(re.findall(r"<!-- (9B, .*) -->", drawn[0]))
    lengths = {case["lengths"] for case in results if case["at_once"]}
    assert names == {f"9B, {each}, {card}" for each in lengths for card in ("H100", "H200")}
    assert ("<!-- 8 -->" in drawn[0]) == (len(results) > 1)
