"""A fleet under load and under random faults, and what must hold all the while."""
