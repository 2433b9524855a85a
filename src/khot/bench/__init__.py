"""The benchmark behind `khot bench`: contenders, an interleaved measurement, and reports as strings and tables.

Nothing here prints. `measure(CONTENDERS, Settings(shape=(4096, 64), k=8))` gives a `Report`; `records`, `to_csv`,
`to_json`, `to_markdown` and `to_table` show it. Add your own function to the mapping as a `Contender`.
"""

from ._contenders import BASELINE as BASELINE
from ._contenders import CONTENDERS as CONTENDERS
from ._contenders import Contender as Contender
from ._contenders import Limit as Limit
from ._contenders import eager as eager
from ._measure import Report as Report
from ._measure import Result as Result
from ._measure import Settings as Settings
from ._measure import Timing as Timing
from ._measure import measure as measure
from ._measure import peak_memory as peak_memory
from ._report import COLUMNS as COLUMNS
from ._report import WIDE as WIDE
from ._report import conclusion as conclusion
from ._report import environment as environment
from ._report import markdown_table as markdown_table
from ._report import records as records
from ._report import threads as threads
from ._report import to_csv as to_csv
from ._report import to_json as to_json
from ._report import to_markdown as to_markdown
from ._report import to_table as to_table
