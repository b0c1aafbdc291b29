"""Fields of requests and answers: ids, and type checks whose errors name the path of the field."""

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from jaxspec.checks import shown

Json = dict[str, Any]


def new_id(prefix: str) -> str:
    """Return `prefix` and 32 random digits, so that clients can't guess each other's ids."""
    return prefix + secrets.token_hex(16)


class FieldError(ValueError):
    """Invalid field of a request; `param` is its dotted path."""

    def __init__(self, param: str, rule: str, value: Any) -> None:
        """`rule`: "must be ..., got {}." and how to fix it; `{}` is replaced by `value`."""
        super().__init__(f"{param} {rule.replace('{}', shown(value), 1)}")
        self.param = param


def text(value: Any, place: str) -> str:
    """Return `value` if it is a string; FieldError otherwise."""
    if not isinstance(value, str):
        raise FieldError(place, "must be a text, got {}. Write it as a JSON string.", value)
    return value


def mapping(value: Any, place: str) -> Mapping[str, Any]:
    """Return `value` if it is an object; FieldError otherwise."""
    if not isinstance(value, Mapping):
        raise FieldError(place, "must be an object, got {}. Write it as {...}.", value)
    return value


def items(value: Any, place: str) -> list[tuple[str, Any]]:
    """Return the paths and items of a list; FieldError for other values."""
    if not isinstance(value, list | tuple):
        raise FieldError(place, "must be a list, got {}. Write it as [...].", value)
    return [(f"{place}.{number}", item) for number, item in enumerate(value)]


def objects(value: Any, place: str) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the paths and items of a list of objects; FieldError for other values."""
    return [(where, mapping(item, where)) for where, item in items(value, place)]


def content(value: Any, place: str, kinds: Sequence[str]) -> str | list[Json]:
    """Convert content to OpenAI's chat form: a text, or a list of text parts.

    `value` is a text, or a list of parts whose `type` is one of `kinds`, each with its `text`. A
    single part becomes a text; None becomes an empty one.
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
    """Return `part` if its `type` is one of `kinds`; FieldError otherwise."""
    if part.get("type") not in kinds:
        rule = f"must be one of {', '.join(kinds)}, got {{}}. jaxspec reads text alone: leave the "
        raise FieldError(f"{place}.type", f"{rule}part out, or describe it.", part.get("type"))
    return part


def named(body: Mapping[str, Any], names: Sequence[str]) -> Json:
    """Return the fields of a body with these `names`, without nulls."""
    return {name: body[name] for name in names if body.get(name) is not None}


SAMPLING = (
    *("model", "stream", "user", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("stop_token_ids", "presence_penalty", "frequency_penalty", "repetition_penalty"),
    *("stop", "include_stop_str_in_output", "skip_special_tokens"),
    *("min_tokens", "ignore_eos", "bad_words", "allowed_token_ids", "logit_bias"),
    *("chat_template_kwargs", "priority", "cache_salt", "num_speculative_tokens"),
    *("structured_outputs", "thinking_token_budget", "vllm_xargs"),
)
"""Fields with the same name in a chat request, including vLLM's extra fields."""
