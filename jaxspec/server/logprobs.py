"""Logprobs in OpenAI's two forms, from the dicts of `CompletionOutput.logprobs`."""

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.logprobs import Logprob
from jaxspec.tokenizer import Tokenizer

Places = Iterable[Mapping[int, Logprob] | None]
"""A dict for each token: its own first, then those of the likeliest ids. None: nothing is known."""


def chat_logprobs(
    places: Iterable[Mapping[int, Logprob]], num_top: int, tokenizer: Tokenizer
) -> list[dict[str, Any]]:
    """The entries of a chat's `content`, one a token, with its bytes."""

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        raw = tokenizer.bytes_of(token)
        text = raw.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for place in places:
        own, *_ = place.items()
        top = sorted(place.items(), key=lambda item: item[1].rank or 0)[:num_top]
        content.append(entry(*own) | {"top_logprobs": [entry(*each) for each in top]})
    return content


class LegacyLogprobs:
    """The form of completions: lists beside each other. One object reads one choice's tokens."""

    def __init__(self, num_top: int, tokenizer: Tokenizer):
        """Report the `num_top` likeliest of each place."""
        self._num_top, self._tokenizer = num_top, tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters of the tokens so far

    def read(self, places: Places, tokens: Iterable[int]) -> dict[str, Any]:
        """The lists of the next tokens.

        `text_offset` counts characters of the choice's text; a token that is half a character
        begins where that does.
        """
        names, own, tops, offsets = [], [], [], []
        for token, place in zip(tokens, places, strict=True):
            offsets.append(self._offset)
            self._offset += len(self._decoder.decode(self._tokenizer.bytes_of(token)))
            names.append(self._name(token))
            own.append(None if place is None else _finite(place[token]))
            tops.append(None if place is None else self._top(place))
        return {
            "tokens": names,
            "token_logprobs": own,
            "top_logprobs": tops,
            "text_offset": offsets,
        }

    def _top(self, place: Mapping[int, Logprob]) -> dict[str, float]:
        ranked = sorted(place.items(), key=lambda item: item[1].rank or 0)
        kept = ranked[: self._num_top]
        own = next(iter(place.items()))  # it is told, likely or not, as OpenAI does
        return {
            self._name(token): _finite(logprob) for token, logprob in dict([*kept, own]).items()
        }

    def _name(self, token: int) -> str:
        """A token's text; its bytes by number where they are no text, so that names differ."""
        raw = self._tokenizer.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def prompt_logprobs(places: Iterable[Mapping[int, Logprob] | None]) -> list[Any]:
    """vLLM's form of a prompt's: for each token a dict by id."""
    return [
        place
        and {
            str(token): {
                "logprob": _finite(each),
                "rank": each.rank,
                "decoded_token": each.decoded_token,
            }
            for token, each in place.items()
        }
        for place in places
    ]


def _finite(logprob: Logprob) -> float:
    """JSON has no infinity; clients take -9999 for it, as OpenAI does."""
    return max(logprob.logprob, -9999.0)
