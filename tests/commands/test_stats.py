"""The line of figures behind a text."""

from jaxspec.commands.stats import failure, summary
from jaxspec.requests.request import RequestMetrics


def test_a_line_tells_speed_and_acceptance_as_far_as_there_are_any():
    metrics = RequestMetrics()
    assert summary(metrics, 0, 1.0) == "0 tokens"
    assert summary(metrics, 4, 0.01) == "4 tokens, 2.50 ms per token, no speculation"
    metrics.record([4, 4], [3, 1])
    assert summary(metrics, 8, 0.02) == (
        "8 tokens, 2.50 ms per token, 2.00 tokens per verify step, acceptance by position 0.75 0.25"
    )


def test_a_failure_says_of_how_many_prompts():
    assert "next token), so" in failure(1, 1) and "for 2 of 3 prompts, so" in failure(2, 3)
