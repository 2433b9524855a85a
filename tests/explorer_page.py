"""The explorer in Chromium, with keyboard, mouse and camera; what it logs, throws and asks for is written down."""

import base64
from pathlib import Path

import pytest
from chromium import BROWSER, REQUIRED, Chromium

from khot.cli import EXPLORER

URL = EXPLORER.as_uri()
needs_browser = pytest.mark.skipif(BROWSER is None and not REQUIRED, reason="no Chromium on this machine")


class Page(Chromium):
    """One tab that shows the explorer."""

    def __init__(self):
        self.errors = []
        super().__init__()
        self.call("Log.enable")

    def _message(self, seconds):
        message = super()._message(seconds) or {}
        params = message.get("params", {})
        match message.get("method"):
            case "Runtime.exceptionThrown":
                self.errors.append(str(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.errors.append(str(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.errors.append(params["entry"]["text"])
        return message or None

    def show(self, address=URL):
        """Open an address afresh: one that differs behind # alone would not load again."""
        self.open("about:blank")
        self.open(address)
        self.wait("window.khot")

    def reset(self):
        """Show the explorer as a new reader sees it, without motion."""
        self.resize(1400, 900)
        self.prefer(color_scheme="light", reduced_motion="reduce")
        self.show()
        self.errors.clear()
        self.requests.clear()
        self.show()

    def rest(self, milliseconds=300):
        """Let the page do what it has put off."""
        self.js(f"new Promise((done) => setTimeout(done, {milliseconds}))")

    def click(self, control):
        """Click on the element with this id."""
        self.js(f"document.getElementById('{control}').click()")

    def text(self, place):
        """Return the text of the element with this id."""
        return self.js(f"document.getElementById('{place}').textContent")

    def prefer(self, **features):
        """Set media features: color_scheme="dark", reduced_motion="reduce"."""
        named = [{"name": f"prefers-{name.replace('_', '-')}", "value": value} for name, value in features.items()]
        self.call("Emulation.setEmulatedMedia", features=named)

    def press(self, key, *, shift=False):
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        for kind, more in (("keyDown", text), ("keyUp", {})):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key, modifiers=8 if shift else 0, **more)

    def mouse(self, kind, x, y, clicks=1):
        """Move, press or release the left button: "Moved", "Pressed", "Released"."""
        button = {"button": "left", "buttons": 0 if kind == "Released" else 1, "clickCount": clicks}
        self.call("Input.dispatchMouseEvent", type=f"mouse{kind}", x=x, y=y, **button)

    def picture(self, path, width):
        """Save the whole page as PNG."""
        self.resize(width, 900)
        self.resize(width, self.js("document.documentElement.scrollHeight"))
        self.rest(60)
        Path(path).write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))
