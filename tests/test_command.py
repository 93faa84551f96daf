"""Exit codes that every command line shares, seen from a shell."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from inference.command import Parser, run

ROOT = Path(__file__).parent.parent


def test_errors_become_codes(capsys) -> None:
    def fail(error: BaseException):
        def command() -> int:
            raise error
        return command

    assert run(lambda: 7) == 7
    assert run(fail(ValueError("what was wanted"))) == 3
    assert "error: what was wanted" in capsys.readouterr().err
    assert run(fail(KeyboardInterrupt())) == 130
    assert run(fail(OSError("disk full"))) == 3


def test_unusable_options_are_bad_input(capsys) -> None:
    parser = Parser(prog="tool")
    parser.add_argument("--number", type=int)
    for arguments in (["--number", "x"], ["--num", "1"], ["extra"]):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(arguments)
        assert stop.value.code == 3
    assert "tool: " in capsys.readouterr().err


@pytest.mark.parametrize("module", ["inference.checkpoint", "reference.verify"])
def test_missing_arguments(module) -> None:
    done = subprocess.run([sys.executable, "-m", module], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 3 and "Traceback" not in done.stderr


def test_a_closed_pipe_is_no_error() -> None:
    command = f"{sys.executable} -m inference.checkpoint reference/golden/nano/checkpoint | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() in ("0", "141") and "Traceback" not in done.stderr


def test_a_terminal_without_the_characters_gets_escapes() -> None:
    code = "import sys; from inference.command import run; sys.exit(run(lambda: print('a\\uff5cb') or 0))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, cwd=ROOT,
                          env={**os.environ, "PYTHONIOENCODING": "ascii", "PYTHONUTF8": "0"})
    assert (done.returncode, done.stdout) == (0, b"a\\uff5cb\n")
