"""Stop strings in streamed text: found across pieces, and never shown in part."""

from collections.abc import Sequence


class StopStrings:
    """Passes one request's text through until a stop string completes; cuts before or behind it.

    The match is the one that completes first as the text grows; of those that complete at the
    same character, the longest. So neither it nor the text depends on how the text was split.
    Text that may be the beginning of a stop string is held back until that is known.

    `matched` is the stop string found, or None; `position` its start in the whole text, which
    is where the text ends unless the stop string is kept.
    """

    def __init__(self, stops: Sequence[str], *, keeps_match: bool = False) -> None:
        """`stops` may be empty: then all text passes. ValueError for an empty stop string.

        `keeps_match`: the text ends behind the stop string, not before it.
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
        """The text that is now known to belong to the output; "" once a stop was found.

        With `may_end=False` a stop string that completes in `text` does not count. One that begins
        there may still complete later.
        """
        if self.matched is not None:
            return ""
        held, text = len(self._held), self._held + text
        # What completed within the held text was to be passed over.
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
        """The text still held back, at the end of a request that found no stop string."""
        text, self._held = self._held, ""
        self._passed += len(text)
        return text

    def _num_undecided(self, text: str) -> int:
        """The length of the longest end of `text` that begins a stop string."""
        longest = min(max(map(len, self._stops), default=1) - 1, len(text))
        for length in range(longest, 0, -1):
            end = text[len(text) - length :]
            if any(stop.startswith(end) for stop in self._stops):
                return length
        return 0
