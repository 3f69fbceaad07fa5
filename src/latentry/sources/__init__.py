"""Where media come from. A source lists files by a name that stays the same when the folder is moved."""
