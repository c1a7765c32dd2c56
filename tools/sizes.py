"""Warn of files, functions and loops that are longer than a reader likes, and print the size of the source.

Called by CI. It never fails: a reader decides what to cut. Needs nothing but the standard library.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

SOURCE = Path("src/rolemesh")
FILE_LINES = 400
FUNCTION_LINES = 60
LOOP_LINES = 100


def length(node: ast.stmt) -> int:
    """Lines from the first to the last of a statement, decorators aside."""
    return (node.end_lineno or node.lineno) - node.lineno + 1


def functions(tree: ast.Module) -> list[ast.FunctionDef | ast.AsyncFunctionDef]:
    """All functions of a file, nested ones and methods included."""
    return [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]


def too_long(path: Path, text: str, tree: ast.Module) -> Iterator[str]:
    """A line for each thing of a file that is above its limit."""
    lines = text.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines, more than {FILE_LINES}"
    for function in functions(tree):
        if length(function) > FUNCTION_LINES:
            yield f"{path}:{function.lineno}: function {function.name} has {length(function)} lines, more than {FUNCTION_LINES}"
    for node in ast.walk(tree):
        if isinstance(node, ast.For | ast.While | ast.AsyncFor) and length(node) > LOOP_LINES:
            yield f"{path}:{node.lineno}: loop of {length(node)} lines, more than {LOOP_LINES}"


def main(source: Path = SOURCE) -> None:
    """Print warnings, then one line of totals."""
    paths = sorted(source.rglob("*.py"))
    total, lengths = 0, []
    for path in paths:
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        total += text.count("\n")
        lengths += [length(function) for function in functions(tree)]
        for warning in too_long(path, text, tree):
            print(f"warning: {warning}")
    lengths.sort()
    median, high = (lengths[int(len(lengths) * part)] for part in (0.5, 0.95)) if lengths else (0, 0)
    print(f"source: {total} lines in {len(paths)} files, {len(lengths)} functions (median {median} lines, 95th percentile {high})")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
