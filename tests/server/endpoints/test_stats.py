"""GET /stats: the engine's own, in seconds, and its last steps once somebody asks for them."""

import pytest

from jaxspec.requests.request import AcceptanceCounts
from jaxspec.server.metrics.step_watch import MAX_STEPS
from jaxspec.viz.timeline import STAGES


def chat(served, num_tokens):
    messages = [{"role": "user", "content": "A function that adds two numbers"}]
    found = served.post("/v1/chat/completions", messages=messages, max_tokens=num_tokens)
    assert found.status_code == 200


def test_stats_are_those_of_the_engine(served):
    chat(served, 8)
    found, told = served.get("/stats").json(), served.llm.metrics()
    same = ("num_tokens", "num_steps", "memory_bytes", "max_in_flight", "num_preemptions")
    assert {name: found[name] for name in same} == {name: told[name] for name in same}
    assert found["max_num_seqs"] == 8 and found["num_pages"] == served.llm.shapes.num_pages - 1
    assert found["num_running"] == found["num_waiting"] == 0 and found["kv_cache_usage"] == 0.0
    ((method, counts),) = found["acceptance"].items()
    expected = AcceptanceCounts(**told["acceptance"][method])
    assert counts["accepted_per_position"] == expected.accepted_per_position
    assert counts["num_drafts"] == expected.num_drafts
    assert counts["mean_acceptance_length"] == pytest.approx(expected.mean_acceptance_length)
    assert found["steps"] == []


def test_steps_are_told_from_the_first_question_on(served):
    served.get("/stats?steps=4")
    chat(served, 32)
    steps = served.get("/stats?steps=4").json()["steps"]
    assert len(steps) == 4
    for step in steps:
        assert {span["stage"] for span in step["spans"]} == STAGES.keys()
        assert all(0 <= span["start"] <= span["end"] for span in step["spans"])


@pytest.mark.parametrize("count", [-1, MAX_STEPS + 1, "x"])
def test_a_number_of_steps_that_is_none_is_refused(served, count):
    found = served.get(f"/stats?steps={count}")
    assert found.status_code == 400 and "steps" in found.json()["error"]["message"]
