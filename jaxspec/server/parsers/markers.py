"""Tags in streamed text: the next one is found, and a part of one is held back."""

import re
from collections.abc import Sequence


class Markers:
    """Finds the first of some tags; each begins with "<" and has no other "<"."""

    def __init__(self, tags: Sequence[str]) -> None:
        """`tags` may be empty: then nothing is found. ValueError for a tag of another form."""
        for tag in tags:
            if tag.rfind("<") != 0:
                raise ValueError(f"A tag begins with its only '<', and {tag!r} does not.")
        self._tags = tuple(tags)
        self._longest = max(map(len, tags), default=0)
        self._pattern = re.compile("|".join(map(re.escape, tags))) if tags else None

    def find(self, text: str, start: int) -> tuple[int, str]:
        """Where the first tag from `start` on begins, and the tag.

        Without one it is where a tag may have begun, or else the end of the text, and "".
        """
        if self._pattern is None:
            return len(text), ""
        if match := self._pattern.search(text, start):
            return match.start(), match.group()
        last = text.rfind("<", max(start, len(text) - self._longest + 1))
        if last >= 0 and any(tag.startswith(text[last:]) for tag in self._tags):
            return last, ""
        return len(text), ""
