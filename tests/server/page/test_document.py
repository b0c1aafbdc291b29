"""The page needs nothing but itself, and its policy lets nothing else run."""

import base64
import hashlib
import json
import re

import pytest

from jaxspec.runner.memory import HOLDER_WORDS
from jaxspec.server.page.document import DOCUMENT, HEADERS
from jaxspec.viz.colored_tokens import GROUNDS, html_ground
from jaxspec.viz.timeline import STAGES

POLICY = dict(part.strip().split(" ", 1) for part in HEADERS["content-security-policy"].split(";"))


def inside(element):
    (text,) = re.findall(rf"<{element}>(.*?)</{element}>", DOCUMENT, re.DOTALL)
    return text


@pytest.mark.parametrize("element", ["script", "style"])
def test_the_policy_knows_the_page_s_own_by_its_hash_and_nothing_else(element):
    digest = base64.b64encode(hashlib.sha256(inside(element).encode()).digest()).decode()
    assert POLICY[f"{element}-src"] == f"'sha256-{digest}'"
    assert POLICY["default-src"] == "'none'" and POLICY["connect-src"] == "'self'"
    assert "unsafe" not in HEADERS["content-security-policy"]


def test_no_resource_is_elsewhere():
    addresses = re.findall(r"(?:https?:)?//[a-z][^\s\"')]*", DOCUMENT)
    assert set(addresses) <= {"http://www.w3.org/2000/svg"}  # a name, which nobody fetches
    assert set(re.findall(r'(?:src|href)="([^"]*)"', DOCUMENT)) == {"data:,"}


def test_what_comes_is_never_read_as_html():
    script = inside("script")
    for way in (
        "innerHTML",
        "outerHTML",
        "insertAdjacentHTML",
        "document.write",
        "eval(",
        "Function(",
    ):
        assert way not in script


def test_words_and_colours_are_their_owners():
    (text,) = re.findall(r'id="words">(.*?)</script>', DOCUMENT)
    words = json.loads(text)
    assert words["drafts"] == [html_ground(place + 1) for place in range(len(GROUNDS))]
    assert {n: (x["colour"], x["words"]) for n, x in words["stages"].items()} == STAGES
    assert words["holders"].keys() == HOLDER_WORDS.keys()
