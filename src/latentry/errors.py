"""Every exception Latentry raises on purpose, so that one ``except`` clause can catch them all.

A message is one line: what is wrong, where, and what to do. Where Python has a class for the
same situation, ours is also that class, so code written against plain exceptions keeps working.

    LatentryError
    ├── ConfigError (ValueError)              an argument, flag or YAML field that cannot be right
    ├── StateError (ValueError)               a sampler or loader state that does not fit
    ├── MediaError (ValueError)               a picture or clip that cannot be read
    ├── ModelError                            a model's files are missing, or a package to load them
    ├── RunError                              a run cannot begin or go on
    └── CacheError                            something on disk is not as a cache should be
        ├── CacheNotFoundError (FileNotFoundError)   no cache, or a file of it is absent
        ├── MetadataError (ValueError)        metadata.json or one of its shards is broken
        └── CacheFileError (ValueError)       one cache file is truncated, unsafe or misshapen
"""


class LatentryError(Exception):
    """The root of all errors that Latentry raises on purpose."""


class ConfigError(LatentryError, ValueError):
    """An argument, flag or configuration field has a value that cannot be right."""


class StateError(LatentryError, ValueError):
    """A saved state is malformed, or belongs to another dataset or another order."""


class MediaError(LatentryError, ValueError):
    """A picture or clip cannot be read; the message begins where its name ends."""


class ModelError(LatentryError):
    """A model's files are missing or unusable, or an optional package to load them is not installed."""


class RunError(LatentryError):
    """A run cannot begin or go on: another one is under way, the recipe differs, the disk refuses."""


class CacheError(LatentryError):
    """Something on disk is not as a cache should be."""


class CacheNotFoundError(CacheError, FileNotFoundError):
    """There is no cache here, or one of its files is absent."""


class MetadataError(CacheError, ValueError):
    """``metadata.json`` or one of its shards is broken."""


class CacheFileError(CacheError, ValueError):
    """One cache file is truncated, unsafe to load, or not of the shape its row promises."""
