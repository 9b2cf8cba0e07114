"""The error of recordings that cannot be used: files of requests, and Prometheus servers."""


class HistoryError(ValueError):
    """The recording cannot be used; one line with file, line, value and remedy."""
