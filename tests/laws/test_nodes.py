"""Laws of groups on several nodes: one process's tokens; together they start, fail and end."""

import os
import signal
import time

import httpx
import pytest
from harness import FIXTURES
from node_processes import SECONDS, group, processes
from node_program import answer_of
from shortened import write_shortened

from jaxspec import LLM, SamplingParams
from jaxspec.api.loading import EMBEDDED_MODEL
from jaxspec.nodes import SILENCE_SECONDS
from jaxspec.nodes.connection import free_port

pytestmark = pytest.mark.soak

HOST = "127.0.0.1"
GREEDY = {"temperature": 0.0, "max_tokens": 20, "ignore_eos": True}
SAMPLED = {"temperature": 0.8, "top_k": 40, "seed": 3, "max_tokens": 20, "ignore_eos": True}
PROMPTS = [[1, 2, 3, 4, 5] * 5, [9, 8, 7], [5] * 30]
CALLS = [
    [(prompt, params) for prompt in PROMPTS for params in (GREEDY, SAMPLED)],
    *[[(PROMPTS[0], GREEDY)]] * 2,
]
OPTIONS = {
    "dtype": "float32",
    "skip_tokenizer_init": True,
    "max_model_len": 96,
    "max_num_seqs": 4,
    "decode_buckets": [4],
    "prefill_buckets": [64],
    "page_size": 8,
    "num_pages": 16,  # fewer than four samples need, so some are preempted
    "background_compilation": False,
    "show_progress": False,
}
MTP = {"method": "mtp", "num_speculative_tokens": 3}


def of_nodes(nnodes, devices, model, **options):
    """The nodes of a group."""
    own = {
        "nnodes": nnodes,
        "tensor_parallel_size": nnodes * devices,
        "master_port": free_port(HOST),
    }
    return [{"model": str(model), "options": OPTIONS | own | options} for _ in range(nnodes)]


def alone(model, calls, **options):
    with LLM(model, **OPTIONS | options) as llm:
        return [
            answer_of(
                llm, llm.generate([p for p, _ in call], [SamplingParams(**s) for _, s in call])
            )
            for call in calls
        ]


@pytest.mark.parametrize(("fixture", "drafts"), [("lfm2", None), ("nemotron_h", MTP)])
def test_two_processes_with_two_devices_each_yield_the_tokens_of_one(fixture, drafts):
    """Greedy and sampled, with preemption, and finally on a cached prefix."""
    model = FIXTURES / fixture
    first, *others = of_nodes(2, 2, model, speculative_config=drafts)
    with group(first | {"calls": CALLS}, *others, devices=2) as (leader, follower):
        assert (leader.wait(), follower.wait()) == (0, 0), leader.text + follower.text
    expected = alone(model, CALLS, speculative_config=drafts)
    assert [each["tokens"] for each in leader.answers] == [each["tokens"] for each in expected]
    assert leader.answers[-1]["cached"] > 0 < leader.answers[-1]["preemptions"]
    assert (leader.answers[-1]["rounds"] > 0) == (drafts is not None)


def test_the_loss_of_a_node_ends_all_and_the_group_starts_again():
    """Also of a node that is only silent, while others wait for it in a collective."""
    short, long = [[(PROMPTS[0], GREEDY)]], [[(PROMPTS[0], GREEDY | {"max_tokens": 4000})]]
    options = {"speculative_config": None, "max_model_len": 4096, "num_pages": 600}
    expected = alone(FIXTURES / "lfm2", short, speculative_config=None)[0]["tokens"]
    for lost, how in ((1, signal.SIGKILL), (0, signal.SIGKILL), (2, signal.SIGSTOP)):
        nnodes = 4 if lost == 2 else 2
        first, *others = of_nodes(nnodes, 1, FIXTURES / "lfm2", **options)
        with group(first | {"calls": short + long}, *others) as nodes:
            nodes[0].wait_for("begin")
            os.kill(nodes[lost].process.pid, how)
            started = time.monotonic()
            for rank, node in enumerate(nodes):
                if rank != lost:
                    assert node.wait(SILENCE_SECONDS + 60) == 1
                    assert f"Node {lost} of the group is gone" in node.text
            assert how != signal.SIGKILL or time.monotonic() - started < 30
        assert lost == 0 or "error" in nodes[0].text
        assert nodes[0].answers[0]["tokens"] == expected


def test_differences_are_named_on_both_sides(tmp_path):
    other = write_shortened(FIXTURES / "lfm2", (0, 1), tmp_path / "other")
    first, second = of_nodes(2, 1, FIXTURES / "lfm2")
    second = {"model": str(other), "options": second["options"] | {"max_num_seqs": 3}}
    with group(first, second) as nodes:
        for node in nodes:
            assert node.wait() == 1
            assert "max_num_seqs is 4 on node 0 and 3 on node 1" in node.text
            assert "digest of the weights" in node.text


PROCESSOR = """
import jaxspec

class Shift(jaxspec.LogitsProcessor):
    params = ("shift",)

    def __call__(self, logits, prefix, params):
        return logits.at[{}].add(params["shift"])
"""


def test_processors_with_other_sources_are_named(tmp_path):
    nodes = of_nodes(2, 1, FIXTURES / "lfm2", logits_processors=["shifts:Shift"])
    for number, node in enumerate(nodes):
        modules = tmp_path / f"{number}"
        modules.mkdir()
        (modules / "shifts.py").write_text(PROCESSOR.format(number))
        node["modules"] = [str(modules)]
    with group(*nodes) as (leader, follower):
        assert leader.wait() == follower.wait() == 1
        assert "source of shifts:Shift is" in leader.text


def test_too_few_devices_are_named_on_all_nodes():
    first, second = of_nodes(2, 2, FIXTURES / "lfm2")
    with group(first, second | {"devices": 1}, devices=2) as nodes:
        assert [node.wait() for node in nodes] == [1, 1]
    assert any("with 1 on node 1" in node.text for node in nodes)


@pytest.mark.parametrize("follower_dies", [False, True])
def test_a_server_and_its_follower_end_together(tmp_path, follower_dies):
    """Also an idle server."""
    model = write_shortened(EMBEDDED_MODEL, (0, 3), tmp_path / "short")
    own = f"--nnodes 2 --tensor-parallel-size 2 --master-port {free_port(HOST)} --dtype float32"
    words = f"-m jaxspec serve {model} --port 0 --max-num-seqs 2 --max-model-len 96 {own}".split()
    with processes(words, [*words, "--node-rank", "1"], JAX_NUM_CPU_DEVICES="1") as (
        server,
        follower,
    ):
        root = server.wait_for("Serving at ").rpartition(" ")[2].strip()
        body = {"prompt": "def f(", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{root}/v1/completions", json=body, timeout=SECONDS)
        assert answer.json()["usage"]["completion_tokens"] == 8
        if follower_dies:
            follower.process.kill()
            assert server.wait() == 1
            assert "Node 1 of the group is gone" in server.text
        else:
            server.process.send_signal(signal.SIGTERM)
            assert (server.wait(), follower.wait()) == (0, 0), server.text + follower.text
