"""Score: log-probabilities of texts that are given; one of the calls that `generate` can serve."""

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from jaxspec.checks import integer
from jaxspec.logprobs import Logprob
from jaxspec.outputs import RequestOutput
from jaxspec.prompts import Prompt
from jaxspec.sampling_params import MAX_LOGPROBS, SamplingParams


@dataclasses.dataclass(frozen=True)
class TextScore:
    """What a model thinks of a text.

    `logprobs` has a dict for each of `token_ids`: the token's own `Logprob` by its id, then those
    of the likeliest ids in its place; None for the first token, which nothing predicts.
    """

    token_ids: list[int]
    logprobs: list[dict[int, Logprob] | None]

    @property
    def token_logprobs(self) -> list[float | None]:
        """The log-probability of each token, given those before it."""
        places = zip(self.token_ids, self.logprobs, strict=True)
        return [None if entry is None else entry[token].logprob for token, entry in places]

    def total(self, start: int = 1) -> float:
        """The log-probability of the tokens from number `start` on, given those before them."""
        return sum((x for x in self.token_logprobs[start:] if x is not None), start=0.0)


class Generates(Protocol):
    """The part of an `LLM` that is needed here."""

    def generate(
        self, prompts: Prompt | Sequence[Prompt], sampling_params: SamplingParams, /
    ) -> list[RequestOutput]:
        """Complete prompts."""
        ...


def score(llm: Generates, prompts: Prompt | Sequence[Prompt], logprobs: int = 0) -> list[TextScore]:
    """The log-probability of each token of texts, each a text or `{"prompt_token_ids": [...]}`.

    `logprobs`: how many of the likeliest ids are told in each place besides. To compare endings of
    one beginning, give the texts as ids and add up from where they part: `score.total(start)`. One
    more token is generated, so a text must have room for it.

    Raises:
        ValueError: as in `generate`.
        RuntimeError: as in `generate`, and if a text was aborted before it was read.
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
