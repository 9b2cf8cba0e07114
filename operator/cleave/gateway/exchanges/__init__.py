"""The life of a completion request, from its pick to the last byte of its answer."""
