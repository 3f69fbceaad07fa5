"""Every public function, class and method documents every parameter."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import textwrap
from collections.abc import Callable
from typing import Any

import pytest

import latentry
import latentry.testing

EXPORTS = [f"latentry.{name}" for name in latentry.__all__]
EXPORTS += [f"latentry.testing.{name}" for name in latentry.testing.__all__]


def found(name: str) -> Any:
    module = latentry.testing if name.startswith("latentry.testing.") else latentry
    return getattr(module, name.rpartition(".")[2])


def documented_arguments(docstring: str | None) -> set[str]:
    """The names under ``Args:`` in a Google-style docstring."""
    section = re.search(r"^Args:\n((?:[ \t]+.*\n?|\n)+)", inspect.cleandoc(docstring or ""), re.MULTILINE)
    return (
        set(re.findall(r"^    \*{0,2}(\w+)(?: \([^)]*\))?:", section[1], re.MULTILINE)) if section else set()
    )


def parameters(function: Callable[..., Any]) -> set[str]:
    return set(inspect.signature(function).parameters) - {"self", "cls"}


def undocumented_fields(record: type) -> list[str]:
    """Fields of a dataclass that have no docstring under them."""
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(record))).body
    assert isinstance(definition, ast.ClassDef)
    missing = []
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            is_docstring = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            missing += [] if is_docstring else [statement.target.id]
    return missing


def undocumented(thing: Any) -> list[str]:
    """What a function or class does not document: itself, or names of parameters and fields."""
    missing = [] if inspect.getdoc(thing) else ["(no docstring)"]
    if not inspect.isclass(thing):
        return [*missing, *sorted(parameters(thing) - documented_arguments(thing.__doc__))]
    if dataclasses.is_dataclass(thing):
        missing += undocumented_fields(thing)
    elif "__init__" in vars(thing):
        documented = documented_arguments(thing.__doc__) | documented_arguments(thing.__init__.__doc__)
        missing += sorted(parameters(thing) - documented)
    for name in vars(thing):
        method = getattr(thing, name)
        if not name.startswith("_") and inspect.isroutine(method):
            docstring = inspect.getdoc(method)  # an overriding method may inherit it
            missing += [] if docstring else [f"{name} (no docstring)"]
            missing += sorted(f"{name}({p})" for p in parameters(method) - documented_arguments(docstring))
    return missing


@pytest.mark.parametrize("name", EXPORTS)
def test_every_parameter_is_documented(name):
    assert undocumented(found(name)) == []


def test_what_counts_as_documented():
    def function(first, second=None, *rest):
        """Do something.

        Args:
            first: What it is.
            second (int): What it is,
                with: a colon in the next line.
        """

    assert undocumented(function) == ["rest"]
    assert undocumented(lambda argument: None) == ["(no docstring)", "argument"]

    class Thing:
        """A thing.

        Args:
            size: How large.
        """

        def __init__(self, size): ...

        def method(self, factor):
            """Do something with a factor."""

    assert undocumented(Thing) == ["method(factor)"]

    @dataclasses.dataclass
    class Record:
        """A record."""

        first: int
        """What it is."""
        second: int

    assert undocumented(Record) == ["second"]
