"""Stub."""


def draw(file, results):
    pass
