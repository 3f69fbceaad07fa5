"""The ``latentry`` command: parse the arguments, call one function, print its result.

The exit status is 0 for success, 1 for an error, 2 if some inputs failed, 130 after Ctrl-C or SIGTERM.
"""

from __future__ import annotations

import signal
import sys
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

from latentry.cli.commands import run_command
from latentry.errors import LatentryError


def main(arguments: Sequence[str] | None = None, prog: str = "latentry", *, whole_clips: bool = False) -> int:
    """Run a command and return its exit status: ``main(["processors"])``.

    Args:
        arguments: The command and its arguments; those of this process if None.
        prog: The name of the program in help texts and error messages.
        whole_clips: Spread the frames of a clip over the whole file where ``--windows`` is not given, as NeMo
            AutoModel's command does.
    """
    with _stop_at_sigterm(), warnings.catch_warnings():
        # Pillow warns about odd image headers. They do not change the pixels.
        warnings.filterwarnings("ignore", module="PIL")
        try:
            return run_command(arguments, prog, whole_clips=whole_clips)
        except LatentryError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            return 1
        except KeyboardInterrupt:
            message = "stopped: finished work is kept; rerun the same command to resume"
            print(f"\n{prog}: {message}", file=sys.stderr)
            return 130


@contextmanager
def _stop_at_sigterm() -> Iterator[None]:
    """Treat SIGTERM like Ctrl-C inside the block. Python allows signal handlers in the main thread only.

    SIGINT needs no handler: Python raises KeyboardInterrupt, unless the process was started with SIGINT
    ignored (``command &`` in a script, ``nohup``). Then it stays ignored, and SIGTERM stops the command.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL if previous is None else previous)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
