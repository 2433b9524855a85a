"""The benchmark behind `khot bench`: contenders, an interleaved measurement, and reports as strings and tables.

Nothing here prints. `measure(CONTENDERS, Settings(shape=(4096, 64), k=8))` gives a `Report`; `records`, `to_csv`,
`to_json`, `to_markdown` and `to_table` show it. Add your own function to the mapping as a `Contender`.
"""

from ._contenders import BASELINE, CONTENDERS, Contender, Limit, eager
from ._measure import Report, Result, Settings, Timing, environment, measure, peak_memory, threads
from ._report import COLUMNS, WIDE, conclusion, markdown_table, records, to_csv, to_json, to_markdown, to_table

__all__ = ["BASELINE", "COLUMNS", "CONTENDERS", "WIDE", "Contender", "Limit", "Report", "Result", "Settings", "Timing"]
__all__ += ["conclusion", "eager", "environment", "markdown_table", "measure", "peak_memory", "records", "threads"]
__all__ += ["to_csv", "to_json", "to_markdown", "to_table"]
