"""Completion scripts for shells, generated from the parser by shtab."""

from __future__ import annotations

from latentry.cli.arguments import build_parser, subparsers
from latentry.cli.flags.encoding import PROCESSORS_OF


def completion_script(shell: str) -> str:
    """The script that completes ``latentry`` in a shell.

    Args:
        shell: ``bash``, ``zsh`` or ``fish``.
    """
    import shtab

    parser = build_parser()
    for command, each in subparsers(parser).items():
        for action in each._actions:
            if action.metavar == "DIR" or action.dest == "cache_dir":
                action.complete = shtab.DIRECTORY  # type: ignore[attr-defined]
            elif action.dest == "processor":
                action.choices = PROCESSORS_OF[command]
    return str(shtab.complete(parser, shell))
