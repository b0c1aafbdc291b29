"""Beam search for the likeliest continuations, with any source of next tokens."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from jaxspec.checks import boolean, integer, real, shown
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import CompletionOutput
from jaxspec.requests.prompts import MAX_SAMPLES, prompts_of
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import MAX_LOGPROBS, RAW, SamplingParams
from jaxspec.text.tokenizer import Tokenizer

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Largest beam width: each beam needs logprobs of twice as many tokens, as some may end it."""
MAX_LENGTH_PENALTY = 10.0  # larger powers of a length could overflow


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """Parameters of a beam search, under vLLM's names.

    Sequences are ranked by log-probability / length ** `length_penalty`, where the length includes
    the prompt.

    Attributes:
        beam_width: Number of beams kept in each step, and of sequences returned.
        max_tokens: Most tokens to generate.
        ignore_eos: Continue after end-of-sequence tokens.
        temperature: Above 0, each beam has one more candidate, a token sampled at this temperature.
            Log-probabilities are the model's in any case.
        length_penalty: Exponent of the length; 0 ignores lengths.

    Raises:
        ValueError: a value is out of range.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Validate the values, and convert them to Python numbers."""
        hint = "; each beam takes twice as many logprobs"
        width = integer("beam_width", self.beam_width, 1, MAX_BEAM_WIDTH, hint=hint)
        penalty = real(self.length_penalty)
        if not -MAX_LENGTH_PENALTY <= penalty <= MAX_LENGTH_PENALTY:
            most = MAX_LENGTH_PENALTY
            raise ValueError(
                f"length_penalty must be a number from -{most:g} to {most:g}, got "
                f"{shown(self.length_penalty)}; 0 takes no account of lengths."
            )
        object.__setattr__(self, "beam_width", width)
        object.__setattr__(self, "max_tokens", integer("max_tokens", self.max_tokens, 1))
        object.__setattr__(self, "ignore_eos", boolean("ignore_eos", self.ignore_eos))
        object.__setattr__(self, "temperature", self.step.temperature)
        object.__setattr__(self, "length_penalty", penalty)

    @property
    def step(self) -> SamplingParams:
        """Parameters of the `generate` call that extends each beam by one token."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=1,
            ignore_eos=True,
            logprobs=2 * self.beam_width,
            logprobs_mode=RAW,
        )


@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """A sequence of a beam search.

    Attributes:
        tokens: Tokens of the prompt and of the continuation.
        logprobs: For each token of the continuation, the logprobs of its candidates by id.
        cum_logprob: Log-probability of the continuation.
        text: Text of all tokens; None without a tokenizer.
        finish_reason: "stop", "length", "error" or "abort"; None during the search.
        stop_reason: The end-of-sequence token that ended the sequence, if any; it is the last of
            `tokens`.
    """

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0
    text: str | None = None
    finish_reason: str | None = None
    stop_reason: int | None = None

    def followed_by(self, token: int, logprobs: dict[int, Logprob]) -> "BeamSearchSequence":
        """Return the sequence extended by a token.

        Args:
            token: The token.
            logprobs: Logprobs of all candidates, by id.
        """
        return BeamSearchSequence(
            tokens=[*self.tokens, token],
            logprobs=[*self.logprobs, logprobs],
            cum_logprob=self.cum_logprob + logprobs[token].logprob,
        )

    def score(self, length_penalty: float) -> float:
        """Return the ranking score of the sequence; a final end token does not count as length.

        Args:
            length_penalty: Exponent of the length.
        """
        length = len(self.tokens) - (self.stop_reason is not None)
        return self.cum_logprob / length**length_penalty


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """Sequences found for a prompt.

    Attributes:
        sequences: The sequences, best first.
    """

    sequences: list[BeamSearchSequence]

    @staticmethod
    def of(found: Iterable[BeamSearchSequence], tokenizer: Tokenizer | None) -> "BeamSearchOutput":
        """Return the output of a prompt, with texts if there is a tokenizer."""
        if tokenizer is not None:
            found = [dataclasses.replace(e, text=tokenizer.decode(e.tokens)) for e in found]
        return BeamSearchOutput(list(found))


def checked_batch(prompts: Any, params: Any) -> list[Any]:
    """Return the prompts of a search as a list.

    Args:
        prompts: As in `LLM.beam_search`.
        params: As in `LLM.beam_search`.

    Raises:
        ValueError: `params` are no `BeamSearchParams`, or there are too many beams.
    """
    if not isinstance(params, BeamSearchParams):
        raise ValueError(
            f"params must be BeamSearchParams, got {shown(params)}. Build them as in "
            "BeamSearchParams(beam_width=4, max_tokens=32)."
        )
    batch = prompts_of(prompts)
    if len(batch) * params.beam_width > MAX_SAMPLES:
        raise ValueError(
            f"One search may have at most {MAX_SAMPLES:,} beams, got {len(batch):,} prompts of "
            f"{params.beam_width} each. Make several calls."
        )
    return batch


def check_room(requests: Iterable[Request], params: BeamSearchParams) -> None:
    """Raise ValueError if `max_tokens` do not fit after a prompt; `requests` have the prompts."""
    for number, request in enumerate(requests, 1):
        room = request.max_len - len(request.prompt)
        if room < params.max_tokens:
            raise ValueError(
                f"Prompt {number} leaves room for {room} tokens, and max_tokens is "
                f"{params.max_tokens}. Shorten the prompt, lower max_tokens, or raise "
                "max_model_len."
            )


def search(
    next_tokens: Callable[[list[list[int]]], Sequence[CompletionOutput]],
    prompts: Iterable[list[int]],
    params: BeamSearchParams,
    eos_ids: Sequence[int],
) -> list[list[BeamSearchSequence]]:
    """Search with any source of next tokens.

    Args:
        next_tokens: Completes each of a list of token sequences by one token, with logprobs.
        prompts: Token ids of each prompt.
        params: Parameters of the search.
        eos_ids: Tokens that end a sequence.

    Returns:
        The sequences of each prompt, best first.
    """

    def best(beams: Iterable[BeamSearchSequence]) -> list[BeamSearchSequence]:
        ordered = sorted(beams, key=lambda beam: beam.score(params.length_penalty), reverse=True)
        return ordered[: params.beam_width]

    running = [[BeamSearchSequence(prompt, [])] for prompt in prompts]
    ended: list[list[BeamSearchSequence]] = [[] for _ in running]
    for _ in range(params.max_tokens):
        flat = [beam for beams in running for beam in beams]
        outputs = iter(next_tokens([beam.tokens for beam in flat]) if flat else ())
        for beams, done in zip(running, ended, strict=True):
            offered = []
            for beam in beams:
                came = next(outputs)
                if not came.logprobs:  # an error (NaN logits) or an abort
                    done.append(dataclasses.replace(beam, finish_reason=came.finish_reason))
                    continue
                for token in came.logprobs[0]:
                    longer = beam.followed_by(token, came.logprobs[0])
                    if token in eos_ids:
                        end = {"finish_reason": "stop", "stop_reason": token}
                        done.append(dataclasses.replace(longer, **end))
                    else:
                        offered.append(longer)
            beams[:] = best(offered)
    for beams, done in zip(running, ended, strict=True):
        done += [dataclasses.replace(beam, finish_reason="length") for beam in beams]
    return [best(done) for done in ended]
