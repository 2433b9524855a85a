"""The command line. Nothing imports it; it alone prints."""

import sys


def main() -> None:
    """Run the command `khot`."""
    if sys.argv[1:] in (["tour"], ["tour", "--no-open"]):  # needs no extra
        from ._tour import show_explorer

        show_explorer(is_opened=len(sys.argv) == 2)
        return
    try:
        from ._app import app
    except ModuleNotFoundError as missing:
        if missing.name not in ("typer", "rich"):
            raise
        sys.exit(f"The command line needs {missing.name}: install it with pip install 'khot[cli]'.")
    app()
