"""Who may call: API keys, compared so that the time it takes tells nothing."""

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.server.errors import ApiError

OPEN = frozenset({"/", "/health", "/ready", "/ping"})
"""Routes that browsers and orchestrators ask without a key; the page asks people for theirs."""


class RequireKey:
    """Lets a request through that brings one of the keys, as OpenAI's or Anthropic's clients do."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, protect_metrics: bool):
        """Guard `app`; without keys everybody is let in."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = OPEN if protect_metrics else OPEN | {"/metrics"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or answer with 401."""
        if scope["type"] != "http" or self._lets_in(scope):
            await self._app(scope, receive, send)
            return
        error = ApiError(
            401,
            "A key is needed, and this request has none that the server knows. Send it as "
            "'Authorization: Bearer KEY'.",
            headers={"www-authenticate": "Bearer"},
        )
        await error.response(scope["path"])(scope, receive, send)

    def _lets_in(self, scope: Scope) -> bool:
        # A browser asks with OPTIONS and without a key whether it may send one.
        if not self._digests or scope["method"] == "OPTIONS" or scope["path"] in self._open:
            return True
        headers = Headers(scope=scope)
        word, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if word.lower() == "bearer" else headers.get("x-api-key", "")
        digest, is_known = _digest(given.encode("latin-1", "replace")), False
        for known in self._digests:  # each is compared: the time does not tell which one it was
            is_known |= hmac.compare_digest(digest, known)
        return is_known


def _digest(key: bytes) -> bytes:
    """Keys of all lengths as 32 bytes, so that comparing them does not tell how long they are."""
    return hashlib.sha256(key).digest()
