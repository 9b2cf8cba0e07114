"""A compiled discrete-event simulation of instances and fleets."""
