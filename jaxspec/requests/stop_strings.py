"""Stop-string search in streamed text, across the boundaries of deltas."""

from collections.abc import Sequence


class StopStrings:
    """Filter that passes the text of one request up to the first stop string.

    The match is the stop string that completes first as the text grows, the longest of those that
    complete at the same character. The result does not depend on how the text is split. Text that
    may begin a stop string is held back until it is decided.

    Attributes:
        matched: The stop string found, or None.
        position: Index of its first character in the whole text, or None.
    """

    def __init__(self, stops: Sequence[str], *, keeps_match: bool = False) -> None:
        """Start without text.

        Args:
            stops: The stop strings; without any all text passes.
            keeps_match: End the text after the stop string instead of before it.

        Raises:
            ValueError: a stop string is empty.
        """
        if isinstance(stops, str):
            stops = [stops]
        if not all(stops):
            raise ValueError(
                f"A stop string must have at least one character, but stop={list(stops)!r} holds "
                "an empty one, which would end every output at once. Remove it."
            )
        self._stops, self._keeps_match = tuple(stops), keeps_match
        self._held = ""
        self._passed = 0
        self.matched: str | None = None
        self.position: int | None = None

    def push(self, text: str, *, may_end: bool = True) -> str:
        """Append `text` and return the text now known to be output, "" after a match.

        With `may_end=False` stop strings that complete in `text` are ignored; one that begins there
        may still complete later.
        """
        if self.matched is not None:
            return ""
        held, text = len(self._held), self._held + text
        # Matches within the held text were ignored before (`may_end=False`).
        starts = {stop: text.find(stop, max(0, held + 1 - len(stop))) for stop in self._stops}
        found = [(start, stop) for stop, start in starts.items() if start >= 0]
        if found and may_end:
            start, stop = min(found, key=lambda match: (match[0] + len(match[1]), match[0]))
            self.matched, self.position = stop, self._passed + start
            keep, self._held = start + len(stop) * self._keeps_match, ""
        else:
            keep = len(text) - self._num_undecided(text)
            self._held = text[keep:]
        self._passed += keep
        return text[:keep]

    def flush(self) -> str:
        """Return the held-back text, at the end of a request without a match."""
        text, self._held = self._held, ""
        self._passed += len(text)
        return text

    def _num_undecided(self, text: str) -> int:
        """Return the length of the longest suffix of `text` that begins a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
