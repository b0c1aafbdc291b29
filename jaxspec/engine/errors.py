"""Errors of asynchronous requests, with messages for users."""

from typing import Any, TypeVar

_Error = TypeVar("_Error", bound="ServiceError")


class ServiceError(RuntimeError):
    """Base class of errors that are no fault of the request.

    Another engine, or this one later, may serve it.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle the message without the cause."""
        return _again, (type(self), str(self))


def _again(kind: type[_Error], text: str) -> _Error:
    error = kind.__new__(kind)
    error.args = (text,)
    return error


class QueueFullError(ServiceError):
    """The queue is full: `max_num_queued_reqs` or `max_num_queued_tokens` would be exceeded."""

    def __init__(self, option: str, limit: int, count: int):
        """Create the error of a request that would raise the count of `option` to `count`."""
        super().__init__(
            f"The queue is full: {option}={limit:,}, and with this request it would hold "
            f"{count:,}. Ask again in a few seconds, or ask another server."
        )


class DrainingError(ServiceError):
    """New requests are refused, because the AsyncLLM is draining or closed."""

    def __init__(self) -> None:
        super().__init__(
            "New requests are refused, for this AsyncLLM drains or is closed. Ask another server, "
            "or this one when it has started again."
        )


class PausedError(ServiceError):
    """The engine is paused, and does not take the request or can't wait for it."""


class AsleepError(PausedError):
    """The engine sleeps, so that it can't compute anything."""


class QueueTimeoutError(ServiceError):
    """A request waited for a row longer than `queue_timeout` and was aborted."""

    def __init__(self, seconds: float):
        super().__init__(
            f"The request waited longer than queue_timeout={seconds:g} seconds for a row, and is "
            "given up. Ask again later, or ask another server."
        )


class EngineDeadError(ServiceError):
    """A step failed and the engine has stopped for good. `__cause__` is the step's error."""

    def __init__(self, error: BaseException):
        super().__init__(
            f"A step of the engine failed with {type(error).__name__}, and nothing is served any "
            "more. Start a new AsyncLLM, in a new process if the device may be at fault."
        )
        self.__cause__ = error


class EngineGoneError(EngineDeadError):
    """The engine's process has ended."""

    def __init__(self) -> None:
        RuntimeError.__init__(
            self,
            "The engine's process is gone, and nothing is served any more. Ask another server, or "
            "this one when it has started again.",
        )


class ReplicaDiedError(ServiceError):
    """The replica that ran the request has ended. The other replicas serve, and it is restarted."""

    def __init__(self, number: int, count: int, reason: str):
        """Create the error of the requests of replica `number` of `count`."""
        super().__init__(
            f"Replica {number} of {count}, which ran the request, {reason}. It is started again, "
            "and the other replicas serve. Send the request again."
        )


class NoReplicaError(ServiceError):
    """All replicas have ended and are being restarted."""

    def __init__(self) -> None:
        super().__init__(
            "All replicas have ended and are started again. Ask again in a few seconds, or ask "
            "another server."
        )


class ReplicasDeadError(EngineDeadError):
    """A replica ended repeatedly, so that all were ended for good."""

    def __init__(self, number: int, count: int, deaths: int, reason: str):
        RuntimeError.__init__(
            self,
            f"Replica {number} of {count} ended {deaths} times in a row soon after its start, and "
            f"nothing is served any more: the last one {reason}. The output of its process says "
            "why; start again when that is mended.",
        )
