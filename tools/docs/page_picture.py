"""docs/pictures/page.png: the server's page, after an answer of the embedded model.

python -m tools.docs.page_picture    writes it; takes a Chromium and the extra `test`
"""

import sys
from pathlib import Path

from jaxspec.api.async_llm import AsyncLLM

ROOT = Path(__file__).parents[2]
PATH = ROOT / "docs" / "pictures" / "page.png"
_CHOICES = {"temperature": "0.7", "seed": "7", "max_tokens": "160"}
_PROMPT = "A function that reads a file and returns its lines"
_DONE = "document.getElementById('done').textContent"


def main() -> None:
    sys.path.append(str(ROOT / "tests" / "support"))
    from browser import browsing
    from served import serving

    with serving(lambda: AsyncLLM(max_model_len=512)) as served, browsing() as page:
        page.open(served.root, width=1200, height=860)
        page.wait("document.getElementById('engine').textContent === 'ready'")
        page.value("document.getElementById('settings').open = true")
        for name, value in _CHOICES.items():
            page.type(f"#{name}", value)
        page.value("document.getElementById('settings').open = false")
        for _ in range(2):  # the first answer compiles
            page.click("#clear")
            page.type("#prompt", _PROMPT)
            page.press("Enter", 13)
            page.wait(_DONE, 300)
        page.wait("document.querySelectorAll('#steps rect').length > 40")
        page.value("scrollTo(0, 0)")
        PATH.write_bytes(page.picture())
    print(f"{PATH.relative_to(ROOT)}: {PATH.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
