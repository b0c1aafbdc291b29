"""Call: an HTTP request as the ingress sends it to a replica, and the prefix that routes it."""

import hashlib
from typing import Any, NamedTuple

import orjson
from starlette.types import Scope

_LENGTH = 1024
"""Characters or token ids of a prompt without messages that are its prefix."""
_SHARED = "cache_salt", "system", "instructions", "tools"
_PROMPTS = "messages", "input", "prompt", "token_ids"
_SCOPE = (
    *("type", "http_version", "method", "scheme", "path", "raw_path", "query_string"),
    *("root_path", "headers", "client", "server"),
)


class Call(NamedTuple):
    """An HTTP request with its whole body, picklable.

    Attributes:
        scope: The fields of its ASGI scope that are plain values.
        body: The body.
        prefix: Digest of the beginning of its prompt; None if it has no prompt.
        avoid: Ids of the replicas that failed to answer it.
    """

    scope: Scope
    body: bytes
    prefix: bytes | None
    avoid: frozenset[str] = frozenset()

    @staticmethod
    def of(scope: Scope, body: bytes) -> "Call":
        """Create a call from an ASGI scope and its body."""
        plain = {name: scope[name] for name in _SCOPE if name in scope}
        return Call(plain, body, prefix_of(body) if body else None)


def prefix_of(body: bytes) -> bytes | None:
    """Return a digest of the beginning of a prompt, the same for all turns of a conversation.

    A conversation begins with its instructions, tools and messages up to the first one of its user,
    another prompt with its first `_LENGTH` characters or token ids.

    Returns:
        The digest; None if the body has no prompt, which a replica refuses.
    """
    try:
        fields = orjson.loads(body)
        if not isinstance(fields, dict):
            return None
        prompt = next((fields[name] for name in _PROMPTS if fields.get(name)), None)
        if prompt is None:
            return None
        beginning = [*(fields.get(name) for name in _SHARED), _beginning(prompt)]
        return hashlib.blake2b(orjson.dumps(beginning), digest_size=16).digest()
    except (ValueError, TypeError):  # no JSON, or too deep for orjson to write
        return None


def _beginning(prompt: Any) -> Any:
    """Return the part of a prompt that the next turn of its conversation begins with, too."""
    if isinstance(prompt, list) and isinstance(prompt[0], str | list):
        prompt = prompt[0]  # the first one of several
    if not isinstance(prompt, str | list):
        return prompt
    for number, item in enumerate(prompt[:_LENGTH]):
        if isinstance(item, dict) and item.get("role") == "user":
            return prompt[: number + 1]
    return prompt[:_LENGTH]
