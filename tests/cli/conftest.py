"""What the tests of several commands share."""

import pytest
from select_tables import write_table


@pytest.fixture
def table(tmp_path):
    return write_table(tmp_path / "table.csv")
