"""GET /: the page, with a policy, whoever asks."""

from page_llm import PageLLM
from served import serving

from jaxspec.server.page.document import DOCUMENT, HEADERS


def test_the_page_needs_no_key_and_its_stats_do():
    with serving(lambda: PageLLM(["yes"]), api_key=("secret",)) as found:
        page = found.get("/")
        assert page.status_code == 200 and page.text == DOCUMENT
        assert page.headers["content-type"] == "text/html; charset=utf-8"
        assert {name: page.headers[name] for name in HEADERS} == HEADERS
        assert found.get("/stats").status_code == 401
        key = {"authorization": "Bearer secret"}
        assert found.get("/stats", headers=key).json()["model"] == "scripted"


def test_an_engine_that_has_failed_has_no_stats():
    with serving(lambda: PageLLM(["yes"])) as found:
        found.llm.is_healthy = False
        figures = found.get("/stats?steps=4")
        assert figures.status_code == 200 and not figures.json()["is_healthy"]
        assert figures.json()["steps"] == [] and "num_tokens" not in figures.json()
