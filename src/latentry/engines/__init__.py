"""Who runs tasks. An engine calls the same task function on each device and passes on what it reports."""
