"""What docs/prefix-caching.md makes of the figures of kept prefixes."""

import importlib
import json

import pytest

tables = importlib.import_module("benchmarks.report.tables")

ABOUT = {"shape": "qwen3.5-9b", "commit": "abcdef0"}


def of_three(name, middle, least, most):
    return {name: middle, f"{name}_least": least, f"{name}_most": most}


def case(part, name, **figures):
    return ABOUT | {"part": part, "name": name} | figures


TTFT = of_three("ttft_ms", 14.25, 14.0, 15.0)
HIT = case("first-token", "hit", prompt_tokens=8192, cached_tokens=8000, **TTFT)
BACK = HIT | {"part": "host", "name": "hit in host memory"}
SPEED = of_three("output_tokens_per_second", 1000.4, 990.0, 1010.0)
SPEED |= {"total_tokens_per_second": 160000.0, "ttft_ms": 250.4, "ttft_ms_p90": 4000.0}
SIZES = {"requests": 12, "prompt_tokens": 12 * 65536}
WITHOUT = case("agents", "without", **SIZES, **SPEED)
WITH = WITHOUT | {"name": "with", "of_shared": 0.9871}
RATIOS = of_three("ratio", 1.002, 0.998, 1.006) | of_three("ratio_whole", 1.004, 1.0, 1.008)
TIMES = of_three("without_ms", 1.8, 1.7, 1.9) | of_three("with_ms", 1.8036, 1.7, 1.9)
DECODE = case("decode", "1 rows", sizes={"rows": 1}, **RATIOS, **TIMES)
COPY = {"bytes_moved": 102_000_000, "of_copy": 0.8, "device_us": 30.0}
EXPORT = case("copies", "export", **of_three("us", 40.0, 39.0, 42.0), **COPY)

LINES = {
    "prefixes found": [
        "| 9B, hit | 8,192 | 8,000 | 14.2 (14.0 to 15.0) | abcdef0 |",
        "| 9B, hit in host memory | 8,192 | 8,000 | 14.2 (14.0 to 15.0) | abcdef0 |",
    ],
    "agents": [
        "| 9B, with kept prefixes | 12 | 65,536 | 1,000 (990 to 1,010) | 160,000 | 98.7% "
        "| 250 (4,000) | abcdef0 |",
        "| 9B, without kept prefixes | 12 | 65,536 | 1,000 (990 to 1,010) | 160,000 | – "
        "| 250 (4,000) | abcdef0 |",
    ],
    "prefixes not found": [
        "| 9B, 1 | 1.800 (1.700 to 1.900) | 1.804 (1.700 to 1.900) | 1.002 (0.998 to 1.006) "
        "| 1.004 (1.000 to 1.008) | abcdef0 |",
    ],
    "copies of states": [
        "| 9B, export | 40.0 (39.0 to 42.0) | 30.0 | 102.0 | 80% | abcdef0 |",
    ],
}


@pytest.mark.parametrize("name", LINES)
def test_a_part_has_its_table_and_says_so_until_it_is_measured(name, tmp_path):
    place, file = f"<!-- table: {name} -->\n<!-- end -->\n", tmp_path / tables.TABLES[name].files[0]
    file.write_text(json.dumps({"results": []}))
    assert tables.filled(place, tmp_path).splitlines()[1:-1] == ["Not measured yet."]
    file.write_text(json.dumps({"results": [HIT, BACK, WITH, WITHOUT, DECODE, EXPORT]}))
    head, rule, *lines = tables.filled(place, tmp_path).splitlines()[1:-1]
    assert lines == LINES[name]
    assert {line.count("|") for line in (head, rule, *lines)} == {head.count("|")}


def test_only_what_was_measured_is_printed():
    made = tables.shown({"results": [EXPORT]}, *LINES)
    assert made.splitlines()[2:] == LINES["copies of states"]
