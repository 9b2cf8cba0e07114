"""What processes share beside contracts: load page, core locks, the form of log lines."""
