"""Wraps comments and docstrings that have grown over the line's length. wrap.py ROOT"""

import ast
import json
import re
import subprocess
import sys
import textwrap
from pathlib import Path

WIDTH = 100


def spans(text):
    out = []
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        if isinstance(body, list):
            for stmt in body:
                if isinstance(stmt, ast.Expr) and isinstance(stmt.value, ast.Constant) and isinstance(stmt.value.value, str):
                    out.append((stmt.lineno, stmt.end_lineno))
    return out


def wrap_docstring(lines, first, last, row):
    """Re-flows the paragraph of line `row` (1-based) of the docstring first..last; True if done."""
    indent = re.match(r" *", lines[first - 1]).group()

    def is_break(i):
        body = lines[i - 1].strip()
        if not body or body == '"""':
            return True
        lead = re.match(r" *", lines[i - 1]).group()
        return lead != indent or re.match(r"(-|\*|\d+\.|\|)\s", body) is not None

    a = row
    while a > first and not is_break(a) and not is_break(a - 1):
        a -= 1
    b = row
    while b < last and not is_break(b + 1):
        b += 1
    if is_break(row):
        body = lines[row - 1]
        lead = re.match(r" *((-|\*|\d+\.)\s+)?", body).group()
        new = textwrap.wrap(body.strip(), WIDTH, initial_indent=re.match(r" *", body).group(), subsequent_indent=" " * len(lead), break_long_words=False, break_on_hyphens=False)
        lines[row - 1 : row] = new
        return True
    chunk = [l.strip() for l in lines[a - 1 : b]]
    text = " ".join(chunk)
    closes = text.endswith('"""') and not text == '"""' and b == last
    if closes:
        text = text[:-3].rstrip()
    new = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
    if closes:
        if len(new) == 1 and len(new[0]) + 3 <= WIDTH:
            new[0] += '"""'
        else:
            new.append(indent + '"""')
    lines[a - 1 : b] = new
    return True


def wrap_comment(lines, row):
    line = lines[row - 1]
    m = re.match(r"( *)# ?", line)
    if not m:
        return False
    indent = m.group(1)

    def ok(i):
        k = re.match(r"( *)# (?!noqa|type:|mypy:|ruff:|!)\S", lines[i - 1]) if 0 < i <= len(lines) else None
        return bool(k) and k.group(1) == indent

    if not ok(row):
        return False
    b = row
    while ok(b + 1):
        b += 1
    text = " ".join(l.strip()[1:].strip() for l in lines[row - 1 : b])
    lines[row - 1 : b] = textwrap.wrap(text, WIDTH, initial_indent=f"{indent}# ", subsequent_indent=f"{indent}# ", break_long_words=False, break_on_hyphens=False)
    return True


def wrap(root: Path) -> None:
    ruff = str(root / ".venv" / "bin" / "ruff")
    left = set()
    for _ in range(12):
        done = subprocess.run(
            [ruff, "check", "--select", "E501", "--output-format", "json", "."], cwd=root, capture_output=True, text=True
        )
        worst = {}
        for hit in json.loads(done.stdout or "[]"):
            key = (hit["filename"], hit["location"]["row"])
            if key not in left:
                worst.setdefault(hit["filename"], hit["location"]["row"])
        if not worst:
            break
        for name, row in worst.items():
            path = Path(name)
            text = path.read_text()
            lines = text.splitlines()
            inside = [s for s in spans(text) if s[0] <= row <= s[1]]
            done_ = False
            if inside:
                done_ = wrap_docstring(lines, *inside[-1], row)
            elif lines[row - 1].lstrip().startswith("#"):
                done_ = wrap_comment(lines, row)
            new = "\n".join(lines) + "\n"
            try:
                ast.parse(new)
            except SyntaxError:
                done_ = False
            if done_ and new != text:
                path.write_text(new)
            else:
                left.add((name, row))
    for name, row in sorted(left):
        print(f"too long: {name}:{row}")


if __name__ == "__main__":
    wrap(Path(sys.argv[1]).resolve())
