"""Who runs tasks. An engine does nothing but call the same task function and pass on what it reports."""
