"""The page as it is sent: `index.html` with the words and colours of their owners, and its policy.

The page needs nothing but itself, and what a model writes is put in as text. The policy makes sure:
a browser runs no script but this one, whatever the page should come to hold.
"""

import base64
import hashlib
import re
from pathlib import Path

import orjson

from jaxspec.painted_text import GROUNDS, html_ground
from jaxspec.runner.memory import HOLDER_WORDS
from jaxspec.timeline import STAGES

_WORDS = {
    "drafts": [html_ground(position) for position in range(1, len(GROUNDS) + 1)],
    "stages": {
        name: {"colour": colour, "words": words} for name, (colour, words) in STAGES.items()
    },
    "holders": {name: " ".join(words.split()) for name, words in HOLDER_WORDS.items()},
}
_SOURCE = (Path(__file__).parent / "index.html").read_text(encoding="utf-8")
DOCUMENT = _SOURCE.replace("WORDS_OF_JAXSPEC", orjson.dumps(_WORDS).decode())
"""The page."""


def _allowed(element: str) -> str:
    """The hashes of such elements, by which a browser knows them."""
    found = re.findall(rf"<{element}>(.*?)</{element}>", DOCUMENT, re.DOTALL)
    digests = [base64.b64encode(hashlib.sha256(text.encode()).digest()) for text in found]
    return " ".join(f"'sha256-{digest.decode()}'" for digest in digests)


HEADERS = {
    "content-security-policy": (
        f"default-src 'none'; script-src {_allowed('script')}; style-src {_allowed('style')}; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; "
        "frame-ancestors 'none'"
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cache-control": "no-cache",
}
"""What is sent with it."""
