"""`LLM.score`: log-probabilities of given texts, computed by `generate`."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jaxspec.checks import integer
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import RequestOutput
from jaxspec.requests.prompts import Prompt
from jaxspec.requests.sampling_params import MAX_LOGPROBS, SamplingParams


@dataclasses.dataclass(frozen=True)
class TextScore:
    """Log-probabilities of the tokens of a text.

    Attributes:
        token_ids: Token ids of the text.
        logprobs: For each of `token_ids` a dict by id: the token's `Logprob` first, then those of
            the likeliest ids at its position. None for the first token, which is not predicted.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]

    @property
    def token_logprobs(self) -> list[float | None]:
        """Log-probability of each token given those before it; None for the first token."""
        places = zip(self.token_ids, self.logprobs, strict=True)
        return [None if entry is None else entry[token].logprob for token, entry in places]

    def total(self, start: int = 1) -> float:
        """Return the log-probability of the tokens from index `start`, given those before them.

        Args:
            start: Index of the first token to count.

        Returns:
            The sum of the tokens' log-probabilities. The first token of the text counts as 0.
        """
        return sum((x for x in self.token_logprobs[start:] if x is not None), start=0.0)


class Generates(Protocol):
    """Interface of `LLM` used by `score`."""

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams, /
    ) -> list[RequestOutput]:
        """Complete prompts as `LLM.generate` does."""
        ...


def score(llm: Generates, prompts: Prompt | Sequence[Prompt], logprobs: int = 0) -> list[TextScore]:
    """Return the log-probability of each token of texts.

    To compare continuations of a common beginning, pass token ids and sum from the position at
    which they diverge: `TextScore.total(start)`. One token is generated after each text, so a text
    must be shorter than `max_model_len`.

    Args:
        llm: The `LLM`.
        prompts: A text or a list of texts, in the forms of `LLM.generate`.
        logprobs: Number of likeliest ids to report at each position besides the token itself.

    Returns:
        The score of each text.

    Raises:
        ValueError: `logprobs` is out of range, or as in `generate`.
        RuntimeError: a text was aborted before its scores were computed, or as in `generate`.
    """
    count = integer("logprobs", logprobs, 0, MAX_LOGPROBS)
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=count)
    scores = []
    for number, output in enumerate(llm.generate(prompts, params), 1):
        if output.prompt_logprobs is None:
            raise RuntimeError(
                f"Text {number} was aborted before it was read, so it has no score. Call again."
            )
        scores.append(TextScore(output.prompt_token_ids, output.prompt_logprobs))
    return scores
