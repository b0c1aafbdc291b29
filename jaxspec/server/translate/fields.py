"""Fields of requests in other APIs' forms: kinds are checked, and errors name places."""

from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checks import shown

Json = dict[str, Any]


class FieldError(ValueError):
    """A field of a request breaks a rule; `param` is its place, as a dotted path."""

    def __init__(self, param: str, rule: str, value: Any) -> None:
        """`rule` begins with a verb: "must be ..., got ...", and ends with the way out."""
        super().__init__(f"{param} {rule.replace('{}', shown(value), 1)}")
        self.param = param


def text(value: Any, place: str) -> str:
    """A text. FieldError for anything else."""
    if not isinstance(value, str):
        raise FieldError(place, "must be a text, got {}. Write it as a JSON string.", value)
    return value


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """An object. FieldError for anything else."""
    if not isinstance(value, Mapping):
        raise FieldError(place, "must be an object, got {}. Write it as {...}.", value)
    return value


def items(value: Any, place: str) -> list[tuple[str, Any]]:
    """The places and items of a list. FieldError for anything else."""
    if not isinstance(value, list | tuple):
        raise FieldError(place, "must be a list, got {}. Write it as [...].", value)
    return [(f"{place}.{number}", item) for number, item in enumerate(value)]


def objects(value: Any, place: str) -> list[tuple[str, Mapping[str, Any]]]:
    """The places and objects of a list of objects. FieldError for anything else."""
    return [(where, mapping(item, where)) for where, item in items(value, place)]


def content(value: Any, place: str, kinds: Sequence[str]) -> str | list[Json]:
    """A content in the form of OpenAI's chat: a text, or the parts of one.

    `value` is a text, or a list of parts of one of the `kinds`, each with its `text`.
    """
    if value is None:
        return ""
    if isinstance(value, str):
        return value
    parts = [
        {"type": "text", "text": text(one_of(part, where, kinds).get("text"), f"{where}.text")}
        for where, part in objects(value, place)
    ]
    return parts[0]["text"] if len(parts) == 1 else parts or ""


def one_of(part: Mapping[str, Any], place: str, kinds: Sequence[str]) -> Mapping[str, Any]:
    """A part whose `type` is one of the `kinds`. FieldError for another."""
    if part.get("type") not in kinds:
        rule = f"must be one of {', '.join(kinds)}, got {{}}. jaxspec reads text alone: leave the "
        raise FieldError(f"{place}.type", f"{rule}part out, or describe it.", part.get("type"))
    return part


def named(body: Mapping[str, Any], names: Sequence[str]) -> Json:
    """Those fields of a body that both APIs have under the same name."""
    return {name: body[name] for name in names if body.get(name) is not None}


SAMPLING = (
    *(
        "model",
        "stream",
        "user",
        "temperature",
        "top_p",
        "top_k",
        "min_p",
        "seed",
        "stop_token_ids",
    ),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
    *("bad_words", "allowed_token_ids", "logit_bias", "chat_template_kwargs", "priority"),
    *("cache_salt", "num_speculative_tokens"),
)
"""Fields that a chat request has under the same name, vLLM's extras among them."""
