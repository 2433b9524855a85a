import inspect
import subprocess
import sys

import pytest
import torch
from typer.testing import CliRunner

import khot
import khot_cli
from khot.cli import _show
from khot.cli._app import app


def test_info_says_which_kernels_run_and_why():
    result = CliRunner().invoke(app, ["info"])
    assert result.exit_code == 0
    assert f"cpu: {khot.kernels.status()['cpu']}" in result.output


def khot_command(words, *missing, before=""):
    """Run the command `khot` in a process of its own, without some packages."""
    lines = ["import sys", f"sys.argv = {['khot', *words]!r}", f"sys.modules.update(dict.fromkeys({missing!r}))"]
    code = "\n".join([*lines, before, "import khot_cli", "khot_cli.main()"])
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


EXTRAS = ("typer", "rich", "sklearn", "polars", "matplotlib", "safetensors", "safetensors.torch", "click")
SAY_TORCH = "import atexit; atexit.register(lambda: print('torch' in sys.modules))"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "says"), [([], "Usage: khot"), (["--help"], "select   "), (["--version"], "khot 0.")]
)
def test_help_and_version_need_neither_an_extra_nor_torch(words, says):
    done = khot_command(words, *EXTRAS, before=SAY_TORCH)
    assert (done.returncode, done.stderr) == (0, "")
    assert says in done.stdout
    assert done.stdout.endswith("\nFalse\n")
    assert max(map(len, done.stdout.splitlines())) <= 80


@pytest.mark.slow
def test_ctrl_c_while_torch_is_imported_is_no_traceback():
    finder = "class Finder:\n  def find_spec(name, *_):\n    if name == 'torch': raise KeyboardInterrupt"
    done = khot_command(["sae", "x.npy"], before=f"{finder}\nsys.meta_path.insert(0, Finder)")
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr == "\nkhot sae: interrupted.\n"


@pytest.mark.slow
def test_a_typing_error_is_told_without_torch():
    done = khot_command(["selct"], *EXTRAS, before=SAY_TORCH)
    assert (done.returncode, done.stdout) == (2, "False\n")
    assert done.stderr == "khot: there is no command 'selct': did you mean select?\n"


@pytest.mark.slow
def test_info_needs_no_extra():
    done = khot_command(["info"], *EXTRAS)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith(f"khot {khot.__version__}, torch {torch.__version__}")
    assert f"cpu: {khot.kernels.status()['cpu']}" in done.stdout


def khot_module(*words):
    """Run `python -m khot`; Python then says on stderr which modules it imported."""
    command = [sys.executable, "-X", "importtime", "-m", "khot", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
    return done, imported


@pytest.mark.slow
def test_module_is_the_command():
    done = subprocess.run([sys.executable, "-m", "khot", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"khot {khot.__version__}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("words", "code"), [((), 0), (("--help",), 0), (("--version",), 0), (("selct",), 2)])
def test_module_answers_without_torch_as_the_command_does(words, code):
    done, imported = khot_module(*words)
    assert done.returncode == code
    assert done.stdout == khot_command(words).stdout
    assert "khot_cli" in imported
    assert "torch" not in imported


@pytest.mark.long
@pytest.mark.slow
def test_module_runs_commands():
    done, imported = khot_module("info")
    assert done.returncode == 0
    assert done.stdout == khot_command(["info"]).stdout
    assert "torch" in imported  # the negative control of the test above


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "missing", "package", "extra"),
    [
        (["bench"], "typer", "typer", "cli"),
        (["select"], "sklearn", "scikit-learn", "select"),
        (["select"], "polars", "polars", "select"),
        (["sae", "nosuch.npz"], "safetensors", "safetensors", "sae"),
        (["sae", "nosuch.npz"], "typer", "typer", "sae"),
    ],
)
@pytest.mark.long
def test_a_missing_extra_is_named_before_any_work(words, missing, package, extra):
    done = khot_command(words, missing)
    assert done.returncode in (1, 2)
    assert done.stdout == ""
    assert done.stderr.endswith(f"{package} is missing: run pip install '.[{extra}]' in a clone of khot.\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.slow
@pytest.mark.parametrize("command", [name for name in khot_cli.COMMANDS if name != "info"])
@pytest.mark.parametrize("width", [50, 80])
def test_help_keeps_brackets_and_joins_lines(command, width):
    """Rich used to take `[plot]` for markup, and kept the line breaks of the source."""
    done = CliRunner().invoke(app, [command, "--help"], terminal_width=width)
    assert done.exit_code == 0
    source = inspect.getdoc({c.callback.__name__: c.callback for c in app.registered_commands}[command])
    for paragraph in source.split("\n\n"):
        assert "".join(paragraph.split()) in "".join(done.output.split())
    text = done.output.partition("\nArguments:")[0].partition("\nOptions:")[0]
    assert max(map(len, text.splitlines())) <= width


def test_printed_text_keeps_brackets(capsys):
    _show.console().print("pip install '.[plot]'")
    _show.console().print(_show.table(["[a]", "b"], [["[bold]x", "[/]"]]))
    printed = capsys.readouterr().out
    for text in ("'.[plot]'", "[a]", "[bold]x", "[/]"):
        assert text in printed


@pytest.mark.parametrize(("command", "default"), [("select", "10"), ("sae", "32"), ("bench", "8")])
def test_k_is_spelt_both_ways_everywhere(command, default):
    text = " ".join(CliRunner().invoke(app, [command, "--help"]).output.split())
    assert "-k, --k " in text
    assert f"[default: {default}" in text
