"""Measurements of several GPUs: their script, and replicas of which one is killed."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "benchmarks" / "several_gpus.sh"
TEXT = SCRIPT.read_text()
PARTS = re.findall(r"^  ([\w-]+)\)", TEXT, re.MULTILINE)


def run_script(folder, *arguments, fails=False):
    """Run the script with a Python that writes its arguments, and return those of each call."""
    python = folder / "python"
    python.write_text(f'#!/bin/sh\necho "$CUDA_VISIBLE_DEVICES|$*"\nexit {int(fails)}\n')
    python.chmod(0o755)
    done = subprocess.run(
        ["bash", SCRIPT, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHON": str(python), "CACHE": str(folder / "cache")},
        capture_output=True,
        text=True,
    )
    lines = [line.partition("|") for line in done.stdout.splitlines() if "|" in line]
    return done, [(devices, words.split()) for devices, _, words in lines]


def path_of(module):
    path = ROOT / module.replace(".", "/")
    return path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


@pytest.mark.parametrize("gpus", ["2", "4", "8"])
def test_every_command_of_the_script_has_options_that_there_are(
    gpus, tmp_path, monkeypatch, capsys
):
    done, calls = run_script(tmp_path, gpus, str(tmp_path / "out"), *PARTS)
    assert done.returncode == 0 and len(PARTS) >= 8 and len(calls) >= len(PARTS)
    files = [words[words.index("--json") + 1] for _, words in calls]
    assert all(Path(file).parent == tmp_path / "out" for file in files)
    known = {}
    for _, (_, module, *words) in calls:
        if module not in known:
            monkeypatch.setattr(sys, "argv", [module, "--help"])
            with pytest.raises(SystemExit):
                runpy.run_path(str(path_of(module)), run_name="__main__")
            known[module] = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert {word for word in words if word.startswith("--")} <= known[module]
    halves = sorted(devices for devices, words in calls if "--share" in words)
    assert halves == (["0,1,2,3", "4,5,6,7"] if gpus == "8" else [])


def test_a_part_that_fails_is_named_and_the_next_one_runs(tmp_path):
    done, calls = run_script(tmp_path, "4", str(tmp_path / "out"), "tokens", "27b", fails=True)
    assert done.returncode == 1 and "Failed: tokens 27b" in done.stderr and len(calls) == 2
    assert run_script(tmp_path, "3", str(tmp_path))[0].returncode == 2


@pytest.mark.soak
def test_a_replica_is_killed_under_load_and_only_its_requests_are_lost(
    monkeypatch, tmp_path, capsys
):
    replicas = importlib.import_module("benchmarks.engine.replicas")
    sizes = "--shape tiny --lengths 16x24 --times 12 --rows 2 --max-model-len 64 --repeats 1"
    options = "--replicas 2 --options dtype=float32 prefill_buckets=[32] decode_buckets=[2]"
    file = tmp_path / "replicas.json"
    argv = ["replicas.py", *sizes.split(), *options.split(), "--json", str(file)]
    monkeypatch.setattr(sys, "argv", argv)
    replicas.main()
    (result,) = json.loads(file.read_text())["results"]
    killed = result["killed"]
    assert (result["replicas"], result["requests"]) == (2, 24)
    assert 0 < killed["lost"] <= 8 and killed["lost"] + killed["served"] == 24
    assert min(result["tokens_per_second"], killed["tokens_per_second_after"]) > 0
    assert min(killed["others_tokens_per_second"], killed["seconds_until_back"]) > 0
