"""The tables of a model that nobody here made, from the package index."""

from typing import Any

from benchmarks.report.markdown_table import markdown

Figures = dict[str, Any]


def decoding(figures: Figures) -> str:
    """Each engine's tokens a second; no ratios, which a busy machine makes up."""
    return markdown(
        ["greedy, 1 request", "tokens per second", "same ids"],
        (
            [
                _name(case),
                f"{case['tokens_per_second']:.1f}",
                f"{case['same_ids']} of {figures['prompts']}",
            ]
            for case in figures["decoding"]
        ),
    )


def _name(case: Figures) -> str:
    if case["engine"] == "transformers":
        return f"transformers, {case['threads']} thread" + "s" * (case["threads"] > 1)
    drafts = case["drafts"]
    return f"jaxspec, {drafts} n-gram drafts" if drafts else "jaxspec, no drafts"


def acceptance(figures: Figures) -> str:
    """What n-gram drafts gave, by what the prompts ask for."""
    head = ["prompts", "tokens", "tokens a step", "steps with drafts", "tokens a step with drafts"]
    head += [f"draft {i} stood" for i in range(1, figures["drafts"]["num_speculative_tokens"] + 1)]
    return markdown(
        head,
        (
            [
                f"{case['count']} {case['prompts']}" if case["prompts"] != "all" else "all",
                f"{case['tokens']:,}",
                f"{case['tokens_per_step']:.2f}",
                f"{case['share_of_steps_with_drafts']:.0%}",
                f"{case['tokens_per_verify']:.2f}",
                *(f"{share:.0%}" for share in case["acceptance_by_position"]),
            ]
            for case in figures["acceptance"]
        ),
    )
