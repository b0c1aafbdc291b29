"""Other APIs' requests as chats, and chats' answers in their forms: plain data in and out."""

from jaxspec.server.translate.fields import FieldError

__all__ = ["FieldError"]
