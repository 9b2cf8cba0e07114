"""Sends the requests of a file, which fill idle capacity, and writes the answers to files."""
