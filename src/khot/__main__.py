"""`python -m khot` is the command `khot`."""

from .cli import main

main()
