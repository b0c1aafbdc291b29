"""WaitingQueue: requests waiting to enter the batch, the most urgent first."""

import bisect
from collections import deque

from jaxspec.requests.request import Request


def urgency(request: Request) -> int:
    """Return the sort key of requests: lower values enter first and are preempted last."""
    return request.priority


def place(request: Request, running: list[Request]) -> None:
    """Insert a request into the running ones after those of equal urgency."""
    bisect.insort_right(running, request, key=urgency)


class WaitingQueue(deque[Request]):
    """Queue ordered by `urgency`, first come, first served among equals."""

    def add(self, request: Request) -> None:
        """Insert a request after those of equal urgency."""
        if not self or urgency(self[-1]) <= urgency(request):
            self.append(request)  # fast path: most requests have equal urgency
        else:
            self.insert(bisect.bisect_right(self, urgency(request), key=urgency), request)

    def put_back(self, request: Request) -> None:
        """Insert a preempted request before those of equal urgency."""
        self.insert(bisect.bisect_left(self, urgency(request), key=urgency), request)
