"""`InputProcessor`: checked samples from prompts and parameters.

All validation happens here, before any request is queued.
"""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jaxspec.checks import INT64_MAX, PromptTooLongError, integer, shown
from jaxspec.grammar import Grammar
from jaxspec.plan.table_plan import MAX_BAD_WORD_TOKENS, MAX_BIASES, MAX_STOP_IDS
from jaxspec.requests.logits_processors import ProcessorParams
from jaxspec.requests.outputs import Sample
from jaxspec.requests.prompts import (
    Prompt,
    TokenizedPrompt,
    boundaries_in,
    check_is_one,
    check_num_samples,
    named,
    names_of,
    only_prompt,
    params_of,
    parts_of,
    priorities_of,
    read_ids,
)
from jaxspec.requests.request import Request
from jaxspec.requests.sampling_params import RAW, SamplingParams
from jaxspec.requests.stop_strings import StopStrings
from jaxspec.text.conversations import TemplateOptions, check_options, conversations_of
from jaxspec.text.tokenizer import Tokenizer


def check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    """Check that token ids are in the vocabulary.

    Args:
        name: Name of the ids, for the message.
        ids: The token ids.
        vocab_size: Number of token ids of the model.

    Raises:
        ValueError: an id is negative, or not below `vocab_size`.
    """
    if wrong := [token for token in ids if not 0 <= token < vocab_size]:
        raise ValueError(
            f"Token ids must be 0 to {vocab_size - 1} with this model, and {name} has "
            f"{', '.join(map(shown, wrong[:5]))}. Use the ids of this model's own tokenizer."
        )


def end_ids(
    eos_ids: Sequence[int], tokenizer: Tokenizer | None, vocab_size: int
) -> tuple[int, ...]:
    """Return the ids that end a sample, ascending.

    Args:
        eos_ids: End-of-sequence ids of the model; those of the tokenizer are added.
        tokenizer: The model's tokenizer; None if it has none.
        vocab_size: Number of token ids of the model; larger ids are left out.
    """
    ends = {*eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
    return tuple(sorted(i for i in ends if 0 <= i < vocab_size))


def check_biases(params: SamplingParams, stop_ids: Sequence[int], vocab_size: int) -> None:
    """Check `logit_bias` and `allowed_token_ids`.

    Args:
        params: Sampling parameters.
        stop_ids: Token ids that end the request.
        vocab_size: Number of token ids of the model.

    Raises:
        ValueError: an id is not in the vocabulary, there are more than `MAX_BIASES` biases, or
            `min_tokens` forbids all allowed ids.
    """
    biases, allowed = params.logit_bias or {}, params.allowed_token_ids or ()
    check_ids("logit_bias", tuple(biases), vocab_size)
    check_ids("allowed_token_ids", allowed, vocab_size)
    if len(biases) > MAX_BIASES:
        raise ValueError(
            f"logit_bias may have at most {MAX_BIASES:,} entries, got {len(biases):,}. Name what "
            "may come in allowed_token_ids, which may be any number."
        )
    if allowed and params.min_tokens and {*allowed} <= {*stop_ids}:
        raise ValueError(
            f"allowed_token_ids must have an id that ends no request while min_tokens="
            f"{params.min_tokens} forbids those, got {shown(allowed)}. Allow another id, or set "
            "min_tokens=0."
        )


def bad_word_ids(
    words: Sequence[str], tokenizer: Tokenizer, vocab_size: int
) -> tuple[tuple[int, ...], ...]:
    """Return the forbidden token sequences of `bad_words`.

    A word has up to two sequences: at the start of a text, and after a space inside it. If the
    tokenizer encodes the space as a separate token, both are the same and are returned once.

    Args:
        words: The words.
        tokenizer: The model's tokenizer.
        vocab_size: Number of token ids of the model.

    Raises:
        ValueError: a word has no tokens, too many, or one that is not in the vocabulary.
    """
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = _encode(word.lstrip(), word, tokenizer)
        inside = _encode(" " + word.lstrip(), word, tokenizer)
        found[bare] = None
        if len(inside) == len(bare) and inside[0] != bare[0]:
            found[inside] = None
    for ids in found:
        check_ids("bad_words", ids, vocab_size)
    return tuple(found)


def _encode(text: str, word: str, tokenizer: Tokenizer) -> tuple[int, ...]:
    ids = tuple(tokenizer.encode(text, add_special_tokens=False))
    if not 0 < len(ids) <= MAX_BAD_WORD_TOKENS:
        raise ValueError(
            f"A text of bad_words must have 1 to {MAX_BAD_WORD_TOKENS} tokens, and {shown(word)} "
            f"has {len(ids)}. Give a shorter part of it, or end texts at it with stop."
        )
    return ids


MAX_PROMPT_TOKENS = 2**28
"""Most prompt tokens of a call, summed over all samples, since each sample has a list of them."""


class InputProcessor:
    """Creates the samples of prompts: token ids, noise seeds and stop conditions. Thread-safe.

    Attributes:
        tokenizer: The model's tokenizer; None if it has none.
        eos_ids: Token ids that end a sample unless `ignore_eos` is set.
        default_params: Parameters of calls without any.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: Sequence[int],
        seed: int,
        default_params: SamplingParams | None = None,
        finds_boundaries: bool = False,
        reasoning_parser: str | None = None,
        logprobs_mode: str = RAW,
        processor_params: ProcessorParams = ProcessorParams(),  # noqa: B008  immutable
        returns_routes: bool = False,
    ):
        """Create a processor for one model.

        Args:
            tokenizer: The model's tokenizer; None if it has none.
            vocab_size: Number of token ids of the model.
            max_model_len: Most tokens of a prompt with its output.
            eos_ids: End-of-sequence ids of the model; those of the tokenizer are added if they are
                in the vocabulary.
            seed: Seed for prompts without one.
            default_params: Parameters of calls without any; None means `SamplingParams()`.
            finds_boundaries: Find the prefix lengths of chats at which later turns will diverge.
            reasoning_parser: A name of `REASONING_PARSERS`, for a model that reasons although its
                chat template has no `</think>`; None means that the template decides.
            logprobs_mode: That of parameters without one.
            processor_params: Parameters of the engine's logits processors.
            returns_routes: The engine returns the experts of each token.
        """
        self.tokenizer, self._vocab_size = tokenizer, vocab_size
        self._max_model_len = max_model_len
        self.eos_ids = end_ids(eos_ids, tokenizer, vocab_size)
        self._seed, self.default_params = seed, default_params or SamplingParams()
        self._finds_boundaries, self._reasoning_parser = finds_boundaries, reasoning_parser
        self._logprobs_mode, self._processor_params = logprobs_mode, processor_params
        self._returns_routes = returns_routes
        self._num_prompts = 0  # numbers the prompts, so that each without a seed has other noise
        self._lock = threading.Lock()

    def process(
        self,
        prompts: Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        request_ids: Sequence[str] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[list[Sample]]:
        """Create the samples of each prompt, without queueing them.

        Args:
            prompts: The prompts.
            sampling_params: As in `LLM.generate`.
            request_ids: Id of each prompt; None means numbers.
            priority: As in `LLM.generate`.

        Returns:
            The samples of each prompt.

        Raises:
            ValueError: a prompt is empty or leaves no room for a token, an id is not in the
                vocabulary, there is text but no tokenizer, there are too many stop ids, biases,
                samples or prompt tokens, no logits processor reads an entry of `extra_args`, the
                number of request ids or priorities is wrong, or as
                in `Grammar.of`.
        """
        params = params_of(sampling_params, len(prompts), self.default_params)
        check_num_samples(param.n for param in params)
        given = None if request_ids is None else names_of(request_ids, len(prompts))
        priorities = priorities_of(priority, len(prompts))
        stop_ids = [self._stop_ids(param) for param in params]
        for param in params:
            param.logprobs_mode = param.logprobs_mode or self._logprobs_mode
            self._processor_params.read(param.extra_args)  # before any request is made
        bad_words = [self._bad_words(*each) for each in zip(params, stop_ids, strict=True)]
        tokenized, grammars, held = list[TokenizedPrompt](), list[Grammar | None](), 0
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True), 1):
            name = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
            with named(f"prompt {number}", len(prompts)):
                found = self._tokenized(prompt, param)
            length = len(found.token_ids)
            if not length:
                raise ValueError(
                    f"A prompt must have at least one token, and {name} has none. Give it some "
                    "text or token ids."
                )
            if not isinstance(prompt, TokenizedPrompt):
                check_ids(name, found.token_ids, self._vocab_size)
            held += length * param.n
            self._check_length(name, length, held)
            tokenized.append(found)
            grammars.append(self._grammar(found, param))
        with self._lock:
            first = self._num_prompts
            self._num_prompts += len(tokenized)
        numbers = range(first, first + len(tokenized))
        names = given or map(str, numbers)
        return [
            self._samples(*each)
            for each in zip(
                *(names, tokenized, params, stop_ids, bad_words, grammars, numbers, priorities),
                strict=True,
            )
        ]

    def process_one(
        self,
        prompt: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | None = None,
        request_id: str | None = None,
        priority: int = 0,
        *,
        call: str = "stream",
    ) -> list[Sample]:
        """Create the samples of one prompt, without queueing them.

        Args:
            prompt: The prompt, or a list of one.
            sampling_params: Parameters; None means `default_params`.
            request_id: Id of the request; None means a number.
            priority: Waiting requests with lower values enter the batch first.
            call: Name of the call, for error messages.

        Returns:
            The samples.

        Raises:
            ValueError: as in `process`, or there are several prompts, or none.
        """
        only, names = only_prompt(prompt, call), None if request_id is None else [request_id]
        priority = integer("priority", priority, -INT64_MAX)
        (samples,) = self.process([only], sampling_params, names, priority)
        return samples

    def twin(self, number: int | None = None) -> "Callable[[], InputProcessor]":
        """Return a picklable factory of a processor like this one, for another process.

        Args:
            number: Number of the process, which selects the noise of prompts without a seed; None
                means the noise of this processor, which is not to be used besides.

        Returns:
            A factory.
        """
        seed = self._seed
        if number is not None:
            seed = np.random.SeedSequence([self._seed % 2**32, number]).generate_state(1)[0]
        return functools.partial(
            InputProcessor,
            self.tokenizer,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            eos_ids=self.eos_ids,
            seed=int(seed),
            default_params=self.default_params,
            finds_boundaries=self._finds_boundaries,
            reasoning_parser=self._reasoning_parser,
            logprobs_mode=self._logprobs_mode,
            processor_params=self._processor_params,
            returns_routes=self._returns_routes,
        )

    def chats(self, messages: Any, options: TemplateOptions) -> list[TokenizedPrompt]:
        """Render and tokenize conversations.

        Args:
            messages: A conversation or a list of conversations.
            options: Template options, as in `LLM.chat`.

        Returns:
            The prompt of each conversation.

        Raises:
            TypeError: an option is unknown.
            ValueError: there is no tokenizer, it has ids outside the vocabulary, or as in
                `Tokenizer.render_chat` and `Tokenizer.encode`.
        """
        check_options(options)
        tokenizer, prompts = self.require_tokenizer("chats"), list[TokenizedPrompt]()
        conversations = conversations_of(messages)
        for number, conversation in enumerate(conversations, 1):
            with named(f"conversation {number}", len(conversations)):
                text, ids, boundaries = tokenizer.chat_prompt(
                    conversation,
                    max_model_len=self._max_model_len,
                    finds_boundaries=self._finds_boundaries,
                    **options,
                )
                check_ids("the prompt", ids, self._vocab_size)
            prompts.append(TokenizedPrompt(tuple(ids), text, cache_boundaries=boundaries))
        return prompts

    def chat(self, messages: Any, options: TemplateOptions) -> TokenizedPrompt:
        """Render and tokenize one conversation.

        Args:
            messages: The conversation, or a list of one.
            options: Template options, as in `LLM.chat`.

        Returns:
            Its prompt, as `chats` returns it.

        Raises:
            TypeError: as in `chats`.
            ValueError: as in `chats`, or there are several conversations.
        """
        prompts = self.chats(messages, options)
        check_is_one("conversation", prompts)
        return prompts[0]

    def require_tokenizer(self, inputs: str) -> Tokenizer:
        """Return the tokenizer.

        Args:
            inputs: Name of the inputs that need it, for the message.

        Raises:
            ValueError: the model has no tokenizer.
        """
        if self.tokenizer is None:
            raise ValueError(
                f"The model's folder has no tokenizer.json, which {inputs} need. Copy it "
                "there from the checkpoint, or work with token ids: {'prompt_token_ids': [...]}."
            )
        return self.tokenizer

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """Return the token ids that end a request, after checking all its stop conditions."""
        own_eos = () if params.ignore_eos else self.eos_ids
        stop_ids = tuple(dict.fromkeys((*(params.stop_token_ids or ()), *own_eos)))
        check_ids("stop_token_ids", stop_ids, self._vocab_size)
        if len(stop_ids) > MAX_STOP_IDS:
            raise ValueError(
                f"A request may have at most {MAX_STOP_IDS} stop token ids, the model's own "
                f"included, got {len(stop_ids)}. Use stop strings for the rest."
            )
        if params.stop:
            self.require_tokenizer("stop strings")
        if not (params.spaces_between_special_tokens or params.skip_special_tokens) and (
            self.tokenizer and self.tokenizer.spaces_tokens_apart
        ):
            raise ValueError(
                "spaces_between_special_tokens must be True with this tokenizer, whose decoder "
                "puts spaces between all tokens; got False. Leave it out."
            )
        return stop_ids

    def _bad_words(
        self, params: SamplingParams, stop_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], ...]:
        """Return the token sequences of `bad_words`, after checking biases and allowed ids."""
        check_biases(params, stop_ids, self._vocab_size)
        if not params.bad_words:
            return ()
        tokenizer = self.require_tokenizer("bad words")
        return bad_word_ids(params.bad_words, tokenizer, self._vocab_size)

    def _grammar(self, prompt: TokenizedPrompt, params: SamplingParams) -> Grammar | None:
        if not params.has_grammar:
            return None
        tokenizer = self.require_tokenizer("structured outputs and thinking budgets")
        if params.structured_outputs is not None and not self.eos_ids:
            raise ValueError(
                "structured_outputs end with an EOS token, and this model has none: neither its "
                "config.json nor its tokenizer_config.json names one. Add eos_token_id there."
            )
        text = prompt.text
        if text is None:
            text = tokenizer.decode(prompt.token_ids, skip_special_tokens=False)
        return Grammar.of(params, tokenizer, text, self._reasoning_parser)

    def _samples(
        self,
        request_id: str,
        prompt: TokenizedPrompt,
        params: SamplingParams,
        stop_ids: tuple[int, ...],
        bad_words: tuple[tuple[int, ...], ...],
        grammar: Grammar | None,
        number: int,
        priority: int,
    ) -> list[Sample]:
        # The first word separates the noise of user seeds from that of prompts without a seed.
        if params.seed is None:
            entropy = [1, self._seed % 2**32, number]
        else:
            entropy = [2, *divmod(params.seed % 2**64, 2**32)]
        samples: list[Sample] = []
        for index in range(params.n):
            seed = int(np.random.SeedSequence([*entropy, index]).generate_state(1)[0])
            request = Request(
                prompt=prompt.token_ids,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
                bad_words=bad_words,
                grammar=grammar,
                parent=samples[0].request if samples else None,
                request_id=request_id,
                index=index,
                own_eos=() if params.ignore_eos else self.eos_ids,
                processor_args=self._processor_params.read(params.extra_args),
                room=self._max_model_len,
                priority=priority,
                cache_salt=prompt.cache_salt,
                cache_boundaries=prompt.cache_boundaries,
                returns_routes=self._returns_routes,
            )
            stream, stops = None, None
            if self.tokenizer and params.detokenize:
                stream = self.tokenizer.stream(params.skip_special_tokens)
            if params.stop:
                keeps_match = params.include_stop_str_in_output
                stops = StopStrings(params.stop, keeps_match=keeps_match)
            samples.append(Sample(request, stream, stops, prompt.text))
        return samples

    def _tokenized(self, prompt: Prompt, params: SamplingParams) -> TokenizedPrompt:
        kept, most = params.truncate_prompt_tokens, self._max_model_len
        if kept == -1:
            wanted = params.max_tokens or most
            kept = most - (wanted if wanted < most else 1)
        if isinstance(prompt, TokenizedPrompt):
            return prompt.truncated(kept)
        text, token_ids, salt, boundaries = parts_of(prompt)
        if token_ids is not None:
            ids = read_ids(token_ids, most, kept)
            ends = boundaries_in(token_ids, boundaries, len(ids))
            return TokenizedPrompt(ids, text, salt, ends)
        assert text is not None
        tokenizer = self.require_tokenizer("text prompts")
        if kept is None:
            ids = tokenizer.encode(text, max_model_len=most)
        else:
            ids = tokenizer.encode_last(text, min(kept, most))
        return TokenizedPrompt(tuple(ids), text, salt)

    def _check_length(self, name: str, length: int, held: int) -> None:
        """Check a prompt's length; `held` is the call's number of prompt tokens so far."""
        if length >= self._max_model_len:
            raise PromptTooLongError.of(f"{name} has {length:,} tokens", self._max_model_len)
        if held > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"One call may have at most {MAX_PROMPT_TOKENS:,} prompt tokens over all samples, "
                f"got {held:,} or more. Lower n, or make several calls."
            )
