"""Beam search: the likeliest continuations, several at a time; made of calls of `generate`."""

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Protocol

from jaxspec import progress_bar
from jaxspec.checks import boolean, integer, real, shown
from jaxspec.inputs import InputProcessor
from jaxspec.logprobs import Logprob
from jaxspec.outputs import CompletionOutput, RequestOutput, Sample
from jaxspec.prompts import MAX_SAMPLES, Prompt, prompts_of
from jaxspec.request import Request
from jaxspec.sampling_params import MAX_LOGPROBS, SamplingParams
from jaxspec.tokenizer import Tokenizer

MAX_BEAM_WIDTH = MAX_LOGPROBS // 2
"""Each beam offers twice as many tokens: as many may end it as go on."""
MAX_LENGTH_PENALTY = 10.0  # beyond it a length to this power could overflow


@dataclasses.dataclass(frozen=True)
class BeamSearchParams:
    """How to search, in the words of vLLM.

    `beam_width` beams are kept, and as many sequences returned. A sequence's score is its
    log-probability divided by its length, prompt included, to the power of `length_penalty`. An end
    token ends it, unless `ignore_eos`. With a `temperature` each beam also offers a token drawn at
    it; log-probabilities are the model's own all the same.

    Raises:
        ValueError: a value outside its range; the message names the rule.
    """

    beam_width: int
    max_tokens: int
    ignore_eos: bool = False
    temperature: float = 0.0
    length_penalty: float = 1.0

    def __post_init__(self) -> None:
        """Check every value, and keep it as Python's own type."""
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
        """What `generate` is asked for each beam."""
        return SamplingParams(
            temperature=self.temperature,
            max_tokens=1,
            ignore_eos=True,
            logprobs=2 * self.beam_width,
        )


@dataclasses.dataclass(frozen=True)
class BeamSearchSequence:
    """A beam: tokens, the prompt's first, and what was chosen among behind the prompt."""

    tokens: list[int]
    logprobs: list[dict[int, Logprob]]
    cum_logprob: float = 0.0  # of the tokens behind the prompt
    text: str | None = None  # of all tokens; None without a tokenizer
    finish_reason: str | None = None  # "stop", "length", "error", "abort"
    stop_reason: int | None = None  # the end token, which is the last of the tokens

    def followed_by(self, token: int, logprobs: dict[int, Logprob]) -> "BeamSearchSequence":
        """This beam with one more token."""
        return BeamSearchSequence(
            tokens=[*self.tokens, token],
            logprobs=[*self.logprobs, logprobs],
            cum_logprob=self.cum_logprob + logprobs[token].logprob,
        )

    def score(self, length_penalty: float) -> float:
        """What beams are ordered by; an end token does not count to the length."""
        length = len(self.tokens) - (self.stop_reason is not None)
        return self.cum_logprob / length**length_penalty


@dataclasses.dataclass(frozen=True)
class BeamSearchOutput:
    """The best sequences of a prompt, the best first."""

    sequences: list[BeamSearchSequence]


class Searches(Protocol):
    """The part of an `LLM` that is needed here."""

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
        """Complete prompts."""
        ...

    def prepare(
        self, prompts: Sequence[Prompt], params: Sequence[SamplingParams], /
    ) -> list[list[Sample]]:
        """The samples of each prompt."""
        ...


def beam_search(
    llm: Searches, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams
) -> list[BeamSearchOutput]:
    """The likeliest continuations of each prompt that a beam search finds, the best first.

    In each step all beams of all prompts are completed by one token, together; a beam is read from
    its beginning each time.

    Raises:
        ValueError: as in `generate`, for prompts with `params.max_tokens`.
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
    """The best sequences of each prompt. `next_tokens` completes sequences by one token each."""

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
                if not came.logprobs:  # NaN, or an abort
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
