"""API key middleware with constant-time comparison, and the names of clients."""

import hashlib
import hmac
import ipaddress
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from jaxspec.server.http.errors import ApiError

OPEN = frozenset({"/", "/health", "/ready", "/ping"})
"""Routes open without a key, for orchestrators and for the page, which prompts for the key."""
_KEY = "jaxspec.key"  # key in an ASGI scope


class RequireKey:
    """Middleware that requires a key in OpenAI's or Anthropic's request header."""

    def __init__(self, app: ASGIApp, keys: Sequence[str], *, protect_metrics: bool):
        """Guard `app`; without keys all requests are accepted."""
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._open = OPEN if protect_metrics else OPEN | {"/metrics"}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
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
        # Browsers send CORS preflights (OPTIONS) without a key.
        if not self._digests or scope["method"] == "OPTIONS" or scope["path"] in self._open:
            return True
        headers = Headers(scope=scope)
        word, _, bearer = headers.get("authorization", "").partition(" ")
        given = bearer.strip() if word.lower() == "bearer" else headers.get("x-api-key", "")
        digest, is_known = _digest(given.encode("latin-1", "replace")), False
        for known in self._digests:  # compare all keys, for constant time
            is_known |= hmac.compare_digest(digest, known)
        scope[_KEY] = digest.hex()
        return is_known


def client_of(scope: Scope) -> str:
    """Return the name of a request's client: its key if keys are required, else its network."""
    address, _ = scope.get("client") or ("", 0)
    return scope.get(_KEY) or network_of(address)


def network_of(address: str) -> str:
    """Return the part of an address that identifies a client.

    That is an IPv4 address, and the first 64 bits of an IPv6 address, since a client may use all
    addresses that begin with them. Other words are returned unchanged.
    """
    try:
        found = ipaddress.ip_address(address)
    except ValueError:
        return address
    if isinstance(found, ipaddress.IPv4Address):
        return str(found)
    if found.ipv4_mapped is not None:
        return str(found.ipv4_mapped)
    return str(ipaddress.IPv6Address(int(found) >> 64 << 64))


def _digest(key: bytes) -> bytes:
    """Return a 32-byte digest, so that comparison time does not depend on key length."""
    return hashlib.sha256(key).digest()
