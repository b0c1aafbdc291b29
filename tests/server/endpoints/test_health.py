"""GET /health, /ready, /ping, /version and /load; of an engine that failed: test_app.py."""

import jaxspec.server.endpoints.monitoring as health


def test_all_is_well(served):
    for path in ("/health", "/ready", "/ping"):
        found = served.get(path)
        assert (found.status_code, found.content) == (200, b"")
    assert served.get("/version").json()["version"]
    assert served.get("/load").json() == {"server_load": 0}
    assert {route.path for route in health.router.routes} >= {"/health", "/ready"}


def test_a_server_that_ends_is_not_ready(served):
    served.service.is_draining = True
    try:
        assert served.get("/ready").status_code == 503
        assert served.get("/health").status_code == 200
    finally:
        served.service.is_draining = False
