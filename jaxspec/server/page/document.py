"""The page as served: `index.html` with constants of other modules filled in, and its headers.

The page loads no other resources and inserts model output as text. Its content security policy
lets a browser run only the page's own script, whatever else ends up in the page.
"""

import base64
import hashlib
import re
from pathlib import Path

import orjson

from jaxspec.runner.memory import HOLDER_WORDS
from jaxspec.viz.colored_tokens import GROUNDS, html_ground
from jaxspec.viz.timeline import STAGES

_WORDS = {
    "drafts": [html_ground(position) for position in range(1, len(GROUNDS) + 1)],
    "stages": {
        name: {"colour": colour, "words": words} for name, (colour, words) in STAGES.items()
    },
    "holders": {name: " ".join(words.split()) for name, words in HOLDER_WORDS.items()},
}
_SOURCE = (Path(__file__).parent / "index.html").read_text(encoding="utf-8")
DOCUMENT = _SOURCE.replace("WORDS_OF_JAXSPEC", orjson.dumps(_WORDS).decode())
"""HTML of the page."""


def _allowed(element: str) -> str:
    """Return the hashes of all elements with this name, as CSP sources."""
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
"""Response headers of the page."""
