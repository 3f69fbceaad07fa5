"""Models in the diffusers layout: finding them on this machine or on the hub, identifying them, and loading them."""

from __future__ import annotations

import hashlib
import importlib.util
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from latentry.errors import ModelError
from latentry.storage import content_digest

_INSTALL = "pip install 'latentry[models]'"


def require_packages(*packages: str) -> None:
    """Raise an error that names the install command if one of these packages is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"this processor needs {', '.join(missing)}; install with: {_INSTALL}")


def model_folder(
    model_name: str, components: tuple[str, ...], optional: tuple[str, ...] = (), *, download: bool = True
) -> Path:
    """The folder that holds these components: ``model_name`` if it is a folder, else a download from the hub.

    Args:
        model_name: A folder or a hub name.
        components: The folders that the model must have.
        optional: Folders that it may have.
        download: Ask the hub. Otherwise only what was downloaded before is used.
    """
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        folder = _from_hub(model_name, components + optional, download=download)
    missing = [name for name in components if not (folder / name).is_dir()]
    if missing:
        raise ModelError(
            f"{folder} has no folder {', '.join(missing)}; a model in the diffusers layout has "
            f"{', '.join(components)} beside its model_index.json"
        )
    return folder


def _from_hub(model_name: str, components: tuple[str, ...], *, download: bool) -> Path:
    require_packages("huggingface_hub")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["model_index.json", *(f"{component}/*" for component in components)]
        return Path(snapshot_download(model_name, allow_patterns=patterns, local_files_only=not download))
    except Exception as error:  # the client raises its own classes and those of its HTTP library
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model {model_name!r} is not a folder, and it could not be downloaded from the hub "
            f"({type(error).__name__}: {reason}); download it first, and give its folder instead"
        ) from None


def folder_identity(folder: Path, components: tuple[str, ...]) -> str:
    """A digest of the components' files."""
    digest = hashlib.blake2b(digest_size=16)
    for component in components:
        for path in sorted(p for p in (folder / component).rglob("*") if p.is_file()):
            digest.update(f"{path.relative_to(folder).as_posix()} {content_digest(path)}\n".encode())
    return digest.hexdigest()


@contextmanager
def loading(folder: Path) -> Iterator[None]:
    """Raise errors of the model libraries as one ``ModelError``, and hide their progress bars."""
    from diffusers.utils import logging as of_diffusers
    from transformers.utils import logging as of_transformers

    shown = [library for library in (of_diffusers, of_transformers) if library.is_progress_bar_enabled()]
    for library in shown:
        library.disable_progress_bar()
    try:
        yield
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(f"the model in {folder} cannot be loaded: {reason}") from None
    finally:
        for library in shown:
            library.enable_progress_bar()
