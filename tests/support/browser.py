"""A headless Chromium by its devtools protocol: what a page shows, logs and asks for."""

import base64
import contextlib
import itertools
import json
import os
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from websockets.sync.client import ClientConnection, connect

BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
_ADDRESS = re.compile(r"DevTools listening on (ws://\S+)")


class Page:
    """A tab. `console` has its warnings and errors, `requests` the addresses it asked for."""

    def __init__(self, socket: ClientConnection, session: str):
        self._socket, self._session, self._numbers = socket, session, itertools.count(1)
        self.console: list[str] = []
        self.requests: list[str] = []
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """What a command of the protocol answers."""
        number = next(self._numbers)
        message = {"id": number, "sessionId": self._session, "method": method, "params": params}
        self._socket.send(json.dumps(message))
        while True:
            told = json.loads(self._socket.recv(timeout=60))
            if told.get("id") == number and told.get("sessionId") == self._session:
                assert "error" not in told, told["error"]
                return told["result"]
            self._hear(told.get("method", ""), told.get("params", {}))

    def open(
        self, address: str, *, width: int = 1280, height: int = 800, dark: bool = False
    ) -> None:
        """Load a page."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=address)
        self.wait("document.readyState === 'complete'")

    def value(self, expression: str) -> Any:
        """What an expression of JavaScript gives, as JSON."""
        told = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in told, told["exceptionDetails"]
        return told["result"].get("value")

    def wait(self, expression: str, seconds: float = 60) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.value(f"Boolean({expression})"):
            assert time.monotonic() < end, f"{expression} did not come true: {self.console}"
            time.sleep(0.02)

    def text(self, selector: str) -> str:
        """The text of the first such element."""
        return self.value(f"document.querySelector({json.dumps(selector)}).textContent")

    def type(self, selector: str, text: str) -> None:
        """Focus an element and type into it."""
        element = f"document.querySelector({json.dumps(selector)})"
        focus = f"{element}.focus(), document.activeElement === {element}"
        assert self.value(focus), f"{selector} takes no focus, as where it is hidden"
        self.call("Input.insertText", text=text)

    def press(self, key: str, code: int) -> None:
        """Press a key where the focus is."""
        given = {"key": key, "code": key, "windowsVirtualKeyCode": code}
        text = {"text": "\r"} if key == "Enter" else {}
        self.call("Input.dispatchKeyEvent", type="keyDown", **given, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **given)

    def click(self, selector: str) -> None:
        """Click in the middle of an element, once two frames find it in one place."""
        box = self.value(
            "(async () => { let last, place;"
            f"const e = document.querySelector({json.dumps(selector)}); e.scrollIntoView();"
            "do { last = place; await new Promise(requestAnimationFrame);"
            "const b = e.getBoundingClientRect(); place = [b.x + b.width / 2, b.y + b.height / 2];"
            "} while (String(place) !== String(last)"
            " || !e.contains(document.elementFromPoint(...place)));"
            "return place; })()"
        )
        where = {"x": box[0], "y": box[1], "button": "left", "clickCount": 1}
        self.call("Input.dispatchMouseEvent", type="mousePressed", **where)
        self.call("Input.dispatchMouseEvent", type="mouseReleased", **where)

    def picture(self) -> bytes:
        """What is seen, as PNG."""
        return base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"])

    def _hear(self, method: str, params: dict[str, Any]) -> None:
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.console.append(params["exceptionDetails"]["exception"]["description"])
        elif method == "Runtime.consoleAPICalled":
            self.console.append(str([each.get("value") for each in params["args"]]))
        elif method == "Log.entryAdded":
            self.console.append(params["entry"]["text"])


@contextlib.contextmanager
def browsing() -> Iterator[Page]:
    """An empty tab of a browser that ends with the block."""
    assert BROWSER is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={profile}",
                   "--no-first-run", "--disable-gpu", "--disable-dev-shm-usage",
                   "--disable-background-networking", "--disable-component-update"]  # fmt: skip
        if os.geteuid() == 0:
            options.append("--no-sandbox")  # root's has none
        log = Path(profile) / "log"
        with log.open("wb") as out:
            process = subprocess.Popen([BROWSER, *options], stdout=out, stderr=out)
        try:
            with connect(_address(process, log), max_size=2**26) as socket:
                yield _page(socket)
        finally:
            process.terminate()
            process.wait(20)


def _address(process: subprocess.Popen, log: Path) -> str:
    for _ in range(1200):
        if found := _ADDRESS.search(log.read_text(errors="replace")):
            return found[1]
        assert process.poll() is None, log.read_text(errors="replace")
        time.sleep(0.05)
    raise TimeoutError(log.read_text(errors="replace"))


def _page(socket: ClientConnection) -> Page:
    def ask(number: int, method: str, **params: Any) -> Any:
        socket.send(json.dumps({"id": -number, "method": method, "params": params}))
        while (told := json.loads(socket.recv(timeout=60))).get("id") != -number:
            pass
        return told["result"]

    target = ask(1, "Target.createTarget", url="about:blank")["targetId"]
    session = ask(2, "Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
    return Page(socket, session)
