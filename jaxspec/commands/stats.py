"""One-line summaries of generated text for the commands."""

from jaxspec.requests.request import RequestMetrics


def summary(metrics: RequestMetrics, num_tokens: int, seconds: float) -> str:
    """Format one line: tokens, ms per token, tokens per verify step, acceptance by position."""
    if not num_tokens:
        return "0 tokens"
    line = f"{num_tokens} tokens, {1000 * seconds / num_tokens:.2f} ms per token"
    if not metrics.num_drafts:
        return f"{line}, no speculation"
    return (
        f"{line}, {metrics.mean_acceptance_length:.2f} tokens per verify step, "
        f"acceptance by position {acceptance(metrics)}"
    )


def acceptance(metrics: RequestMetrics) -> str:
    """Format the share of verify steps that accepted the first draft, the second, and so on."""
    rates = (count / metrics.num_drafts for count in metrics.accepted_per_position)
    return " ".join(f"{rate:.2f}" for rate in rates)


def failure(failed: int, total: int) -> str:
    """Return the error message for NaN logits in `failed` of `total` prompts."""
    which = f" for {failed} of {total} prompts" if total > 1 else ""
    return (
        f"jaxspec: the model gave no finite logits (scores of the next token){which}, so the text "
        "ends early. Its weights may be damaged, or their values too large for the dtype: "
        "download them again, or try --dtype float32."
    )
