"""State shared between processes: load page, core locks, tables of numbers; and log formats."""
