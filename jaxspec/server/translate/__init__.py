"""Conversion between other APIs and OpenAI's chat completions, on plain data."""

from jaxspec.server.translate.fields import FieldError

__all__ = ["FieldError"]
