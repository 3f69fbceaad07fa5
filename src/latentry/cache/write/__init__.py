"""Making a cache: the files of a task, the commits of a run, and publishing the result."""
