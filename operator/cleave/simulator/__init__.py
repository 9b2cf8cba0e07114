"""A discrete-event simulation of instances and fleets, compiled."""
