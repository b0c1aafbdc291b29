"""Two replicas on Ray: a storm of requests while one is killed, and a batch that is run twice."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from installed import needs

from jaxspec import LLM, SamplingParams

pytestmark = [pytest.mark.clients, needs("ray")]
ROOT = Path(__file__).parents[2]
_SECONDS = 1800  # two replicas compile, on a machine that may be busy
_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "600",
    "RAY_worker_niceness": "0",  # added to that of the tests
    "RAY_worker_register_timeout_seconds": "600",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONPATH": str(ROOT),
}


def run(home, *command):
    """Run a program that starts Ray, and end all that it started if it fails or hangs."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(home), **_ENVIRONMENT}
    log = home / "log"
    with open(log, "ab") as printed:
        process = subprocess.Popen(
            [sys.executable, *map(str, command)],
            cwd=home,
            env=environment,
            stdout=printed,
            stderr=printed,
            start_new_session=True,
        )
        try:
            status = process.wait(_SECONDS)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)  # Ray's processes end with their driver
                process.wait()
    assert status == 0, log.read_text(errors="replace")[-6000:]


def test_every_request_is_answered_though_a_replica_is_killed(short_model, tmp_path):
    run(tmp_path, ROOT / "tests/support/ray_storm.py", short_model, tmp_path / "result")
    found = json.loads((tmp_path / "result").read_text())
    assert found["texts"] == found["wanted"]
    assert " 401 " in found["unauthorized"]
    assert found["health"] == 200
    assert found["replicas"] == [2, 2, 1]  # before, after, and of these started by Ray
    # Requests of which nothing was sent were repeated by the ingress, streams by their clients.
    assert all(place.startswith("in a stream: ") for place in found["errors"]), found["errors"]


def test_a_batch_runs_only_the_partitions_that_are_missing(short_model, tmp_path):
    prompts = [f"import {name}\n" for name in ("os", "sys", "re", "json", "time")]
    prompts_file, outputs = tmp_path / "prompts", tmp_path / "outputs"
    # A line separator of Unicode is no end of a line.
    prompts[1] = "x = '\u2028'\n"
    prompts_file.write_text("".join(prompts), encoding="utf-8")
    options = {"dtype": "float32", "max_num_seqs": 2, "max_model_len": 128}
    script = [ROOT / "notebooks/ray_batch.py", prompts_file, outputs, "--model", short_model]
    script += ["--options", json.dumps(options), "--max-tokens", 8, "--partition", 2]
    run(tmp_path, *script)
    parts = sorted(outputs.iterdir())
    assert [part.name for part in parts] == [f"part-{i:06}.jsonl" for i in range(3)]
    rows = [json.loads(line) for part in parts for line in part.read_text().splitlines()]
    lines = [prompt.removesuffix("\n") for prompt in prompts]
    with LLM(short_model, **options) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        wanted = llm.generate(lines, params, use_tqdm=False)
    texts = [each.outputs[0].text for each in wanted]
    assert rows == [dict(prompt=p, text=t) for p, t in zip(lines, texts, strict=True)]

    kept = parts[1].read_bytes()
    parts[0].write_text("kept as it is")
    parts[1].unlink()
    run(tmp_path, *script)
    assert sorted(outputs.iterdir()) == parts
    assert parts[0].read_text() == "kept as it is" and parts[1].read_bytes() == kept
