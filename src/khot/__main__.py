"""`python -m khot` is the command `khot`."""

from khot_cli import main

main()
