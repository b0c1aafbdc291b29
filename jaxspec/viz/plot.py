"""Plots of generations with matplotlib (`pip install -e ".[notebook]"`).

`tokens` returns coloured text. Each other function draws on `ax`, or on a new figure if it is None,
and returns the axes.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.engine.engine import StepTimes
from jaxspec.requests.outputs import CompletionOutput, RequestOutput
from jaxspec.requests.request import AcceptanceCounts
from jaxspec.runner.memory import HOLDER_WORDS
from jaxspec.text.tokenizer import Tokenizer
from jaxspec.viz.colored_tokens import ColoredText
from jaxspec.viz.timeline import STAGES, Span, rows_of

try:
    import matplotlib.pyplot as plt
    from matplotlib.axes import Axes
    from matplotlib.ticker import PercentFormatter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        'jaxspec.viz.plot needs matplotlib, which is not installed: pip install -e ".[notebook]".'
    ) from error

_Runs = Mapping[str, AcceptanceCounts | Mapping[str, Any]]  # or the `LLM.metrics` of one engine


def tokens(
    output: RequestOutput | CompletionOutput, tokenizer: Tokenizer | None = None
) -> ColoredText:
    """Colour the text of one sample by the source of each token: the target, or draft 1, 2, ...

    Notebooks show the colours, and so does `print` in a terminal.

    Args:
        output: A request with one sample, or a sample.
        tokenizer: `llm.tokenizer`; None shows the token ids.

    Raises:
        ValueError: there are several samples, or the tokenizer is that of another model.
    """
    return ColoredText.of(output, tokenizer)


def acceptance(metrics: AcceptanceCounts | _Runs, ax: Axes | None = None) -> Axes:
    """Plot the share of verify steps in which draft 1, 2, ... was accepted.

    A draft is accepted only if all before it are, so the bars descend. The legend has the tokens
    per verify step, one more than the accepted drafts. Where verify steps had fewer drafts, lines
    mark the share of steps that had the draft at all.

    Args:
        metrics: A run, or several by name. A run is the `RequestMetrics` of requests, or the
            result of `LLM.metrics`: all steps of the engine, by draft method.
        ax: Axes to draw on.

    Raises:
        ValueError: nothing was drafted.
    """
    runs = _runs(metrics)
    for name, run in runs.items():
        if not run.num_drafts:
            raise ValueError(
                f"Acceptance needs drafts, and {name or 'this run'} had none: is "
                "speculative_config None?"
            )
    ax = ax or _new_axes(6, 3.4)
    bar = 0.8 / max(len(runs), 1)
    width = 0
    for place, (name, run) in enumerate(runs.items()):
        rates = [count / run.num_drafts for count in run.accepted_per_position]
        width = max(width, len(rates))
        centre = [i + 1 + (place - (len(runs) - 1) / 2) * bar for i in range(len(rates))]
        edges = [middle - bar / 2 for middle in centre]
        label = f"{name}: " if name else ""
        label += f"{run.mean_acceptance_length:.2f} tokens per verify step"
        bars = ax.bar(centre, rates, bar * 0.94, label=label)
        ax.bar_label(bars, [f"{rate:.0%}" for rate in rates], padding=2, fontsize=8)
        drafted = [count / run.num_drafts for count in run.drafted_per_position]
        if min(drafted) < 0.95:  # a request's last verify often has fewer drafts
            right = [start + bar for start in edges]
            label = "_" if ax.collections else "steps that had such a draft"  # labelled once
            ax.hlines(drafted, edges, right, colors="#555555", linewidths=1.5, label=label)
    ax.set(xlabel="draft", ylabel="verify steps in which it stood", ylim=(0, 1.12))
    ax.set_xticks(range(1, width + 1))
    ax.set_yticks([0, 0.25, 0.5, 0.75, 1])
    ax.yaxis.set_major_formatter(PercentFormatter(1))
    _legend_above(ax, 1)
    return ax


def speed(runs: Mapping[str, Sequence[RequestOutput]], ax: Axes | None = None) -> Axes:
    """Plot milliseconds per token, after the first, of the same prompts in several runs.

    Args:
        runs: Outputs of each run, by its name.
        ax: Axes to draw on.

    Raises:
        ValueError: there are no runs, their prompts differ, or completions have a single token.
    """
    prompts = {tuple(tuple(o.prompt_token_ids) for o in outputs) for outputs in runs.values()}
    if len(prompts) != 1:
        raise ValueError(
            f"Runs are compared on the same prompts, and these have {len(prompts)} lists of them: "
            f"{', '.join(runs) or 'no runs'}."
        )
    if any(output.metrics.tpot is None for outputs in runs.values() for output in outputs):
        raise ValueError(
            "Time per token needs completions of at least two tokens. Raise max_tokens."
        )
    ax = ax or _new_axes(7, 0.6 + 0.6 * len(next(iter(prompts))))
    bar = 0.8 / len(runs)
    for place, (name, outputs) in enumerate(runs.items()):
        times = [1000 * output.metrics.tpot for output in outputs if output.metrics.tpot]
        centre = [i + (place - (len(runs) - 1) / 2) * bar for i in range(len(times))]
        bars = ax.barh(centre, times, bar * 0.94, label=name)
        ax.bar_label(bars, fmt="%.1f", padding=2, fontsize=8)
    names = [_short(output) for output in next(iter(runs.values()))]
    ax.set_yticks(range(len(names)), names, family="monospace", fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel("milliseconds per token after the first")
    ax.margins(x=0.1)
    _legend_above(ax, len(runs))
    return ax


def timeline(
    steps: Sequence[StepTimes], ax: Axes | None = None, *, first: int = 0, count: int = 12
) -> Axes:
    """Plot the work of host and device for `count` steps of `LLM.trace`, one row per step.

    The upper half of a row is the host, the lower half the device. With several steps in flight,
    the host plans a row while the device still runs one above it. The end of a step on the device
    is measured by a Python thread. Its start is not measured: it is drawn at the end of the step's
    dispatch or of the step before, whichever is later, and pale from the earliest possible start.

    Args:
        steps: Steps of `LLM.trace`.
        ax: Axes to draw on.
        first: Index of the first step.
        count: Maximum number of steps.

    Raises:
        ValueError: there is no step `first`.
    """
    rows = rows_of(steps, first=first, count=count) if first >= 0 else []
    if not rows:
        raise ValueError(
            f"The trace has {len(steps)} steps, so {count} from step {first} on can't be drawn."
        )
    ax = ax or _new_axes(8, 0.9 + 0.36 * len(rows))
    for place, row in enumerate(rows):
        for span in row.spans:
            _bar(ax, place, span)
    for colour, label in STAGES.values():
        ax.barh(0, 0, color=colour, label=label)
    ax.set_yticks(range(len(rows)), [row.name for row in rows], fontsize=8)
    ax.set_ylim(len(rows) - 0.4, -0.6)
    ax.margins(x=0.02)  # not set_xlim, which would clip the longer of two timelines on one axis
    ax.set_xlabel(f"milliseconds since step {first} was planned")
    ax.grid(axis="x", alpha=0.3)
    ax.set_axisbelow(True)
    ax.legend(loc="lower left", fontsize=8)  # steps run from the upper left to the lower right
    return ax


def memory(metrics: Mapping[str, Any], ax: Axes | None = None) -> Axes:
    """Plot device memory by use; `metrics` is the result of `LLM.metrics`."""
    pools = {name: size for name, size in metrics["memory_bytes"].items() if size}
    pools = dict(sorted(pools.items(), key=lambda item: -item[1]))
    ax = ax or _new_axes(7, 0.8 + 0.42 * len(pools))
    total = sum(pools.values())
    bars = ax.barh(range(len(pools)), [size / 1e6 for size in pools.values()], color="#3b6fb6")
    labels = [f"{_megabytes(size)}, {size / total:.1%}" for size in pools.values()]
    ax.bar_label(bars, labels, padding=3, fontsize=8)
    ax.set_yticks(range(len(pools)), [HOLDER_WORDS.get(name) or name for name in pools], fontsize=8)
    ax.invert_yaxis()
    ax.set_xlabel(f"megabytes on the device, {_megabytes(total)} in all")
    ax.margins(x=0.2)
    return ax


def _runs(
    metrics: AcceptanceCounts | Mapping[str, Any], name: str = ""
) -> dict[str, AcceptanceCounts]:
    """Return the counts of each run by name; those of an engine by run name and draft method."""
    if isinstance(metrics, AcceptanceCounts):
        return {name: metrics}
    if "acceptance" not in metrics:
        several = (_runs(run, key) for key, run in metrics.items())
        return {key: counts for runs in several for key, counts in runs.items()}
    of_method = {
        method: AcceptanceCounts(**counts) for method, counts in metrics["acceptance"].items()
    }
    if not of_method:
        return {name: AcceptanceCounts()}
    return {f"{name}, {m}" if name else m: counts for m, counts in of_method.items()}


def _new_axes(width: float, height: float) -> Axes:
    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    ax.spines[["top", "right"]].set_visible(False)
    return ax


def _legend_above(ax: Axes, columns: int) -> None:
    where: dict[str, Any] = {"loc": "lower left", "bbox_to_anchor": (0, 1.0), "ncols": columns}
    ax.legend(**where, frameon=False, fontsize=8)


def _bar(ax: Axes, row: int, span: Span) -> None:
    """Draw the span in the upper half of the row for the host, in the lower one for the device."""
    middle = row + 0.2 if span.stage == "device" else row - 0.2
    alpha = 1.0 if span.is_certain else 0.35
    where = {"left": 1000 * span.start, "color": STAGES[span.stage][0], "alpha": alpha}
    ax.barh(middle, 1000 * (span.end - span.start), 0.4, **where)


def _megabytes(size: float) -> str:
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size / 1e3:.1f} kB"


def _short(output: RequestOutput, length: int = 28) -> str:
    """Return the start of a prompt as an axis label; `$` is escaped, as it starts a formula."""
    text = output.prompt or f"{len(output.prompt_token_ids)} token ids"
    text = " ".join(text.split()).replace("$", r"\$")
    return text if len(text) <= length else text[: length - 1] + "…"
