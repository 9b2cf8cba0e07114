"""Replacements in a text by offset."""


class Edits:
    def __init__(self, text: str) -> None:
        self.text = text
        self.all: dict[tuple[int, int], str] = {}

    def add(self, start: int, end: int, new: str) -> None:
        if self.text[start:end] != new:
            self.all[start, end] = new

    def overlaps(self, start: int, end: int) -> bool:
        return any(s < end and start < e for s, e in self.all)

    def apply(self) -> str:
        out, at = [], 0
        for (start, end), new in sorted(self.all.items()):
            if start < at:
                continue
            out += [self.text[at:start], new]
            at = end
        return "".join(out) + self.text[at:]
