"""Logprobs in OpenAI's chat and completion formats, from `CompletionOutput.logprobs`."""

import codecs
from collections.abc import Iterable, Mapping
from typing import Any

from jaxspec.requests.logprobs import Logprob
from jaxspec.text.tokenizer import Tokenizer

Places = Iterable[Mapping[int, Logprob] | None]
"""One dict per token: the token itself first, then the likeliest ids. None means no logprobs."""


def chat_logprobs(
    places: Iterable[Mapping[int, Logprob]],
    num_top: int,
    tokenizer: Tokenizer,
    *,
    as_ids: bool = False,
) -> list[dict[str, Any]]:
    """Return the entries of a chat's `logprobs.content`, one per token.

    With `as_ids`, names of tokens are their ids, as in "token_id:17".
    """

    def entry(token: int, logprob: Logprob) -> dict[str, Any]:
        raw = tokenizer.bytes_of(token)
        text = _id_name(token) if as_ids else raw.decode("utf-8", "replace")
        return {"token": text, "logprob": _finite(logprob), "bytes": list(raw)}

    content = []
    for place in places:
        own, *_ = place.items()
        top = sorted(place.items(), key=lambda item: item[1].rank or 0)[:num_top]
        content.append(entry(*own) | {"top_logprobs": [entry(*each) for each in top]})
    return content


class LegacyLogprobs:
    """Logprobs of a completion as parallel lists; one object per choice."""

    def __init__(self, num_top: int, tokenizer: Tokenizer, *, as_ids: bool = False):
        """`as_ids`: as in `chat_logprobs`."""
        self._num_top, self._tokenizer, self._as_ids = num_top, tokenizer, as_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._offset = 0  # characters in the tokens so far

    def read(self, places: Places, tokens: Iterable[int]) -> dict[str, Any]:
        """Return the lists for the next tokens.

        `text_offset` counts characters of the choice's text. Tokens that share a character all have
        its offset.
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
        own = next(iter(place.items()))  # included even if unlikely, as in OpenAI's API
        return {
            self._name(token): _finite(logprob) for token, logprob in dict([*kept, own]).items()
        }

    def _name(self, token: int) -> str:
        """Return a token's text, or a distinct hexadecimal name if its bytes are not UTF-8."""
        if self._as_ids:
            return _id_name(token)
        raw = self._tokenizer.bytes_of(token)
        try:
            return raw.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def _id_name(token: int) -> str:
    return f"token_id:{token}"


def prompt_logprobs(places: Iterable[Mapping[int, Logprob] | None]) -> list[Any]:
    """Return prompt logprobs in vLLM's format: one dict by token id per token, or None."""
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
    """Return the logprob, at least -9999: JSON has no infinity, and OpenAI's API uses -9999."""
    return max(logprob.logprob, -9999.0)
