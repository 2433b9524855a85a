"""`khot tour`: the explorer, a page that shows what σ_k does. It needs nothing but Python and a browser."""

import os
import sys
import webbrowser
from pathlib import Path

EXPLORER = Path(__file__).with_name("explorer.html")


def show_explorer(*, is_opened: bool = True) -> None:
    """Print the address of the explorer, and open it in a browser if there is one to see."""
    print("The explorer: drag scores, move k and the temperature, see gradients and samples.")
    print(EXPLORER.as_uri())
    if not is_opened:
        return
    if not has_display():
        print("No display here: open that address in a browser.")
    elif not webbrowser.open(EXPLORER.as_uri()):
        print("No browser was found: open that address in one.")


def has_display() -> bool:
    """Return whether a browser would be seen; on Linux and BSD, a display server is needed for that."""
    if sys.platform in ("win32", "darwin"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))
