"""RouteRecorder: copies the experts of a request's tokens before its pages are freed."""

from jaxspec.cache import RoutedExperts
from jaxspec.requests.request import Request
from jaxspec.requests.routed_tokens import RoutedTokens
from jaxspec.runner.model_runner import ModelRunner
from jaxspec.runner.page_reader import PageReader
from jaxspec.scheduler.request_observer import RequestObserver


class RouteRecorder(RequestObserver):
    """Set `Request.routes` when a request leaves its row, after the steps in flight.

    A preempted request may end while it waits, by tokens of steps in flight or by an abort. If it
    enters again, all its tokens are computed again or taken from cached prefixes.
    """

    def __init__(self, runner: ModelRunner):
        """Compile the copy of pages."""
        self._reader = PageReader(runner, RoutedExperts.name)

    def add(self, request: Request) -> None:
        """Drop the routes of an earlier entry."""
        request.routes = None

    def leave(self, request: Request) -> None:
        """Enqueue copies of the request's pages."""
        if request.is_prefilling:
            return  # aborted or preempted before all its tokens were computed
        num_routes = (len(request.tokens) if request.finish else request.tokens_bound) - 1
        pages = request.pages[: -(-num_routes // self._reader.page_size)]
        request.routes = RoutedTokens(self._reader.read(pages))
