"""A headless Chromium for the tests of pages, driven over its DevTools protocol; what it asks for is written down."""

from __future__ import annotations

import base64
import itertools
import json
import shutil
import subprocess
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")


def chromium() -> str | None:
    """The browser's path; None where none is installed."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """One tab. `requests` are the addresses it asked for, `errors` what its console and its scripts complained of."""

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(address, timeout=60, suppress_origin=True)
        self._ids = itertools.count(1)
        self.requests: list[str] = []
        self.errors: list[str] = []
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        self._socket.send(json.dumps({"id": number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message.get("method"), message.get("params", {})
        if method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif method == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"])[:500])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
            self.errors.append(str(params["args"])[:500])
        elif method == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(f"{params['entry']['text']} {params['entry'].get('url')}")

    def run(self, script: str) -> Any:
        """The value of an expression in the page; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait(self, script: str, seconds: float = 60) -> Any:
        """The value of an expression once it is truthy."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}; {self.errors}"
            time.sleep(0.1)
        return value

    def size(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)

    def screenshot(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))


@contextmanager
def open_page(folder: Path, width: int = 1200, height: int = 1300) -> Iterator[Page]:
    """A tab of a new browser whose profile lies in `folder`."""
    command = [str(chromium()), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"]
    command += ["--remote-debugging-port=0", f"--user-data-dir={folder}", "--disable-extensions", "--no-first-run"]
    command += ["--disable-background-networking", "--disable-component-update", "--mute-audio", "about:blank"]
    browser = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        said, end = folder / "DevToolsActivePort", time.monotonic() + 60
        while not (said.is_file() and said.read_text().count("\n")):
            assert browser.poll() is None, "the browser ended at once"
            assert time.monotonic() < end, "the browser never opened its port"
            time.sleep(0.1)
        port = said.read_text().split()[0]
        tabs = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/json/list"))
        page = Page(next(tab for tab in tabs if tab["type"] == "page")["webSocketDebuggerUrl"])
        page.size(width, height)
        yield page
    finally:
        browser.terminate()
        try:
            browser.wait(20)
        except subprocess.TimeoutExpired:
            browser.kill()
            browser.wait()
