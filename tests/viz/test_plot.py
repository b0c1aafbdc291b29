"""Pictures show the figures they were given, with units, and refuse what cannot be drawn."""

import matplotlib.pyplot as plt
import pytest

from jaxspec import CompletionOutput, RequestMetrics, RequestOutput
from jaxspec.engine.engine import StepTimes
from jaxspec.plan.plan import Program
from jaxspec.requests.sampling_features import GREEDY
from jaxspec.viz import plot


@pytest.fixture(autouse=True)
def no_windows():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


def drafted(accepted, num_drafts=10):
    return RequestMetrics(
        drafted_per_position=[num_drafts] * len(accepted),
        accepted_per_position=list(accepted),
    )


def output(prompt_ids, seconds_per_token, text="def f(x):"):
    metrics = RequestMetrics(
        arrival_time=0.0,
        first_token_time=1.0,
        last_token_time=1.0 + 10 * seconds_per_token,
        num_tokens=11,
    )
    return RequestOutput(text, prompt_ids, [CompletionOutput(0, "", [], "length", metrics)])


def step(start, device_end, *, prompt_tokens=0, dispatch=0.002):
    """Planned in 1 ms from `start` (seconds), collected 1 ms after the device is done."""
    planned, end = start + 0.001, device_end if device_end is not None else start + 0.02
    return StepTimes(
        program=Program(4, prompt_tokens, GREEDY),
        num_decodes=4,
        num_prompt_tokens=prompt_tokens,
        plan_start=start,
        dispatch_start=planned,
        dispatch_end=planned + dispatch,
        wait_start=planned + dispatch,
        collect_start=end,
        collect_end=end + 0.001,
        device_end=device_end,
    )


def bars(ax, row):
    """(left, right) of the bars drawn at height `row`, in milliseconds."""
    found = [p for p in ax.patches if p.get_width() and abs(p.get_y() + 0.2 - row) < 1e-9]
    return [(round(p.get_x(), 3), round(p.get_x() + p.get_width(), 3)) for p in found]


def legend(ax):
    return [text.get_text() for text in ax.get_legend().get_texts()]


def test_acceptance_bars_are_the_share_of_verify_steps():
    ax = plot.acceptance({"greedy": drafted([9, 6, 3]), "warm": drafted([5, 1])})
    assert [bar.get_height() for bar in ax.patches] == [0.9, 0.6, 0.3, 0.5, 0.1]
    assert legend(ax) == [
        "greedy: 2.80 tokens per verify step",
        "warm: 1.60 tokens per verify step",
    ]
    assert list(ax.get_xticks()) == [1, 2, 3] and ax.get_ylabel() and ax.get_xlabel()


def test_acceptance_of_one_run_needs_no_name():
    assert legend(plot.acceptance(drafted([5]))) == ["1.50 tokens per verify step"]


def test_acceptance_of_engines_is_named_by_their_methods():
    """What `LLM.metrics` gives, of one engine or several, beside the metrics of requests."""
    counts = {"drafted_per_position": [8, 4], "accepted_per_position": [4, 2]}
    metrics = {"num_steps": 3, "acceptance": {"mtp": counts}}
    there = "steps that had such a draft"
    assert legend(plot.acceptance(metrics)) == [there, "mtp: 1.75 tokens per verify step"]
    ax = plot.acceptance({"new": metrics, "a day": drafted([9])})
    assert legend(ax) == [
        there,
        "new, mtp: 1.75 tokens per verify step",
        "a day: 1.90 tokens per verify step",
    ]
    assert [bar.get_height() for bar in ax.patches] == [0.5, 0.25, 0.9]
    (lines,) = ax.collections  # "a day" always had its draft
    assert [float(line[0][1]) for line in lines.get_segments()] == [1.0, 0.5]
    with pytest.raises(ValueError, match="plain had none"):
        plot.acceptance({"plain": {"acceptance": {}}})


def test_tokens_are_painted_by_who_gave_them():
    sample = CompletionOutput(0, "ab", [97, 98], "length", RequestMetrics(), [0, 1])
    painted = plot.tokens(RequestOutput("say ", [1], [sample]))
    assert str(painted).startswith("say 97 \x1b[38;5;16;48;5;151m98 \x1b[0m\n")


def test_acceptance_without_drafts_says_so():
    with pytest.raises(ValueError, match="plain had none: is speculative_config None"):
        plot.acceptance({"plain": RequestMetrics()})


def test_speed_bars_are_milliseconds_a_token_of_each_prompt():
    runs = {
        "on": [output([1], 0.002), output([2], 0.003, text=None)],
        "off": [output([1], 0.004), output([2], 0.005, text=None)],
    }
    ax = plot.speed(runs)
    assert [round(bar.get_width(), 6) for bar in ax.patches] == [2.0, 3.0, 4.0, 5.0]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["def f(x):", "1 token ids"]
    assert "milliseconds" in ax.get_xlabel() and legend(ax) == ["on", "off"]


def test_speed_needs_two_tokens_a_completion():
    with pytest.raises(ValueError, match="at least two tokens"):
        one = RequestOutput("x", [1], [CompletionOutput(0, "", [], "length", RequestMetrics())])
        plot.speed({"on": [one]})


def test_speed_compares_the_same_prompts_only():
    with pytest.raises(ValueError, match="have 2 lists of them: on, off"):
        plot.speed({"on": [output([1], 0.1)], "off": [output([2], 0.1)]})


def test_the_timeline_has_the_host_above_the_device_in_each_row():
    """Step 1 is planned while step 0 runs, and begins on the device when that is over."""
    ax = plot.timeline([step(5.0, 5.020, prompt_tokens=64), step(5.004, 5.030)])
    host = [(0, 1), (1, 3), (3, 20), (20, 21)], [(4, 5), (5, 7), (7, 30), (30, 31)]
    assert bars(ax, -0.2) == host[0] and bars(ax, 0.2) == [(1, 3), (3, 20)]
    assert bars(ax, 0.8) == host[1] and bars(ax, 1.2) == [(20, 30)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["step 0 (prompt)", "step 1"]
    assert "milliseconds" in ax.get_xlabel()


def test_a_window_of_the_timeline_remembers_when_the_device_was_free():
    steps = [step(5.0, 5.020), step(5.004, 5.030), step(5.008, 5.040)]
    ax = plot.timeline(steps, first=1, count=1)
    assert bars(ax, 0.2) == [(16, 26)]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["step 1"]


def test_what_may_have_run_inside_the_dispatch_is_pale():
    ax = plot.timeline([step(5.0, 5.004, dispatch=0.006), step(5.02, 5.04)])
    assert bars(ax, 0.2) == [(1, 4)] and bars(ax, 1.2) == [(21, 23), (23, 40)]
    alphas = [
        p.get_alpha()
        for p in ax.patches
        if p.get_width() and (p.get_y() + 0.2) % 1 == pytest.approx(0.2)
    ]
    assert alphas == [0.35, 0.35, 1.0]


def test_timelines_that_share_an_axis_both_fit():
    _, axes = plt.subplots(2, sharex=True)
    plot.timeline([step(5.0, 5.020)], axes[0])
    plot.timeline([step(5.0, 5.200)], axes[1])
    assert axes[0].get_xlim()[1] > 201


def test_an_unwatched_step_has_no_device_bar():
    assert bars(plot.timeline([step(5.0, None)]), 0.2) == []


def test_a_timeline_of_nothing_says_so():
    with pytest.raises(ValueError, match="The trace has 1 steps, so 12 from step 3 on"):
        plot.timeline([step(5.0, 5.1)], first=3)


def test_memory_bars_are_megabytes_by_pool_and_skip_what_is_not_there():
    sizes = {"weights": 3_000_000, "kv": 1_000_000, "rows": 500, "draft_logits": 0}
    ax = plot.memory({"memory_bytes": sizes})
    assert [bar.get_width() for bar in ax.patches] == [3.0, 1.0, 0.0005]
    assert "4.0 MB in all" in ax.get_xlabel() and "megabytes" in ax.get_xlabel()
    assert [text.get_text() for text in ax.texts] == [
        "3.0 MB, 75.0%",
        "1.0 MB, 25.0%",
        "0.5 kB, 0.0%",
    ]


def test_a_given_axes_is_drawn_on():
    _, ax = plt.subplots()
    assert plot.memory({"memory_bytes": {"weights": 1}}, ax) is ax
