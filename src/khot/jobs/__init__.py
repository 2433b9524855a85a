"""The long jobs behind the command line: they read files, train, and build reports; they print nothing.

`khot.jobs.select` needs the extra `select`; `select_report` and `sae_report` make HTML of the results.
"""
