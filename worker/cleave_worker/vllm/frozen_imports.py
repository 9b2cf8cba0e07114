"""Imports vLLM without garbage collection; used by the processes that an agent starts.

vLLM's modules are more than a million objects, and stay until the process ends. While they are
imported, garbage collection would look through all that are there, again and again, and find
nothing: without it an import takes 7.3 s of a core instead of 8.8 s. Afterwards it leaves them out,
also in the processes that are forked from this one.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def freeze_imports() -> Iterator[None]:
    """Leave what is imported in the block out of garbage collection, during the block and later."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
