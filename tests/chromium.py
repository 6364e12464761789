"""A real Chromium without a window, driven over its DevTools protocol.

It has a profile of its own, which goes with it, and reaches what runs on this machine alone. One
browser serves many pages; each has its own cookies and storage.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from websockets.exceptions import ConnectionClosed
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
WAIT_S = 60.0
"""For what must happen: longer than any busy machine takes."""
_FLAGS = (
    "--headless=new",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-gpu",
    "--disable-sync",
    "--hide-scrollbars",
    "--mute-audio",
    "--no-default-browser-check",
    "--no-first-run",
    "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    "--remote-debugging-port=0",
)


def find_chromium() -> str | None:
    """Return the browser's path, or None."""
    return next(filter(None, map(shutil.which, NAMES)), None)


class PageError(AssertionError):
    """What a page was told to do failed there."""


class Browser:
    """A browser that runs.

    Args:
        path: Its program.

    Raises:
        TimeoutError: When it does not start.
    """

    def __init__(self, path: str) -> None:
        self._closing = ExitStack()
        self._profile = Path(tempfile.mkdtemp(prefix="llamakeep-chromium-"))
        root = hasattr(os, "geteuid") and os.geteuid() == 0
        flags = [*_FLAGS, f"--user-data-dir={self._profile}"]
        flags += ["--no-sandbox"] if root else []  # which root cannot have
        self._process = subprocess.Popen(
            [path, *flags, "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            self._socket: ClientConnection = self._closing.enter_context(
                connect(
                    self._address(),
                    max_size=None,
                    compression=None,
                    proxy=None,
                    ping_interval=None,  # its thread would use `random` while other tests do
                )
            )
        except BaseException:
            self.close()
            raise
        self._n_calls = 0
        self._events: list[dict[str, Any]] = []

    def _address(self) -> str:
        told, deadline = self._profile / "DevToolsActivePort", time.monotonic() + WAIT_S
        while time.monotonic() < deadline and self._process.poll() is None:
            lines = told.read_text().split() if told.exists() else []
            if len(lines) == 2:
                return f"ws://127.0.0.1:{lines[0]}{lines[1]}"
            time.sleep(0.05)
        raise TimeoutError(f"the browser did not start (exit code {self._process.poll()})")

    def call(self, method: str, session: str = "", **params: Any) -> dict[str, Any]:
        """Have something done, and return the result.

        Raises:
            PageError: With the browser's words.
        """
        self._n_calls += 1
        call = {"id": self._n_calls, "method": method, "params": params}
        self._socket.send(json.dumps(call | ({"sessionId": session} if session else {})))
        while True:
            told = json.loads(self._socket.recv(timeout=WAIT_S))
            if told.get("id") == self._n_calls:
                break
            self._events.append(told)
        if "error" in told:
            raise PageError(f"{method}: {told['error']}")
        result: dict[str, Any] = told["result"]
        return result

    def events(self, session: str) -> list[dict[str, Any]]:
        """Return what a page has told so far."""
        return [event for event in self._events if event.get("sessionId") == session]

    @contextmanager
    def page(
        self, url: str, *, width: int = 1200, height: int = 900, scheme: str = "light"
    ) -> Iterator[Page]:
        """Open a page, as if nobody had ever been there, and close it at the end.

        Args:
            url: Where.
            width: Of the window.
            height: Of the window.
            scheme: `light` or `dark`.
        """
        context = self.call("Target.createBrowserContext")["browserContextId"]
        target = self.call("Target.createTarget", url="about:blank", browserContextId=context)
        session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)
        page = Page(self, session["sessionId"])
        try:
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.call(f"{domain}.enable")
            page.resize(width, height)
            page.prefer(scheme)
            page.call("Page.navigate", url=url)
            page.wait_for("document.readyState === 'complete'")
            yield page
        finally:
            self.call("Target.closeTarget", targetId=target["targetId"])
            self.call("Target.disposeBrowserContext", browserContextId=context)
            self._events = [event for event in self._events if event not in page.events]

    def close(self) -> None:
        """End it, and remove its profile."""
        if hasattr(self, "_socket"):
            with suppress(PageError, ConnectionClosed, TimeoutError):
                self.call("Browser.close")  # so that it ends what it has started, too
        self._closing.close()
        if not hasattr(self, "_socket"):
            self._process.terminate()
        try:
            self._process.wait(WAIT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(WAIT_S)
        shutil.rmtree(self._profile, ignore_errors=True)


class Page:
    """A page that is open.

    Args:
        browser: Shows it.
        session: Names it there.
    """

    def __init__(self, browser: Browser, session: str) -> None:
        self._browser = browser
        self._session = session

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """See `Browser.call`."""
        return self._browser.call(method, self._session, **params)

    @property
    def events(self) -> list[dict[str, Any]]:
        """What it has told."""
        return self._browser.events(self._session)

    def run(self, expression: str) -> Any:
        """Return what an expression of JavaScript is; a promise is waited for.

        Raises:
            PageError: For whatever it throws.
        """
        told = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
            allowUnsafeEvalBlockedByCSP=False,
        )
        if "exceptionDetails" in told:
            raise PageError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true.

        Raises:
            PageError: When it does not become true.
        """
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if self.run(f"Boolean({expression})"):
                return
            time.sleep(0.05)
        raise PageError(f"never true: {expression}\n{self.run('document.body.innerText')}")

    def wait_until(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so.

        Raises:
            PageError: When it does not become so.
        """
        deadline = time.monotonic() + WAIT_S
        while time.monotonic() < deadline:
            if is_so():
                return
            time.sleep(0.05)
        raise PageError(f"never so\n{self.run('document.body.innerText')}")

    def press(self, key: str, *, shift: bool = False) -> None:
        """Press a key, like `Tab`, `Enter` or `ArrowDown`."""
        codes = {
            "Tab": 9, "Enter": 13, " ": 32, "End": 35, "Home": 36,
            "ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40,
        }  # fmt: skip
        common = {
            "key": key,
            "code": "Space" if key == " " else key,
            "windowsVirtualKeyCode": codes[key],
            "modifiers": 8 if shift else 0,
        }
        typed = {"Enter": "\r", " ": " "}.get(key)
        more = {} if typed is None else {"text": typed}
        kind = "keyDown" if more else "rawKeyDown"
        self.call("Input.dispatchKeyEvent", type=kind, **common, **more)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def type(self, text: str) -> None:
        """Write a text where the focus is."""
        self.call("Input.insertText", text=text)

    def resize(self, width: int, height: int, *, scale: float = 1.0) -> None:
        """Give it a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=scale,
            mobile=False,
        )

    def prefer(self, scheme: str) -> None:
        """Say which colours its reader prefers: `light` or `dark`."""
        features = [
            {"name": "prefers-color-scheme", "value": scheme},
            {"name": "prefers-reduced-motion", "value": "reduce"},
        ]
        self.call("Emulation.setEmulatedMedia", features=features)

    def problems(self) -> list[str]:
        """Return what its console has of errors and warnings, and what it threw."""
        self.run("0")  # what came before is told by now
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(str(params["exceptionDetails"]))
            elif event["method"] == "Log.entryAdded":
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
            elif event["method"] == "Runtime.consoleAPICalled":
                found.append(str([each.get("value") for each in params["args"]]))
        return found

    def requests(self) -> list[str]:
        """Return the addresses that it asked."""
        self.run("0")
        return [
            event["params"]["request"]["url"]
            for event in self.events
            if event["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, *, full: bool = False) -> bytes:
        """Return a picture of it, as PNG."""
        told = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=full)
        return base64.b64decode(told["data"])
