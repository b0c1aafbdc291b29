"""Search for tags in streamed text, including incomplete tags at its end."""

import re
from collections.abc import Sequence


class Markers:
    """Search for the first of some tags, each of which has its only "<" at the beginning."""

    def __init__(self, tags: Sequence[str]) -> None:
        """Compile the tags, possibly none.

        Raises:
            ValueError: a tag has another form.
        """
        for tag in tags:
            if tag.rfind("<") != 0:
                raise ValueError(f"A tag begins with its only '<', and {tag!r} does not.")
        self._tags = tuple(tags)
        self._longest = max(map(len, tags), default=0)
        self._pattern = re.compile("|".join(map(re.escape, tags))) if tags else None

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Return the index of the first tag from `start` on, and the tag.

        Without a tag, return "" with the index of an incomplete tag at the end of the text, or else
        the length of the text. With the tag "</think>", "a</think>b" gives (1, "</think>"), "a</th"
        gives (1, "") and "ab" gives (2, "").
        """
        if self._pattern is None:
            return len(text), ""
        if match := self._pattern.search(text, start):
            return match.start(), match.group()
        last = text.rfind("<", max(start, len(text) - self._longest + 1))
        if last >= 0 and any(tag.startswith(text[last:]) for tag in self._tags):
            return last, ""
        return len(text), ""
