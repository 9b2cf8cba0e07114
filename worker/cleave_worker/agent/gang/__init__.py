"""The common life of the data-parallel ranks of one instance."""
