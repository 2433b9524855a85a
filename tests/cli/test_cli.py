import subprocess
import sys

import pytest
from typer.testing import CliRunner

import khot
from khot.cli._app import app


def test_info_says_which_kernels_run_and_why():
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert f"cpu: {khot.kernels.status()['cpu']}" in result.output


@pytest.mark.slow
def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "khot", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"khot {khot.__version__}\n"


@pytest.mark.slow
def test_missing_extra_is_named():
    code = "import sys; sys.modules['typer'] = None; import khot.cli; khot.cli.main()"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.strip() == "The command line needs typer: install it with pip install 'khot[cli]'."
