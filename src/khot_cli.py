"""The command `khot`. Help, version and typing errors need no extra and do not import khot, which imports torch."""

import os
import sys
from difflib import get_close_matches
from pathlib import Path
from runpy import run_path

COMMANDS = {
    "select": ("select", "Choose the k features of a table that matter, and compare the choice."),
    "sae": ("sae", "Train a sparse autoencoder on a file of activations."),
    "bench": ("cli", "Time the operators of khot against others, at your shape."),
    "tour": ("", "Open the explorer in a browser: see what the sigmoid top-k does."),
    "info": ("", "Print the versions, and which kernels run and why."),
}
"""The extra that each command needs, and what it does."""
HELP = """\
Usage: khot COMMAND [OPTIONS]

Everything softmax does for one-hot, done for k-hot: differentiable top-k for
PyTorch.

Commands:
{commands}

Options:
  --version  Print the version and exit.
  --help     Print this text and exit. `khot COMMAND --help` explains a command.
"""


def answer(first: str) -> None:
    """Print what needs no torch (help, the version, a typing error) and exit; return if it is a command."""
    if first in ("--help", "-h"):
        print(HELP.format(commands="\n".join(f"  {name:<9}{what}" for name, (_, what) in COMMANDS.items())), end="")
    elif first == "--version":
        print(f"khot {run_path(str(Path(__file__).with_name('khot') / '_version.py'))['__version__']}")
    elif first not in COMMANDS:
        near = get_close_matches(first, COMMANDS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"the commands are {', '.join(COMMANDS)}."
        print(f"khot: there is no command {first!r}: {hint}", file=sys.stderr)
        sys.exit(2)
    else:
        return
    sys.exit()


def main() -> None:
    """Run the command line; Ctrl-C ends it without a traceback."""
    try:
        _run()
    except KeyboardInterrupt:  # while torch is imported: later, commands answer themselves
        print(f"\nkhot {' '.join(sys.argv[1:2])}: interrupted.", file=sys.stderr)
        sys.exit(130)


def _run() -> None:
    first, *more = sys.argv[1:] or ["--help"]
    answer(first)
    if (count := os.environ.get("WORLD_SIZE", "1")) != "1" and first not in ("sae", "info"):
        if os.environ.get("RANK", "0") == "0":
            print(f"khot {first}: it runs on one process; torchrun started {count}. Leave it out.", file=sys.stderr)
        sys.exit(2)
    if first == "info" and not more:
        from khot.cli import info

        info()
    elif first == "tour" and more in ([], ["--no-open"]):
        from khot.cli import show_explorer

        show_explorer(is_opened=not more)
    else:
        if first != "bench":  # which measures what a program of yours would see
            os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # threads that wait leave the cores to others
        if has_terminal := sys.stderr.isatty():
            print("loading torch …", end="\r", file=sys.stderr, flush=True)
        from khot.cli import run

        if has_terminal:
            print("\033[K", end="", file=sys.stderr, flush=True)
        run(COMMANDS[first][0] or "cli")
