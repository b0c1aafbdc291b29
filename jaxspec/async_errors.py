"""Why an AsyncLLM refuses a request that breaks no rule, or gives one up; in words for people."""

from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="ServiceError")


class ServiceError(RuntimeError):
    """The request may be right, and another engine, or this one later, may serve it."""

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process gets its words, and not what caused it."""
        return _again, (type(self), str(self))


def _again(kind: type[_Error], text: str) -> _Error:
    error = kind.__new__(kind)
    error.args = (text,)
    return error


class QueueFullError(ServiceError):
    """As many requests, or prompt tokens, wait for a row as may."""

    def __init__(self, option: str, limit: int, count: int):
        """`count` would wait with this request, and the option allows `limit`."""
        super().__init__(
            f"The queue is full: {option}={limit:,}, and with this request it would hold "
            f"{count:,}. Ask again in a few seconds, or ask another server."
        )


class DrainingError(ServiceError):
    """New requests are refused: the AsyncLLM drains, or is closed."""

    def __init__(self) -> None:
        """The words are the same each time."""
        super().__init__(
            "New requests are refused, for this AsyncLLM drains or is closed. Ask another server, "
            "or this one when it has started again."
        )


class QueueTimeoutError(ServiceError):
    """A request waited too long for a row, and is given up."""

    def __init__(self, seconds: float):
        """`seconds`: what the option `queue_timeout` allows."""
        super().__init__(
            f"The request waited longer than queue_timeout={seconds:g} seconds for a row, and is "
            "given up. Ask again later, or ask another server."
        )


class EngineDeadError(ServiceError):
    """A step failed; its error is the `__cause__`. Nothing is served any more."""

    def __init__(self, error: BaseException):
        """`error`: what the step failed with."""
        super().__init__(
            f"A step of the engine failed with {type(error).__name__}, and nothing is served any "
            "more. Start a new AsyncLLM, in a new process if the device may be at fault."
        )
        self.__cause__ = error


class EngineGoneError(EngineDeadError):
    """The process of the engine is gone, and nothing is served any more."""

    def __init__(self) -> None:
        """The words are the same each time."""
        RuntimeError.__init__(
            self,
            "The engine's process is gone, and nothing is served any more. Ask another server, or "
            "this one when it has started again.",
        )
