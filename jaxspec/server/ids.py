"""Ids of answers, of their parts, and of requests."""

import secrets


def new_id(prefix: str) -> str:
    """`prefix` and 32 digits that nobody guesses, so that nobody ends another's request."""
    return prefix + secrets.token_hex(16)
