"""Finding and naming a model in the diffusers layout, without loading it."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from latentry.errors import ModelError

_SAMPLED_BLOCKS = 64
_BLOCK_BYTES = 1 << 16
_INSTALL = "pip install 'latentry[models]'"


def require_packages(*packages: str) -> None:
    """An error with the install command, if one of these packages is missing."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise ModelError(f"this processor needs {', '.join(missing)}; install with: {_INSTALL}")


def model_folder(model_name: str, components: tuple[str, ...]) -> Path:
    """The folder that holds these components: the name itself if it is one, else a download from the hub."""
    folder = Path(model_name).expanduser()
    if not folder.is_dir():
        folder = _from_hub(model_name, components)
    missing = [name for name in components if not (folder / name).is_dir()]
    if missing:
        raise ModelError(
            f"{folder} has no folder {', '.join(missing)}; a model in the diffusers layout has "
            f"{', '.join(components)} beside its model_index.json"
        )
    return folder


def _from_hub(model_name: str, components: tuple[str, ...]) -> Path:
    require_packages("huggingface_hub")
    from huggingface_hub import snapshot_download

    try:
        patterns = ["model_index.json", *(f"{component}/*" for component in components)]
        return Path(snapshot_download(model_name, allow_patterns=patterns))
    except Exception as error:  # the hub's client raises a family of its own, and whatever its transport does
        reason = str(error).strip().partition("\n")[0]
        raise ModelError(
            f"model {model_name!r} is neither a folder here nor could it be fetched from the hub "
            f"({type(error).__name__}: {reason}); download it first and pass its folder as --model_name"
        ) from None


def folder_identity(folder: Path, components: tuple[str, ...]) -> str:
    """A digest of the components: small files whole, weights by size and sixty-four samples of their bytes.

    Reading some megabytes tells two checkpoints apart as surely as reading all their gigabytes.
    """
    digest = hashlib.blake2b(digest_size=16)
    for component in components:
        for path in sorted(p for p in (folder / component).rglob("*") if p.is_file()):
            size = path.stat().st_size
            digest.update(f"{path.relative_to(folder).as_posix()} {size}\n".encode())
            with open(path, "rb") as file:
                if size <= _SAMPLED_BLOCKS * _BLOCK_BYTES:
                    digest.update(file.read())
                    continue
                for i in range(_SAMPLED_BLOCKS):
                    file.seek((size - _BLOCK_BYTES) * i // (_SAMPLED_BLOCKS - 1))
                    digest.update(file.read(_BLOCK_BYTES))
    return digest.hexdigest()
