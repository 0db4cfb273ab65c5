"""A headless Chromium that opens one page from disk: for the tests of the report page and for the
pictures in the documents. It speaks the DevTools protocol over two pipes, so no port is opened.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "chromium-headless-shell",
    "chrome-headless-shell",
)
TIMEOUT_S = 60.0
# the protocol's pipes are descriptors 3 and 4 of the browser
_START = (
    "import fcntl, os, sys;"
    "a, b = (fcntl.fcntl(int(x), fcntl.F_DUPFD, 10) for x in sys.argv[1:3]);"
    "os.dup2(a, 3); os.dup2(b, 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class BrowserError(RuntimeError):
    """A failed start, an answer that did not come, or an error raised by an expression; see the
    message.
    """


def find_browser() -> str | None:
    """Returns the path of a Chromium, or None if PATH has no Chromium."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class Browser:
    """One tab. `errors` collects the errors, exceptions and refusals that the console shows."""

    def __init__(self, width: int = 1280, height: int = 900, dark: bool = False):
        path = find_browser()
        if path is None:
            raise BrowserError(f"none of {', '.join(NAMES)} is on PATH; install Chromium")
        self.errors: list[str] = []
        self.requests: list[str] = []
        self._events: list[dict[str, Any]] = []
        self._number = 0
        self._session = ""
        self._rest = b""
        self._profile = tempfile.mkdtemp(prefix="compass_browser_")
        pipe_in, browser_out = os.pipe()
        browser_in, pipe_out = os.pipe()
        flags = ["--headless=new", "--remote-debugging-pipe", "--no-sandbox", "--disable-gpu"]
        flags += ["--no-first-run", "--disable-dev-shm-usage", "--hide-scrollbars"]
        flags += [f"--user-data-dir={self._profile}", f"--window-size={width},{height}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START, str(browser_in), str(browser_out), path, *flags],
            pass_fds=(browser_in, browser_out),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(browser_in)
        os.close(browser_out)
        self._in, self._out = pipe_in, pipe_out
        target = self.send("Target.createTarget", url="about:blank")["targetId"]
        session = self.send("Target.attachToTarget", targetId=target, flatten=True)
        self._session = session["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.send(f"{domain}.enable")
        self.send(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=False,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._profile, ignore_errors=True)

    # ---- the protocol ----------------------------------------------------------------------------

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        """Returns the result of one command. Raises BrowserError if it fails or takes too long."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        data = memoryview(json.dumps(message).encode() + b"\0")
        while data:
            data = data[os.write(self._out, data) :]
        while True:
            answer = self._receive(method)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise BrowserError(f"{method}: {answer['error']['message']}")
                return answer["result"]
            self._note(answer)

    def _receive(self, waiting_for: str) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._in], [], [], max(0.0, until - time.monotonic()))
            part = os.read(self._in, 1 << 20) if ready else b""
            if not part:
                raise BrowserError(f"{waiting_for}: the browser does not answer")
            self._rest += part
        line, self._rest = self._rest.split(b"\0", 1)
        return json.loads(line)

    def _note(self, event: dict[str, Any]) -> None:
        method, params = event.get("method", ""), event.get("params", {})
        self._events.append(event)
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            error = details.get("exception", {}).get("description", details.get("text"))
            self.errors.append(str(error))
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str([x.get("value") for x in params["args"]]))
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    # ---- a user's actions ------------------------------------------------------------------------

    def open(self, path: Path) -> None:
        """Loads a file and waits until the page reports that it is drawn."""
        self.send("Page.navigate", url=path.absolute().as_uri())
        self.wait("document.documentElement?.dataset.ready")

    def wait(self, expression: str) -> Any:
        """Waits until an expression is true and returns its value."""
        until = time.monotonic() + TIMEOUT_S
        while not (value := self.evaluate(expression)):
            if time.monotonic() > until:
                raise BrowserError(f"{expression} does not become true; errors: {self.errors}")
            time.sleep(0.02)
        return value

    def evaluate(self, expression: str) -> Any:
        """Returns the JSON value of a JavaScript expression in the page."""
        response = self.send("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in response:
            raise BrowserError(f"{expression}: {response['result'].get('description')}")
        return response["result"].get("value")

    def point(self, selector: str, number: int = 0) -> tuple[float, float]:
        """Scrolls an element into view and returns its middle."""
        box = f"document.querySelectorAll({json.dumps(selector)})[{number}]"
        if not self.evaluate(f"!!{box}"):
            raise BrowserError(f"the page has no {selector} number {number}")
        self.evaluate(f"{box}.scrollIntoView({{block: 'center', behavior: 'instant'}})")
        rect = f"JSON.stringify((({box}).getClientRects()[0]))"
        rectangle = json.loads(self.evaluate(rect))
        return rectangle["x"] + rectangle["width"] / 2, rectangle["y"] + rectangle["height"] / 2

    def hover(self, selector: str, number: int = 0) -> None:
        """Moves the mouse onto an element."""
        x, y = self.point(selector, number)
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def click(self, selector: str, number: int = 0) -> None:
        """Clicks an element."""
        self.hover(selector, number)
        x, y = self.point(selector, number)
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector: str, text: str) -> None:
        """Writes into a field."""
        self.evaluate(f"document.querySelector({json.dumps(selector)}).focus()")
        self.send("Input.insertText", text=text)

    def choose(self, selector: str, value: str) -> None:
        """Chooses an entry of a list, or the place of a slider."""
        target = f"document.querySelector({json.dumps(selector)})"
        self.evaluate(
            f"{target}.value = {json.dumps(value)};"
            f"{target}.dispatchEvent(new Event({target}.type === 'range' ? 'input' : 'change'))"
        )

    def screenshot(self, file: Path, selector: str | None = None, most_height: int = 900) -> None:
        """Writes a PNG of the visible part, or of an element, cut at `most_height` pixels."""
        clip: dict[str, Any] = {}
        if selector:
            rect = f"document.querySelector({json.dumps(selector)}).getBoundingClientRect()"
            box = json.loads(self.evaluate(f"JSON.stringify({rect})"))
            top = box["y"] + self.evaluate("window.scrollY")
            height = min(box["height"], most_height)
            clip = {"x": box["x"], "y": top, "width": box["width"], "height": height, "scale": 1}
        options = {"clip": clip, "captureBeyondViewport": True} if clip else {}
        image = self.send("Page.captureScreenshot", format="png", **options)
        file.write_bytes(base64.b64decode(image["data"]))
