"""Prompts and parameters in, checked samples out; refusals come before anything is queued."""

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from jaxspec.checks import integer
from jaxspec.conversations import TemplateOptions, check_options, conversations_of
from jaxspec.outputs import Sample
from jaxspec.per_prompt import named, names_of, priorities_of
from jaxspec.prompts import (
    Prompt,
    PromptParts,
    TokensPrompt,
    boundaries_in,
    check_is_one,
    check_num_samples,
    parts_of,
    read_ids,
)
from jaxspec.request import INT32_MAX, Request
from jaxspec.sampling_params import SamplingParams
from jaxspec.stop_strings import StopStrings
from jaxspec.table_plan import MAX_STOP_IDS
from jaxspec.token_checks import bad_word_ids, check_biases, check_ids
from jaxspec.tokenizer import Tokenizer

MAX_PROMPT_TOKENS = 2**28
"""Prompt tokens of one call over all samples, each of which keeps a list of them."""


class _Encoded(NamedTuple):
    """A prompt in tokens."""

    ids: tuple[int, ...]
    cache_salt: str | None
    boundaries: tuple[int, ...]


class InputProcessor:
    """Makes the samples of prompts: token ids, noise seeds and stops; any thread may call."""

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        *,
        vocab_size: int,
        max_model_len: int,
        eos_ids: Sequence[int],
        request_key: Callable[[Sequence[int], int], int],
        seed: int,
        finds_boundaries: bool = False,
    ):
        """Keep what all prompts share.

        `eos_ids` are the model's; the tokenizer's count too, where the vocabulary has them.
        `request_key(prompt, seed)` is the proposer's; `seed` serves requests without one.
        `finds_boundaries`: whether states are kept where further turns of a chat will part from it.
        """
        self.tokenizer, self._vocab_size = tokenizer, vocab_size
        self._max_model_len = max_model_len
        ends = {*eos_ids, *(tokenizer.eos_ids if tokenizer else ())}
        self.eos_ids = tuple(sorted(i for i in ends if 0 <= i < vocab_size))
        self._request_key, self._seed = request_key, seed
        self._finds_boundaries = finds_boundaries
        self._num_prompts = 0  # which the noise of prompts without a seed goes by
        self._lock = threading.Lock()

    def process(
        self,
        prompts: Sequence[Prompt],
        params: Sequence[SamplingParams],
        request_ids: Sequence[str] | None = None,
        priority: int | Sequence[int] | None = None,
    ) -> list[list[Sample]]:
        """The samples of each prompt, unqueued.

        `params` are checked copies, as `params_of` gives them. `request_ids`: what the samples of
        each prompt are called; None: numbers. `priority`: as in `LLM.generate`.

        Raises:
            ValueError: an empty prompt, one that leaves no room for a token, an id outside the
                vocabulary, text without a tokenizer, too many stop ids, biases or samples, or
                another number of request ids or priorities.
        """
        check_num_samples(param.n for param in params)
        given = None if request_ids is None else names_of(request_ids, len(prompts))
        priorities = priorities_of(priority, len(prompts))
        stop_ids = [self._stop_ids(param) for param in params]
        bad_words = [self._bad_words(*each) for each in zip(params, stop_ids, strict=True)]
        encoded, held = list[_Encoded](), 0
        for number, (prompt, param) in enumerate(zip(prompts, params, strict=True), 1):
            name = "the prompt" if len(prompts) == 1 else f"prompt {number} of {len(prompts)}"
            with named(f"prompt {number}", len(prompts)):
                parts = parts_of(prompt)
                ids = tuple(self._encode(parts, param))
                boundaries = boundaries_in(parts, len(ids))
            if not ids:
                raise ValueError(
                    f"A prompt must have at least one token, and {name} has none. Give it some "
                    "text or token ids."
                )
            check_ids(name, ids, self._vocab_size)
            held += len(ids) * param.n
            self._check_length(name, len(ids), held)
            encoded.append(_Encoded(ids, parts.cache_salt, boundaries))
        with self._lock:
            first = self._num_prompts
            self._num_prompts += len(encoded)
        numbers = range(first, first + len(encoded))
        names = given or map(str, numbers)
        return [
            self._samples(*each)
            for each in zip(
                names, encoded, params, stop_ids, bad_words, numbers, priorities, strict=True
            )
        ]

    def twin(self, number: int) -> "Callable[[], InputProcessor]":
        """What makes one like this in another process; it can be pickled.

        Each `number` has noise of its own. What a twin makes has no `proposer_key` yet.
        """
        seed = np.random.SeedSequence([self._seed % 2**32, number]).generate_state(1)[0]
        return functools.partial(
            InputProcessor,
            self.tokenizer,
            vocab_size=self._vocab_size,
            max_model_len=self._max_model_len,
            eos_ids=self.eos_ids,
            request_key=_no_key,
            seed=int(seed),
            finds_boundaries=self._finds_boundaries,
        )

    def proposer_key(self, prompt: Sequence[int], seed: int) -> int:
        """Which entry of the proposer's tables is this request's.

        Raises:
            ValueError: the proposer gave none.
        """
        return integer("request_key", self._request_key(prompt, seed), 0, INT32_MAX)

    def chats(self, messages: Any, options: TemplateOptions) -> list[TokensPrompt]:
        """The prompts of one conversation or several.

        Raises:
            TypeError: there is no such option.
            ValueError: no tokenizer, or as in `Tokenizer.render_chat` and `Tokenizer.encode`.
        """
        check_options(options)
        tokenizer, prompts = self.require_tokenizer("chats"), list[TokensPrompt]()
        conversations = conversations_of(messages)
        for number, conversation in enumerate(conversations, 1):
            with named(f"conversation {number}", len(conversations)):
                text, ids, boundaries = tokenizer.chat_prompt(
                    conversation,
                    max_model_len=self._max_model_len,
                    finds_boundaries=self._finds_boundaries,
                    **options,
                )
            prompts.append({"prompt": text, "prompt_token_ids": ids})
            if boundaries:
                prompts[-1]["cache_boundaries"] = boundaries
        return prompts

    def chat(self, messages: Any, options: TemplateOptions) -> TokensPrompt:
        """The prompt of one conversation. Raises as `chats`, and for several conversations."""
        prompts = self.chats(messages, options)
        check_is_one("conversation", prompts)
        return prompts[0]

    def require_tokenizer(self, inputs: str) -> Tokenizer:
        """The tokenizer, or a ValueError that says that `inputs` need one."""
        if self.tokenizer is None:
            raise ValueError(
                f"The model's folder has no tokenizer.json, which {inputs} need. Copy it "
                "there from the checkpoint, or work with token ids: {'prompt_token_ids': [...]}."
            )
        return self.tokenizer

    def _stop_ids(self, params: SamplingParams) -> tuple[int, ...]:
        """The token ids that end a request, once it is known that stop strings can, too."""
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
        """Their token ids, once it is known that the vocabulary has what a request asks for."""
        check_biases(params, stop_ids, self._vocab_size)
        if not params.bad_words:
            return ()
        tokenizer = self.require_tokenizer("bad words")
        return bad_word_ids(params.bad_words, tokenizer, self._vocab_size)

    def _samples(
        self,
        request_id: str,
        prompt: _Encoded,
        params: SamplingParams,
        stop_ids: tuple[int, ...],
        bad_words: tuple[tuple[int, ...], ...],
        number: int,
        priority: int,
    ) -> list[Sample]:
        # The first word keeps seeds that users give apart from those drawn here.
        if params.seed is None:
            entropy = [1, self._seed % 2**32, number]
        else:
            entropy = [2, *divmod(params.seed % 2**64, 2**32)]
        samples: list[Sample] = []
        for index in range(params.n):
            seed = int(np.random.SeedSequence([*entropy, index]).generate_state(1)[0])
            request = Request(
                prompt=prompt.ids,
                params=params,
                seed=seed,
                stop_ids=stop_ids,
                bad_words=bad_words,
                proposer_key=self.proposer_key(prompt.ids, seed),
                leader=samples[0].request if samples else None,
                request_id=request_id,
                index=index,
                own_eos=() if params.ignore_eos else self.eos_ids,
                room=self._max_model_len,
                priority=priority,
                cache_salt=prompt.cache_salt,
                cache_boundaries=prompt.boundaries,
            )
            stream, stops = None, None
            if self.tokenizer and params.detokenize:
                stream = self.tokenizer.stream(params.skip_special_tokens)
            if params.stop:
                keeps_match = params.include_stop_str_in_output
                stops = StopStrings(params.stop, keeps_match=keeps_match)
            samples.append(Sample(request, stream, stops))
        return samples

    def _encode(self, prompt: PromptParts, params: SamplingParams) -> Sequence[int]:
        kept, most = params.truncate_prompt_tokens, self._max_model_len
        if kept == -1:
            wanted = params.max_tokens or most
            kept = most - (wanted if wanted < most else 1)
        if prompt.token_ids is not None:
            return read_ids(prompt.token_ids, most, kept)
        assert prompt.text is not None
        tokenizer = self.require_tokenizer("text prompts")
        if kept is None:
            return tokenizer.encode(prompt.text, max_model_len=most)
        return tokenizer.encode(prompt.text)[-kept:]

    def _check_length(self, name: str, length: int, held: int) -> None:
        """Hold a prompt against max_model_len, which bounds it with its output.

        `held`: prompt tokens of the call so far, over all samples.
        """
        if length >= self._max_model_len:
            raise ValueError(
                f"A prompt must leave room for a token within max_model_len={self._max_model_len}, "
                f"and {name} has {length:,} tokens. Shorten it, set truncate_prompt_tokens, or "
                "raise max_model_len."
            )
        if held > MAX_PROMPT_TOKENS:
            raise ValueError(
                f"One call may have at most {MAX_PROMPT_TOKENS:,} prompt tokens over all samples, "
                f"got {held:,} or more. Lower n, or make several calls."
            )


def _no_key(prompt: Sequence[int], seed: int) -> int:
    del prompt, seed
    return 0
