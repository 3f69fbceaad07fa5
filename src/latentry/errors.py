"""Every exception that Latentry raises on purpose. Catch ``LatentryError`` to catch them all.

A message is one line: what is wrong, where, and what to do. Where Python has a built-in class for the same
situation, ours inherits from it too, so code that catches the built-in class keeps working.

    LatentryError
    ├── ConfigError (ValueError)                     an argument, flag or YAML field has an invalid value
    │   └── NoSuchBucketError (IndexError)           there is no bucket with this id
    ├── StateError (ValueError)                      a sampler or loader state is malformed or does not match
    ├── MediaError (ValueError)                      an image or video cannot be read
    │   └── UnsuitableMediaError                     it is whole, but the options leave it out
    ├── ModelError                                   a model's files are missing or unusable
    ├── MissingPackageError (ImportError)            an optional package is not installed
    ├── RunError                                     a run cannot start or continue
    │   └── TooManyFailuresError                     too many inputs in a row failed
    └── CacheError                                   the files on disk are not a valid cache
        ├── CacheNotFoundError (FileNotFoundError)   there is no cache, or one of its files is missing
        ├── MetadataError (ValueError)               metadata.json or a metadata shard is invalid
        └── CacheFileError (ValueError)              a cache file is truncated, unsafe or has the wrong shape
"""


class LatentryError(Exception):
    """The base class of all errors that Latentry raises on purpose."""


class ConfigError(LatentryError, ValueError):
    """An argument, flag or configuration field has an invalid value."""


class NoSuchBucketError(ConfigError, IndexError):
    """There is no bucket with this id."""


class StateError(LatentryError, ValueError):
    """A saved state is malformed, or belongs to another dataset or another order."""


class MediaError(LatentryError, ValueError):
    """An image or video cannot be read.

    The message is a predicate whose subject is the file name, such as ``has no video stream``: whoever reports
    it puts the name in front.
    """


class UnsuitableMediaError(MediaError):
    """An image or video is not damaged, but the chosen options or the installed packages leave it out."""


class ModelError(LatentryError):
    """A model's files are missing or unusable, or a package that loads them is not installed."""


class MissingPackageError(LatentryError, ImportError):
    """A package that is not part of the core installation is needed. The message has the install command."""


class RunError(LatentryError):
    """A run cannot start or continue: another run is active, the recipe differs, or a write fails."""


class TooManyFailuresError(RunError):
    """So many inputs in a row failed that the cause is probably not in the files."""


class CacheError(LatentryError):
    """The files on disk are not a valid cache."""


class CacheNotFoundError(CacheError, FileNotFoundError):
    """There is no cache here, or one of its files is missing."""


class MetadataError(CacheError, ValueError):
    """``metadata.json`` or a metadata shard is invalid."""


class CacheFileError(CacheError, ValueError):
    """A cache file is truncated, unsafe to load, or does not have the shape that its row states."""
