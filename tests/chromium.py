"""A page in Chromium, driven over the DevTools protocol on two pipes: no driver, no package, no network."""

import json
import os
import select
import shutil
import subprocess
import tempfile
import threading
import time
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer

try:
    import fcntl
except ImportError:  # Windows, whose programs take no pipes by number
    BROWSER = None
else:
    BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
REQUIRED = bool(os.environ.get("KHOT_BROWSER"))
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic", "--remote-debugging-pipe"),
)


class Quiet(SimpleHTTPRequestHandler):
    def log_message(self, *args):
        pass


class Server:
    """A folder, served on a free port of this machine."""

    def __init__(self, folder):
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Quiet, directory=str(folder)))
        self.url = f"http://127.0.0.1:{self._server.server_port}/"

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *problem):
        self._server.shutdown()
        self._server.server_close()


class Chromium:
    """One tab. `requests` are the addresses that it asked for."""

    def __init__(self, width=1400, height=900, dark=False):
        assert BROWSER is not None, "KHOT_BROWSER is set, and there is no Chromium"
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        high = [fcntl.fcntl(end, fcntl.F_DUPFD, 20) for end in (theirs_in, theirs_out)]
        self._process = subprocess.Popen(
            [BROWSER, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"],
            pass_fds=(3, 4),
            preexec_fn=lambda: [os.dup2(end, place) for end, place in zip(high, (3, 4), strict=True)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for end in (theirs_in, theirs_out, *high):
            os.close(end)
        self._rest, self._count, self._session, self.requests = b"", 0, None, []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.resize(width, height)

    def __enter__(self):
        return self

    def __exit__(self, *problem):
        self._process.kill()
        self._process.wait()
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def _message(self, seconds):
        """The next message, or None after so many seconds."""
        end = time.monotonic() + seconds
        while b"\0" not in self._rest:
            if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                return None
            more = os.read(self._in, 1 << 20)
            assert more, "Chromium is gone"
            self._rest += more
        text, _, self._rest = self._rest.partition(b"\0")
        message = json.loads(text)
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(message["params"]["request"]["url"])
        return message

    def call(self, method, seconds=60, **params):
        """Send a command and wait for its result."""
        self._count += 1
        command = {"id": self._count, "method": method, "params": params}
        os.write(
            self._out, json.dumps(command | ({"sessionId": self._session} if self._session else {})).encode() + b"\0"
        )
        while (message := self._message(seconds)) is not None:
            if message.get("id") == self._count:
                assert "error" not in message, message
                return message["result"]
        raise TimeoutError(f"{method} took more than {seconds} seconds")

    def resize(self, width, height):
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        self.call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url, seconds=60):
        """Open a page and wait until it and its images are loaded."""
        self.call("Page.navigate", url=url)
        self.wait(f"document.readyState === 'complete' && location.href === {json.dumps(url)}", seconds)

    def js(self, expression):
        """The value of an expression in the page."""
        found = self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True, userGesture=True
        )
        assert "exceptionDetails" not in found, found
        return found["result"].get("value")

    def wait(self, expression, seconds=30):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not self.js(f"!!({expression})"):
            assert time.monotonic() < end, f"waited {seconds} seconds for {expression}"
            time.sleep(0.02)
