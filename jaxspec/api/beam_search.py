"""Beam search for the likeliest continuations, by calls of `generate`."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jaxspec.api import progress_bar
from jaxspec.api.inputs import InputProcessor
from jaxspec.checks import boolean, integer, real, shown
from jaxspec.requests.logprobs import Logprob
from jaxspec.requests.outputs import CompletionOutput, RequestOutput, Sample
from jaxspec.requests.prompts import MAX_SAMPLES, Prompt, prompts_of
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import MAX_LOGPROBS, SamplingParams
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


class Searches(Protocol):
    """Interface of `LLM` used by `beam_search`."""

    tokenizer: Tokenizer | None
    _inputs: InputProcessor

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams,
        /,
        *,
        use_tqdm: progress_bar.Bar,
    ) -> list[RequestOutput]:
        """Complete prompts as `LLM.generate` does."""
        ...

    def prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], /
    ) -> list[list[Sample]]:
        """Return the samples of each prompt as `LLMEngine.prepare` does."""
        ...


def beam_search(
    llm: Searches, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """Search for the likeliest continuations of each prompt.

    Each step extends all beams of all prompts by one token, in one call of `generate` with the
    beams as prompts.

    Args:
        llm: The `LLM`.
        prompts: A prompt or a list of prompts, as in `LLM.generate`.
        params: Parameters of the search.

    Returns:
        The output of each prompt, with `params.beam_width` sequences at most.

    Raises:
        ValueError: `params` are no `BeamSearchParams`, there are too many beams, `max_tokens` do
            not fit after a prompt, or as in `generate`.
        RuntimeError: as in `generate`.
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
    whole = dataclasses.replace(params.step, max_tokens=params.max_tokens)
    groups = llm.prepare(batch, [whole] * len(batch))
    for number, (sample, *_) in enumerate(groups, 1):
        _check_room(number, sample.request, params)
    found = search(
        lambda beams: _next_tokens(llm, beams, params.step),
        [list(group[0].request.prompt) for group in groups],
        params,
        () if params.ignore_eos else llm._inputs.eos_ids,
    )
    return [BeamSearchOutput([_with_text(each, llm.tokenizer) for each in best]) for best in found]


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


def _check_room(number: int, request: Request, params: BeamSearchParams) -> None:
    room = request.max_len - len(request.prompt)
    if room < params.max_tokens:
        raise ValueError(
            f"Prompt {number} leaves room for {room} tokens, and max_tokens is "
            f"{params.max_tokens}. Shorten the prompt, lower max_tokens, or raise max_model_len."
        )


def _next_tokens(
    llm: Searches, beams: list[list[int]], step: SamplingParams
) -> list[CompletionOutput]:
    prompts = [{"prompt_token_ids": tokens} for tokens in beams]
    outputs = llm.generate(prompts, step, use_tqdm=False)
    return [output.outputs[0] for output in outputs]


def _with_text(beam: BeamSearchSequence, tokenizer: Any) -> BeamSearchSequence:
    text = None if tokenizer is None else tokenizer.decode(beam.tokens)
    return dataclasses.replace(beam, text=text)
