"""Patterns of string formats: usual spellings alone, all of which llguidance accepts too."""

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_FOURTH = "(?:0[48]|[2468][048]|[13579][26])"  # multiples of 4 but 0, of two digits
_LEAP_YEAR = f"(?:[0-9]{{2}}{_FOURTH}|{_FOURTH}00)"
_DAY = "(?:0[1-9]|[12][0-9])"  # of any month but February
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:{_DAY}|3[01])|(?:0[469]|11)-(?:{_DAY}|30)"
    f"|02-(?:0[1-9]|1[0-9]|2[0-8]))|{_LEAP_YEAR}-02-29)"
)
_CLOCK = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = rf"{_CLOCK}:[0-5][0-9](?:\.[0-9]{{1,9}})?(?:Z|[+\-]{_CLOCK})"
_CLOCK_DURATION = "(?:[0-9]+H(?:[0-9]+M(?:[0-9]+S)?)?|[0-9]+M(?:[0-9]+S)?|[0-9]+S)"
_DATE_DURATION = "(?:[0-9]+Y(?:[0-9]+M(?:[0-9]+D)?)?|[0-9]+M(?:[0-9]+D)?|[0-9]+D)"
_DURATION = f"P(?:[0-9]+W|T{_CLOCK_DURATION}|{_DATE_DURATION}(?:T{_CLOCK_DURATION})?)"
_LABEL = r"[a-zA-Z0-9](?:[a-zA-Z0-9\-]{0,61}[a-zA-Z0-9])?"
_HOSTNAME = rf"{_LABEL}(?:\.{_LABEL})*"
_ATOM = r"[a-zA-Z0-9!#$%&'*+/=?^_`{|}~\-]+"
_BYTE = "(?:[0-9]|[1-9][0-9]|1[0-9]{2}|2[0-4][0-9]|25[0-5])"
_GROUP = "[0-9a-fA-F]{1,4}"


def _groups(most: int) -> str:
    """Return the pattern of up to `most` groups of an IPv6 address."""
    return f"(?:{_GROUP}(?::{_GROUP}){{0,{most - 1}}})?" if most else ""


def _ipv6() -> str:
    before = [f"{_GROUP}(?::{_GROUP}){{{count - 1}}}" if count else "" for count in range(8)]
    shortened = [f"{first}::{_groups(7 - count)}" for count, first in enumerate(before)]
    return "|".join([f"{_GROUP}(?::{_GROUP}){{7}}", *shortened])


FORMATS = {
    "date": _DATE,
    "time": _TIME,
    "date-time": f"{_DATE}T{_TIME}",
    "duration": _DURATION,
    "email": rf"{_ATOM}(?:\.{_ATOM})*@{_HOSTNAME}",
    "hostname": _HOSTNAME,
    "ipv4": rf"{_BYTE}(?:\.{_BYTE}){{3}}",
    "ipv6": _ipv6(),
    "uuid": "[0-9a-fA-F]{8}-(?:[0-9a-fA-F]{4}-){3}[0-9a-fA-F]{12}",
}
