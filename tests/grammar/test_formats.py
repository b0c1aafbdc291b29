"""Formats: every text is valid by Python's parsers and llguidance, and usual texts match."""

import datetime
import ipaddress
import json
import re
import uuid

import llguidance
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxspec.grammar.formats import FORMATS

PARSERS = {
    "date": datetime.date.fromisoformat,
    "time": datetime.time.fromisoformat,
    "date-time": datetime.datetime.fromisoformat,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uuid": uuid.UUID,
}
VALID = {
    "date": ["2024-02-29", "2000-02-29", "1999-12-31"],
    "time": ["23:59:00Z", "00:00:00.123+01:00", "12:30:59-00:30"],
    "date-time": ["2024-02-29T23:59:00Z"],
    "duration": ["P1Y2M3DT4H5M6S", "P3W", "PT1H", "P1DT12H"],
    "email": ["a@b.c", "first.last+tag@mail.example.com"],
    "hostname": ["localhost", "a-b.example.com", "a" * 63],
    "ipv4": ["127.0.0.1", "255.255.255.0"],
    "ipv6": ["::", "::1", "1:2:3:4:5:6:7:8", "2001:db8::ff00:42:8329", "1::"],
    "uuid": ["123e4567-e89b-12d3-a456-426614174000"],
}
INVALID = {
    "date": ["2023-02-29", "1900-02-29", "2024-13-01", "2024-04-31", "0000-01-01", "2024-1-1"],
    "time": ["24:00:00Z", "23:59:00", "23:60:00Z"],
    "date-time": ["2024-02-29 23:59:00Z", "2024-02-29"],
    "duration": ["P", "PT", "P1W1D", "1D", "PT1H5S"],
    "email": ["a@", "@b", "a b@c", "a@-b"],
    "hostname": ["-a", "a-", "a..b", "a" * 64, ""],
    "ipv4": ["1.2.3", "256.1.1.1", "01.2.3.4"],
    "ipv6": [":::", "1::2::3", "1:2:3:4:5:6:7:8:9", "12345::"],
    "uuid": ["123e4567e89b12d3a456426614174000"],
}


def is_allowed_by_llguidance(name, text):
    schema = {"type": "string", "format": name}
    grammar = json.dumps({"grammars": [{"json_schema": schema}]})
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    return matcher.consume_tokens(list(json.dumps(text).encode())) and matcher.is_accepting()


@pytest.mark.parametrize("name", FORMATS)
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_a_text_of_a_format_is_valid(name, data):
    text = data.draw(st.from_regex(FORMATS[name], fullmatch=True))
    PARSERS.get(name, str)(text)
    assert is_allowed_by_llguidance(name, text)


@pytest.mark.parametrize("name", FORMATS)
def test_usual_texts_match_and_invalid_ones_do_not(name):
    for text in VALID[name]:
        assert re.fullmatch(FORMATS[name], text), text
    for text in INVALID[name]:
        assert not re.fullmatch(FORMATS[name], text), text
