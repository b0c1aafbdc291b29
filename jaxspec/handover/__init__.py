"""Requests that leave an engine, and what of them others can read: the format, and what is in it.

RequestState ─▶ Container ─▶ bytes, a file, a socket ─▶ Container ─▶ RequestState
what it means   named arrays                            checked      checked
"""

from jaxspec.handover.request_state import RequestState, receive, send

__all__ = ["RequestState", "receive", "send"]
