"""RouteRecorder: copies the experts of a request's tokens before its pages are freed."""

from jaxspec.cache import RoutedExperts
from jaxspec.requests.request import Request
from jaxspec.requests.routed_tokens import RoutedTokens
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.page_reader import PageReader
from jaxspec.scheduler.request_observer import RequestObserver


class RouteRecorder(RequestObserver):
    """Set `Request.routes` when a request leaves its row, after the steps in flight.

    A preempted request may end while it waits, by tokens of steps in flight or by an abort, or
    while its tokens are computed again: it then has those of its earlier entry, which cover all its
    tokens, because it emits none until it is computed.
    """

    def __init__(self, runner: ModelRunner):
        """Compile the copy of pages."""
        self._reader = PageReader(runner, RoutedExperts.name)

    def leave(self, request: Request) -> None:
        """Enqueue copies of the request's pages."""
        if request.is_prefilling:
            return  # not all its tokens are computed
        num_routes = (len(request.tokens) if request.finish else request.tokens_bound) - 1
        pages = request.pages[: -(-num_routes // self._reader.page_size)]
        request.routes = RoutedTokens(self._reader.read(pages))
