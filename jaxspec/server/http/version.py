"""Version of the serving jaxspec."""

from jaxspec.flight.about import version_of


def version() -> str:
    """Return the installed version, or "unknown" for sources that are not installed."""
    return version_of("jaxspec") or "unknown"
