"""Results of `LLM.score`: log-probabilities of given texts."""

import dataclasses

from jaxspec.checks import shown
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import RequestOutput
from jaxspec.requests.sampling_params import PROCESSED, RAW, SamplingParams


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

    @staticmethod
    def of(number: int, output: RequestOutput) -> "TextScore":
        """Return the score of text `number`, from the output of a request with prompt logprobs.

        Raises:
            RuntimeError: the request was aborted before its prompt logprobs were computed.
        """
        if output.prompt_logprobs is None:
            raise RuntimeError(
                f"Text {number} was aborted before it was read, so it has no score. Call again."
            )
        return TextScore(output.prompt_token_ids, output.prompt_logprobs)


def scoring_params(
    count: int, temperature: float, top_k: int, top_p: float, mode: str
) -> SamplingParams:
    """Return the parameters of a request whose prompt logprobs are the scores of a text.

    Args:
        count: Number of likeliest ids to report.
        temperature: As in `LLM.score`.
        top_k: As in `LLM.score`.
        top_p: As in `LLM.score`.
        mode: `logprobs_mode` of `LLM.score`.

    Raises:
        ValueError: as in `SamplingParams`, `temperature` is greedy, or `mode` is None.
    """
    if mode is None:
        raise ValueError(
            f"logprobs_mode must be {PROCESSED!r} or {RAW!r} in score, got None. The default is "
            f"{PROCESSED!r}, for any engine."
        )
    params = SamplingParams(
        temperature=temperature,
        top_k=top_k,
        top_p=top_p,
        max_tokens=1,
        prompt_logprobs=count,
        logprobs_mode=mode,
    )
    if params.is_greedy:
        raise ValueError(
            f"temperature must be above 0 in score, got {shown(temperature)}: greedy decoding "
            "draws nothing. 1 is the model's own distribution."
        )
    if mode == RAW or params == SamplingParams(
        max_tokens=1, prompt_logprobs=count, logprobs_mode=PROCESSED
    ):  # equal to raw ones, for which a greedy program suffices
        return SamplingParams(
            temperature=0.0, max_tokens=1, prompt_logprobs=count, logprobs_mode=RAW
        )
    return params
