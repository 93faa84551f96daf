"""What all command lines of the project share: exit codes.

    0  done        3  bad input, options included (argparse alone would say 2, which `reference.verify` uses for "not comparable")
    130 interrupted; 141 the reader of a pipe left, as a shell reports it
Tests: tests/test_command.py
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from typing import NoReturn

BAD_INPUT, INTERRUPTED, BROKEN_PIPE = 3, 130, 141


class Parser(argparse.ArgumentParser):
    """Exits with 3 for options that cannot be used; no abbreviations, so that new options break no script."""

    def __init__(self, *arguments, **options) -> None:
        super().__init__(*arguments, allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}. See --help.\n")


def run(command: Callable[[], int]) -> int:
    """command() with ValueError, interrupts and broken pipes turned into one line and an exit code.

    A terminal whose encoding lacks a character shows it as \\uXXXX, instead of ending the command when all is computed.
    """
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    try:
        code = command()
        sys.stdout.flush()
        return code
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return BAD_INPUT
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the interpreter would complain once more at its end
        return BROKEN_PIPE
    except OSError as error:
        print(f"error: the system refused: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return INTERRUPTED
