"""Which graph breaks come from pytest's assert rewriting and not from the code itself."""

from __future__ import annotations

import ast
import functools


@functools.lru_cache(maxsize=64)
def _tree(file: str) -> ast.Module:
    try:
        with open(file, "rb") as source:
            return ast.parse(source.read())
    except (OSError, SyntaxError, ValueError):
        return ast.Module([], [])


def is_plain_assert(file: str, line: int) -> bool:
    """Whether ``line`` belongs to an assert that Dynamo would compile if pytest had left it alone.

    Dynamo turns ``assert tensor`` and ``assert tensor, "constant"`` into one operation. It does not
    where the condition branches by itself, or where the message is computed. Where the assert shares
    its lines with other code, that may be what broke. In doubt: False.
    """
    tree = _tree(file)
    for node in ast.walk(tree):
        if isinstance(node, ast.Assert) and _overlaps(node, line, line):
            return (
                _is_constant(node.msg)
                and not any(_branches(part) for part in ast.walk(node.test))
                and _stands_alone(node, tree)
            )
    return False


def _overlaps(node: ast.stmt | ast.expr, first: int, last: int) -> bool:
    return node.lineno <= last and first <= (node.end_lineno or node.lineno)


def _stands_alone(assertion: ast.Assert, tree: ast.Module) -> bool:
    """Whether nothing but the assert is on its lines."""
    own = set(ast.walk(assertion))
    for node in ast.walk(tree):
        if node in own or not isinstance(node, (ast.stmt, ast.expr)):
            continue
        if _overlaps(node, assertion.lineno, assertion.end_lineno or assertion.lineno) and not any(
            inner is assertion for inner in ast.walk(node)
        ):
            return False
    return True


def _is_constant(message: ast.expr | None) -> bool:
    return message is None or isinstance(message, ast.Constant)


def _branches(node: ast.AST) -> bool:
    if isinstance(node, ast.Compare):
        return len(node.ops) > 1 or isinstance(node.ops[0], (ast.In, ast.NotIn))
    if isinstance(node, ast.UnaryOp):
        return isinstance(node.op, ast.Not)
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in ("bool", "any", "all")
    return isinstance(node, (ast.BoolOp, ast.IfExp, ast.comprehension, ast.Lambda))
