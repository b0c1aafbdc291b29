"""WaitingQueue: the requests that wait to enter the batch, the most urgent first."""

import bisect
from collections import deque

from jaxspec.request import Request


def urgency(request: Request) -> int:
    """What requests are ordered by: lower numbers enter first, and are preempted last."""
    return request.priority


def place(request: Request, running: list[Request]) -> None:
    """Put a request that enters behind its equals."""
    bisect.insort_right(running, request, key=urgency)


class WaitingQueue(deque[Request]):
    """Ordered by `urgency`; first come first served among equals."""

    def add(self, request: Request) -> None:
        """Let a request wait behind its equals."""
        if not self or urgency(self[-1]) <= urgency(request):
            self.append(request)  # quick: most requests are equals
        else:
            self.insert(bisect.bisect_right(self, urgency(request), key=urgency), request)

    def put_back(self, request: Request) -> None:
        """Let one that had entered wait again, before its equals."""
        self.insert(bisect.bisect_left(self, urgency(request), key=urgency), request)
