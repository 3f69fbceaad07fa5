"""The optional packages: what each extra of ``pip install 'latentry[...]'`` brings.

The core installation serves caches. Encoding needs image and video libraries, and real models need diffusers and
transformers. A part that needs an extra calls ``require_extra`` before its imports, so that a missing package
becomes one line with the install command instead of a traceback. Nothing is imported to find out.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

from latentry.errors import MissingPackageError

EXTRAS: dict[str, tuple[str, ...]] = {
    "encode": ("av", "PIL", "simplejpeg", "rich"),
    "formats": ("pillow_heif", "pillow_jxl"),
    "scenes": ("scenedetect",),
    "models": ("diffusers", "transformers", "accelerate", "sentencepiece", "ftfy"),
}
"""Extra to the import names of its packages."""


def missing_packages(extra: str, packages: Sequence[str] | None = None) -> list[str]:
    """The packages of an extra that are not installed, by their import names.

    Args:
        extra: A key of ``EXTRAS``.
        packages: Check only these packages of the extra; None for all of them.
    """
    return [package for package in packages or EXTRAS[extra] if find_spec(package) is None]


def require_extra(extra: str, packages: Sequence[str] | None = None) -> None:
    """Raise a ``MissingPackageError`` if packages of an extra are not installed.

    >>> require_extra("encode")
    MissingPackageError: this needs av, simplejpeg; install them with: pip install 'latentry[encode]'

    Args:
        extra: A key of ``EXTRAS``.
        packages: Require only these packages of the extra; None for all of them.
    """
    missing = missing_packages(extra, packages)
    if missing:
        pronoun = "it" if len(missing) == 1 else "them"
        raise MissingPackageError(
            f"this needs {', '.join(missing)}; install {pronoun} with: pip install 'latentry[{extra}]'"
        )
