"""Requests that leave an engine, and what of it others can read: the format, and what is in it.

RequestState ─▶ Container ─▶ bytes, a file, a socket ─▶ Container ─▶ RequestState
what it means   named arrays                            checked      checked
"""
