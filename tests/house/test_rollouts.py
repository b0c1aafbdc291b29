"""The benchmark of rollouts measures each of its acts; times are not checked."""

import json
import sys

import pytest

from benchmarks.engine import rollouts

SIZES = "--prompts 2 --samples 2 --prompt 16 --tokens 24 --rows 4 --prefill-tokens 32 --repeats 1"


@pytest.mark.soak
def test_a_tiny_model_is_measured(monkeypatch, tmp_path):
    file = tmp_path / "rollouts.json"
    options = f"--shape tiny --dtype float32 --drafts 3 {SIZES} --json {file}"
    monkeypatch.setattr(sys, "argv", ["rollouts.py", *options.split()])
    rollouts.main()
    samples, result = json.loads(file.read_text())["results"]
    assert 2.0 < samples["tokens_per_step"] < 3.3  # accepted at 0.80, 0.60 and 0.45
    cost = 1 - samples["logprobs_tokens_per_second"] / samples["tokens_per_second"]
    assert samples["logprobs_cost"] == pytest.approx(cost, rel=1e-2, abs=1e-4)
    assert result["update_device_pause_ms"] <= result["update_device_ms_most"]
    assert result["update_host_pause_ms"] <= result["update_host_ms_most"]
    assert min(result[f"after_{act}_ms"] for act in ("pause", "sleep_1", "sleep_2")) > 0
