"""Vocabulary: the validated tokenizer entries of a GGUF file's metadata."""

from pathlib import Path
from typing import Any

import numpy as np

from jaxspec.checks import shown
from jaxspec.gguf.file import GGUFFile

PREFIX = "tokenizer.ggml."
MAX_TOKENS = 2**20
"""Maximum vocabulary size: about four times that of the largest published one."""
_TEMPLATE = "tokenizer.chat_template"
_WORDS = {str: "a text", bool: "true or false", int: "an integer", list: "a list of texts"}
_ROLES = {  # special tokens: names in tokenizer_config.json -> names in GGUF
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "pad_token": "padding_token_id",
    "unk_token": "unknown_token_id",
}
_NORMAL = 1


class Vocabulary:
    """The tokens in a file's metadata, with their types, roles and chat templates."""

    def __init__(self, file: GGUFFile):
        """Read the tokens from an open file.

        Raises:
            ValueError: There are no tokens, too many, duplicates, or not one type per token.
        """
        self.path: Path = file.path
        self._entries = file.metadata
        self.tokens: list[str] = self.need("tokens", list)
        if len(self.tokens) > MAX_TOKENS:
            held = f"{len(self.tokens):,}"
            raise self.broken("tokens", f"must hold at most {MAX_TOKENS:,} tokens, and has {held}")
        if len(set(self.tokens)) < len(self.tokens):
            raise self.broken("tokens", "must hold each token once, and has one twice")
        types = self.for_each_token("token_type")
        self.types = np.full(len(self.tokens), _NORMAL) if types is None else types

    def find(self, name: str, kind: type[Any]) -> Any:
        """Return the entry, or None if missing; ValueError if it has another kind."""
        value = self._entries.get(PREFIX + name)
        if value is None or type(value) is kind:
            return value
        raise self.broken(name, f"must be {_WORDS[kind]}, got {shown(value)}")

    def need(self, name: str, kind: type[Any]) -> Any:
        """Return the entry; ValueError if it is missing or has another kind."""
        if (value := self.find(name, kind)) is None:
            raise self.broken(name, f"must be {_WORDS[kind]}, and is absent")
        return value

    def for_each_token(self, name: str) -> np.ndarray | None:
        """Return an array with one number per token; None if the entry is missing."""
        values = self._entries.get(PREFIX + name)
        if values is None:
            return None
        if not isinstance(values, np.ndarray) or len(values) != len(self.tokens):
            held = f"{len(values):,} entries" if isinstance(values, np.ndarray) else shown(values)
            raise self.broken(
                name, f"must hold a number for each of {len(self.tokens):,} tokens, got {held}"
            )
        return values

    def role(self, name: str) -> str | None:
        """Return the token of a role such as bos_token; None if the file has none."""
        token_id = self.find(_ROLES[name], int)
        if token_id is None:
            return None
        if not 0 <= token_id < len(self.tokens):
            most = len(self.tokens) - 1
            raise self.broken(
                _ROLES[name], f"must be one of the tokens 0 to {most}, got {token_id}"
            )
        return self.tokens[token_id]

    def settings(self) -> dict[str, Any]:
        """Return special tokens and chat templates, as in a tokenizer_config.json.

        Raises:
            ValueError: An entry has another kind.
        """
        found: dict[str, Any] = {
            role: token for role in _ROLES if (token := self.role(role)) is not None
        }
        templates = [
            {"name": key.removeprefix(_TEMPLATE).removeprefix(".") or "default", "template": text}
            for key, text in self._entries.items()
            if key == _TEMPLATE or key.startswith(_TEMPLATE + ".")
        ]
        return found | {"chat_template": templates}

    def broken(self, name: str, rule: str) -> ValueError:
        """Return the error for an entry that breaks a rule."""
        return ValueError(
            f"{self.path}: `{PREFIX}{name}` {rule}. Download the file again, or name another "
            "tokenizer with the option `tokenizer`."
        )
