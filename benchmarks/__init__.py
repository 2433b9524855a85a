"""What supports the sentences of docs/: studies, rivals, tables and figures. Never installed.

Each script runs as `python benchmarks/NAME.py` in an editable install, or `python -m benchmarks.NAME` from the
repository's root, and takes `--quick`, `--json` and `--out DIR`; see `common`. The Makefile has a target for each page.
"""
