"""Which graph breaks come from pytest's assert rewriting and not from the code itself."""

from __future__ import annotations

import ast
import functools


@functools.lru_cache(maxsize=64)
def _asserts(file: str) -> tuple[ast.Assert, ...]:
    try:
        with open(file, "rb") as source:
            tree = ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return ()
    return tuple(node for node in ast.walk(tree) if isinstance(node, ast.Assert))


def is_plain_assert(file: str, line: int) -> bool:
    """Whether ``line`` belongs to an assert that Dynamo would compile if pytest had left it alone.

    Dynamo turns ``assert tensor`` and ``assert tensor, "constant"`` into one operation. It does not
    where the condition branches by itself, or where the message is computed. In doubt: False.
    """
    for node in _asserts(file):
        if node.lineno <= line <= (node.end_lineno or node.lineno):
            return _is_constant(node.msg) and not any(_branches(part) for part in ast.walk(node.test))
    return False


def _is_constant(message: ast.expr | None) -> bool:
    return message is None or isinstance(message, ast.Constant)


def _branches(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return len(node.ops) > 1
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    return isinstance(node, (ast.BoolOp, ast.IfExp, ast.comprehension, ast.Lambda))
