from __future__ import annotations

import pytest

from pytest_dynamo.messages import StackFrame
from pytest_dynamo.messages import clean_guard
from pytest_dynamo.messages import is_backend_change
from pytest_dynamo.messages import parse_break
from pytest_dynamo.messages import parse_cudagraph_skip
from pytest_dynamo.messages import real_function


LINK = "https://meta-pytorch.github.io/compile-graph-break-site/gb"
STACK = """\
User code traceback:
  File "/p/test_a.py", line 20, in test_a
    torch.compile(f)(x)
  File "/p/a.py", line 5, in f
    x = helper(x)
        ^^^^^^^^^
  File "/p/a.py", line 3, in helper
    print("")
"""
OUTER, INNER = StackFrame("/p/a.py", 5, "f"), StackFrame("/p/a.py", 3, "helper")
ALL = (StackFrame("/p/test_a.py", 20, "test_a"), OUTER, INNER)

PRINT = f"""\
Failed to trace builtin operator
  Explanation: Dynamo does not know how to trace builtin operator `print` with argument types ['str']
  Hint: Avoid calling builtin `print` with argument types ['str'].
  Hint: Please report an issue to PyTorch.

  Developer debug context: builtin print [<class 'ConstantVariable'>] False

 For more details about this graph break, please visit: {LINK}/gb0059.html
"""
BRANCH = f"""\
Data-dependent branching
  Explanation: Detected data-dependent branching (e.g. `if my_tensor.sum() > 0:`). Dynamo does not support it.

      The branch condition involves a tensor computed as follows:
        # File "/p/a.py", line 99, in f, code: if x.sum() > 0:
        gt = gt(sum_1, 0)

  Hint: This graph break is fundamental - it is unlikely that Dynamo will ever be able to trace through your code.
  Hint: Use `torch.cond` to express dynamic control flow.

  Developer debug context: attempted to jump with TensorVariable()

 For more details about this graph break, please visit: {LINK}/gb0170.html
"""
IN_LOOP = f"""\
graph break in loop
  Explanation: torch.compile detected a graph break in a for/while loop. Skipping the frame and falling back to eager.
  Hint: This graph break may have been caused by an earlier graph break.

  Developer debug context: frame skipped: f (/p/a.py line 1)

 For more details about this graph break, please visit: {LINK}/gb7000.html
"""
BOTH = f"{PRINT}\n*** While handling this graph break, another graph break occurred: ***\n\n{IN_LOOP}"


# -- torch 2.10 and newer -------------------------------------------------------------------------


def test_a_break_of_a_call() -> None:
    """The kind of break, its number, the first hint of use, the place and the stack are found."""
    text = parse_break(
        "Graph break in user code at /p/a.py:3\n"
        "Graph Break Reason: Encountered graph break when attempting to trace CALL: a function call, e.g. f(x, y):\n\n"
        f"{PRINT}\n{STACK}"
    )
    assert text.reason == "Failed to trace builtin operator"
    assert text.id == "GB0059"
    assert text.hint == "Avoid calling builtin `print` with argument types ['str']."
    assert text.skipped is False
    assert text.location == INNER
    assert text.stack == ALL


def test_a_break_of_a_branch() -> None:
    """Generic hints are passed over, and lines of source within the explanation are no frames."""
    text = parse_break(f"Graph break in user code at /p/a.py:3\nGraph Break Reason: {BRANCH}\n{STACK}")
    assert (text.reason, text.id) == ("Data-dependent branching", "GB0170")
    assert text.hint == "Use `torch.cond` to express dynamic control flow."
    assert text.stack == ALL


def test_a_break_in_a_loop_tells_its_cause() -> None:
    """Of two breaks in one text the first is the cause; the frame counts as skipped."""
    text = parse_break(
        "Graph break in user code at /p/a.py:3\n"
        "Graph Break Reason: Failed to handle graph break gracefully. Skipping the function and falling back to "
        f"eager. Graph break encountered:\n\n{BOTH}\n"
        'Stack variable source attribution:\n  RangeIteratorVariable() originated from:\n  File "/p/a.py", line 2\n'
        f"        for i in range(3):\n\n{STACK}"
    )
    assert (text.reason, text.id) == ("Failed to trace builtin operator", "GB0059")
    assert text.hint == "Avoid calling builtin `print` with argument types ['str']."
    assert text.skipped is True
    assert text.location == INNER
    assert text.stack == ALL


@pytest.mark.parametrize(
    "head",
    [
        "Graph break (user stack suppressed due to duplicate graph break) in user code at /p/a.py:3\n",
        "Graph break (details suppressed) in user code at /p/a.py:3\n",
    ],
)
def test_a_break_that_was_told_before(head: str) -> None:
    """A repeated break keeps its place and reason; the function is unknown without the stack."""
    text = parse_break(f"{head}Graph Break Reason: {PRINT}")
    assert (text.reason, text.id, text.skipped) == ("Failed to trace builtin operator", "GB0059", False)
    assert text.location == StackFrame("/p/a.py", 3, "?")
    assert text.stack == ()


def test_a_break_without_any_reason() -> None:
    """Where even the reason is suppressed, the exception's text gives it."""
    text = parse_break("Graph break (details suppressed) in user code at /p/a.py:3\n", PRINT)
    assert (text.reason, text.id) == ("Failed to trace builtin operator", "GB0059")
    assert text.location == StackFrame("/p/a.py", 3, "?")


def test_a_function_that_cannot_be_resumed() -> None:
    """Torch 2.10 says which construct made it give up the whole function."""
    text = parse_break(
        "Graph break: torch.compile cannot properly resume from this graph break, which results in a skip.\n"
        f"torch.compile will skip tracing the frame f (/p/a.py line 1) and fall back to eager.\n{BOTH}\n{STACK}"
    )
    assert text.skipped is True
    assert (text.reason, text.id) == ("Failed to trace builtin operator", "GB0059")
    assert text.stack == ALL


def test_a_call_of_a_disabled_function() -> None:
    """The reason does not hold the address of the function."""
    text = parse_break(
        "Graph break in user code at /p/a.py:3\nGraph Break Reason: Encountered graph break when attempting to trace "
        "CALL: a function call, e.g. f(x, y):\n\nSkip calling `torch.compiler.disable()`d function\n"
        "  Explanation: Skip calling function `<function d at 0x7fd70cb26520>` since it was wrapped (reason: None)\n"
        "  Hint: Remove the `torch.compiler.disable` call\n\n"
        f"  Developer debug context: <function d at 0x7fd70cb26520>\n\n For more details: {LINK}/gb0098.html\n\n{STACK}"
    )
    assert (text.reason, text.id) == ("Skip calling `torch.compiler.disable()`d function", "GB0098")
    assert text.hint == "Remove the `torch.compiler.disable` call"


# -- torch 2.6 to 2.9 -----------------------------------------------------------------------------


def test_torch_2_9_skips_with_a_stack_only() -> None:
    """Up to 2.9 a skipped frame is told by its stack; the reason is in the exception."""
    message = 'Graph break: skip: from user code at:\n  File "/p/a.py", line 5, in f\n    x = g(x)\n'
    message += '  File "/p/a.py", line 3, in helper\n    print("")\n'
    text = parse_break(message, PRINT)
    assert text.skipped is True
    assert text.stack == (OUTER, INNER)
    assert text.location is None
    assert (text.reason, text.id) == ("Failed to trace builtin operator", "GB0059")
    assert text.hint == "Avoid calling builtin `print` with argument types ['str']."


def test_torch_2_9_skips_in_a_loop() -> None:
    """The cause of a skipped loop is what the exception tells first."""
    message = 'Graph break: skip: from user code at:\n  File "/p/a.py", line 5, in f\n    print("")\n'
    text = parse_break(message, BOTH)
    assert (text.reason, text.skipped) == ("Failed to trace builtin operator", True)


def test_torch_2_8_has_no_link() -> None:
    """Without a link there is no number; whoever has torch's registry looks it up by the reason."""
    reason = PRINT.partition("\n For more")[0]
    text = parse_break(f"Graph break in user code at /p/a.py:3\nGraph Break Reason: {reason}\n{STACK}")
    assert (text.reason, text.id) == ("Failed to trace builtin operator", None)
    assert text.hint == "Avoid calling builtin `print` with argument types ['str']."
    assert (text.location, text.stack) == (INNER, ALL)


def test_torch_2_6_has_no_explanation() -> None:
    """The oldest form is one line of reason and the stack."""
    text = parse_break(
        f"Graph break in user code at /p/a.py:3\nReason: Unsupported: call_function BuiltinVariable(print)\n{STACK}"
    )
    assert text.reason == "Unsupported: call_function BuiltinVariable(print)"
    assert (text.id, text.hint, text.skipped) == (None, None, False)
    assert (text.location, text.stack) == (INNER, ALL)


def test_torch_2_6_repeats_without_stack() -> None:
    """A repeated break of 2.6 has a place and nothing else."""
    text = parse_break("Graph break (details suppressed) in user code at /p/a.py:3\nReason: Unsupported: Tensor.item")
    assert (text.reason, text.location, text.stack) == ("Unsupported: Tensor.item", StackFrame("/p/a.py", 3, "?"), ())


def test_torch_2_6_branches() -> None:
    """The branch on data of 2.6 is told by its own words."""
    text = parse_break(
        f"Graph break in user code at /p/a.py:3\nReason: Unsupported: generic_jump TensorVariable()\n{STACK}"
    )
    assert text.reason == "Unsupported: generic_jump TensorVariable()"


def test_torch_2_6_skips_with_the_exceptions_text() -> None:
    """A frame that 2.6 skipped has the reason in the exception, as one line."""
    message = 'Graph break: skip: from user code at:\n  File "/p/a.py", line 5, in f\n    print("")\n'
    text = parse_break(message, "call_function BuiltinVariable(print)")
    assert (text.reason, text.skipped) == ("call_function BuiltinVariable(print)", True)


# -- odd texts ------------------------------------------------------------------------------------


def test_paths_with_blanks_and_colons() -> None:
    """A place is found whatever characters its path has."""
    text = parse_break(
        "Graph break in user code at C:\\my files\\a.py:12\nGraph Break Reason: x\n  Explanation: y\n\n"
        'User code traceback:\n  File "C:\\my files\\a.py", line 12, in f\n    print("")\n'
    )
    assert text.location == StackFrame("C:\\my files\\a.py", 12, "f")
    assert text.reason == "x"


def test_resume_functions_have_the_name_of_the_user() -> None:
    """Frames of functions that Dynamo made go by the name in the source."""
    text = parse_break(
        "Graph break in user code at /p/a.py:9\nGraph Break Reason: x\n  Explanation: y\n\nUser code traceback:\n"
        '  File "/p/a.py", line 9, in torch_dynamo_resume_in_f_at_7\n    print("")\n'
    )
    assert text.location == StackFrame("/p/a.py", 9, "f")


@pytest.mark.parametrize("text", ["", "\n", "no such text", "Graph break", "Graph break in user code at x"])
def test_any_text_gives_something(text: str) -> None:
    """A text of a torch that is not known raises nothing."""
    parsed = parse_break(text)
    assert (parsed.id, parsed.hint, parsed.location, parsed.stack) == (None, None, None, ())
    assert isinstance(parsed.reason, str)


def test_hints_of_several_lines_are_joined() -> None:
    """A hint that goes on in the next line is one sentence."""
    text = parse_break("Graph break in user code at /p/a.py:3\nReason: x\n  Explanation: y\n  Hint: do\n    this.\n")
    assert text.hint == "do this."


def test_only_generic_hints() -> None:
    """A generic hint is better than none."""
    text = parse_break("Reason: x\n  Explanation: y\n  Hint: Please report an issue to PyTorch.\n")
    assert text.hint == "Please report an issue to PyTorch."


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("f", "f"),
        ("torch_dynamo_resume_in_f_at_12", "f"),
        ("torch_dynamo_resume_in_torch_dynamo_resume_in_f_at_12_at_15", "f"),
        ("torch_dynamo_resume_in_look_at_3_at_7", "look"),
        ("resume_in_f_at_3", "resume_in_f_at_3"),
        ("torch_dynamo_resume_in_<lambda>_at_3", "<lambda>"),
        ("?", "?"),
    ],
)
def test_real_function(name: str, expected: str) -> None:
    """A resume function goes by the name of the function that it continues."""
    assert real_function(name) == expected


# -- guards ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("0/0: tensor 'x' dtype mismatch. expected Float, actual Double", None),
        ("0/0: GLOBAL_STATE changed: grad_mode ", "GLOBAL_STATE changed: grad_mode"),
        ("12/3: 2 <= x.size()[0]  # return x * 2  # a.py:3 in f", "2 <= x.size()[0]"),
        ("0/1: L['s'] == 'a'   # (user code shown is first use)\nUser stack trace:\n  File", "L['s'] == 'a'"),
        ("L['s'] == 'a # b'", "L['s'] == 'a # b'"),
        ("0/0: ___check_obj_id(L['m'], 139872563812304)", "___check_obj_id(L['m'], …)"),
        (
            "0/0: ___check_type_id(L['m'], 94281234567890), type=<class 'M'>",
            "___check_type_id(L['m'], …), type=<class 'M'>",
        ),
        ("0/0: L['f'] is <function f at 0x7fd70cb26520>", "L['f'] is <function f at 0x…>"),
        ("0/0: L['n'] == 1234567890", "L['n'] == 1234567890"),
        ("0/0: L['n']   ==\t3", "L['n'] == 3"),
        ("  0/0: x  ", "x"),
        ("", ""),
    ],
)
def test_clean_guard(reason: str, expected: str | None) -> None:
    """A failed guard is one line without compile ids, source, object ids and addresses."""
    assert clean_guard(reason) == (reason.partition(": ")[2] if expected is None else expected)


def test_clean_guards_do_not_differ_from_run_to_run() -> None:
    """Two runs tell the same guard in the same words."""
    one = "0/0: ___check_obj_id(L['m'], 139872563812304), at 0x7fd70cb26520  # f(x)"
    two = "3/1: ___check_obj_id(L['m'], 140111111111111), at 0x7aaaaaaaaaa0  # f(x)"
    assert clean_guard(one) == clean_guard(two)


@pytest.mark.parametrize(
    ("reason", "expected"),
    [
        ("0/0: ", True),
        ("", True),
        ("0/0: BACKEND_MATCH failure: torch.compile detected different backend callables.", True),
        ("___check_current_backend(140111111111111) BACKEND_MATCH", True),
        ("0/0: tensor 'x' dtype mismatch", False),
    ],
)
def test_is_backend_change(reason: str, expected: bool) -> None:
    """A guard on the backend, or an empty reason as older torch gives it, is no change of the code."""
    assert is_backend_change(reason) is expected


# -- CUDA graphs ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("message", "reason", "where"),
    [
        (
            (
                "skipping cudagraphs due to mutated inputs (1 instances). Found from : \n"
                '   File "/p/a.py", line 37, in mut\n    x.add_(1)\n'
            ),
            "mutated inputs (1 instances)",
            StackFrame("/p/a.py", 37, "mut"),
        ),
        ("skipping cudagraphs due to cpu device (arg0_1)", "cpu device (arg0_1)", None),
        ("skipping cudagraph due to multiple devices: cuda:0, cuda:1", "multiple devices: cuda:0, cuda:1", None),
        (
            'skipping cudagraphs due to cpu device (x). Found from:\n   File "/p/a.py", line 3, in f\n',
            "cpu device (x)",
            StackFrame("/p/a.py", 3, "f"),
        ),
        ("skipping cudagraphs for unknown reason", "skipping cudagraphs for unknown reason", None),
        ("skipping cudagraphs due to <function f at 0x7fd70cb26520>", "<function f at 0x…>", None),
        # As backend "cudagraphs" of torch 2.14 says it.
        (
            (
                "skipping cudagraphs due to skipping cudagraphs due to cpu device (arg0_1). Found from : \n"
                '   File "/p/a.py", line 5, in f\n    x + 1\n'
            ),
            "cpu device (arg0_1)",
            StackFrame("/p/a.py", 5, "f"),
        ),
    ],
)
def test_cudagraph_skip(message: str, reason: str, where: StackFrame | None) -> None:
    """The reason in torch's words, and the line that torch blames if it does."""
    assert parse_cudagraph_skip(message) == (reason, where)
