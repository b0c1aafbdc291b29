"""Request migration: the state of a request, and the format in which it is transferred.

RequestState ─▶ Container ─▶ bytes, a file, a socket ─▶ Container ─▶ RequestState
meaning         named arrays                            validated    validated
"""

from jaxspec.transfer.request_state import RequestState, receive, send

__all__ = ["RequestState", "receive", "send"]
