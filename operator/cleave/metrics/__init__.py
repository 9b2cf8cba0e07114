"""What processes share beside contracts: load page, core locks, tables of numbers, log lines."""
