"""Chromium for tests, spoken to through a pipe: no driver, no websocket, no network."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest

BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--hide-scrollbars"),
)
needs_browser = pytest.mark.skipif(
    BROWSER is None and not os.environ.get("KHOT_BROWSER"), reason="no Chromium on this machine"
)


class Page:
    """One page of a headless browser. Everything it logs, throws or asks for is written down."""

    def __init__(self, profile: Path):
        assert BROWSER is not None, "KHOT_BROWSER is set, and there is no Chromium"
        to_read, self._out = os.pipe()
        self._in, to_write = os.pipe()
        ends = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (to_read, to_write)]  # not 3 or 4 themselves

        def connect():  # the browser reads from 3 and writes to 4
            os.dup2(ends[0], 3)
            os.dup2(ends[1], 4)

        command = [BROWSER, *FLAGS, f"--user-data-dir={profile}", "--remote-debugging-pipe", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        self._process = subprocess.Popen(command, close_fds=False, preexec_fn=connect, **quiet)
        for end in (to_read, to_write, *ends):
            os.close(end)
        self._buffer, self._count, self._session = b"", 0, None
        self.errors, self.requests, self.loads = [], [], 0
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command of the DevTools protocol and return its result."""
        self._count += 1
        message = {"id": self._count, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._count:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def _read(self):
        while b"\0" not in self._buffer:
            more = os.read(self._in, 1 << 20)
            assert more, "the browser has ended"
            self._buffer += more
        raw, _, self._buffer = self._buffer.partition(b"\0")
        answer = json.loads(raw)
        params = answer.get("params", {})
        match answer.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(params["exceptionDetails"].get("exception", {}).get("description", "exception"))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Page.loadEventFired":
                self.loads += 1
        return answer

    def open(self, url):
        """Go to an address, afresh, and wait until it is loaded."""
        for address in ("about:blank", url):  # an address that differs behind # alone would not load again
            before = self.loads
            self.call("Page.navigate", url=address)
            while self.loads == before:
                self._read()

    def run(self, script):
        """Return the value of a JavaScript expression, or what its promise resolves to."""
        result = self.call("Runtime.evaluate", expression=script, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in result, result["exceptionDetails"]["exception"]["description"]
        return result["result"].get("value")

    def rest(self, milliseconds=300):
        """Let the page do what it has put off."""
        self.run(f"new Promise((done) => setTimeout(done, {milliseconds}))")

    def resize(self, width, height=900):
        """Set the size of the screen."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500
        )

    def prefer(self, **features):
        """Set media features: color_scheme="dark", reduced_motion="reduce"."""
        named = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def press(self, key, *, shift=False):
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind in ("keyDown", "keyUp"):
            more = text if kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 if shift else 0, **more)

    def mouse(self, kind, x, y, clicks=1):
        """Move, press or release the left button: "Moved", "Pressed", "Released"."""
        button = {"button": "left", "buttons": 0 if kind == "Released" else 1, "clickCount": clicks}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **button)

    def picture(self, path):
        """Save the whole page as PNG."""
        shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        Path(path).write_bytes(base64.b64decode(shot["data"]))

    def close(self):
        """End the browser."""
        self._session = None
        self.call("Browser.close")
        os.close(self._out)
        os.close(self._in)
        self._process.wait(timeout=20)
