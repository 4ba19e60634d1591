"""The only file with private names of torch. It never imports torch by itself.

Everything is reached through ``sys.modules``: torch may come later, or never. What a function could
not find it says (None, or a flag of ``Signals``); no other module compares versions of torch.
"""

from __future__ import annotations

import contextlib
import inspect
import json
import logging
import os
import sys
import traceback
from collections.abc import Callable
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType
from types import FrameType
from types import FunctionType
from typing import Any

from pytest_dynamo import messages
from pytest_dynamo.events import BreakEvent
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import CompileResult
from pytest_dynamo.events import CudaGraphRecording
from pytest_dynamo.events import CudaGraphSkipEvent
from pytest_dynamo.events import Event
from pytest_dynamo.events import LimitEvent
from pytest_dynamo.events import SkipEvent
from pytest_dynamo.messages import StackFrame


#: What ``torch._dynamo.exc`` logs besides is logged again by these, with its place.
BREAK_LOGGERS = tuple(f"torch._dynamo.{part}.__graph_breaks" for part in ("symbolic_convert", "convert_frame"))
CONVERT_LOGGER = "torch._dynamo.convert_frame"
#: The first name is that of torch 2.11 and newer.
CUDAGRAPH_SKIP_LOGGERS = (
    "torch._inductor.cudagraph_utils.__cudagraphs",
    "torch._inductor.cudagraph_utils.__perf_hints",
)
CUDAGRAPH_RECORD_LOGGER = "torch._inductor.cudagraph_trees.__cudagraphs"
TRACE_LOGGER = "torch.__trace"
#: A record with the code of every graph that inductor compiles, and that it finds in its cache.
OUTPUT_CODE_LOGGERS = tuple(f"torch._inductor.{part}.__output_code" for part in ("graph", "codecache"))

_START = "torchdynamo start compiling"
_LIMIT = "torch._dynamo hit config."
_SKIP = "skipping: %s (reason"
_CHECKPOINT = os.path.join("torch", "utils", "checkpoint.py")
_CONVERT_FILE = os.path.join("torch", "_dynamo", "convert_frame.py")
_COMPILER_FOLDER = os.path.join("torch", "_dynamo", "")
_PYTEST_NAMES = ("@py_assert", "@pytest_ar")
_OWN = os.path.join(os.path.dirname(os.path.abspath(__file__)), "")


@dataclass(frozen=True)
class Signals:
    """Which of the compiler's signals this torch gives."""

    #: A log record for every graph break.
    breaks: bool = True
    #: A log record when Dynamo begins to compile a frame.
    compiles: bool = True
    #: Data about every compilation when it is over: operations, seconds, failure.
    results: bool = True
    #: Why a frame was compiled again.
    recompiles: bool = True
    #: A log record when a frame was compiled too often.
    limit_hits: bool = True
    #: A log record for every CUDA graph that was not recorded.
    cudagraph_skips: bool = True

    def missing(self) -> tuple[str, ...]:
        return tuple(name for name, there in vars(self).items() if not there)


# -- torch's modules, if they are there -----------------------------------------------------------


def dynamo() -> Any:
    """``torch._dynamo`` if it has been imported completely, else None."""
    module = sys.modules.get("torch._dynamo")
    return module if module is not None and hasattr(module, "reset") else None


def _module(name: str) -> Any:
    return sys.modules.get(name)


# -- log records to events ------------------------------------------------------------------------


def parse_break(record: logging.LogRecord) -> Event | None:
    error = sys.exc_info()[1]
    real = getattr(error, "real_stack", None) or ()
    text = messages.parse_break(record.getMessage(), str(getattr(error, "msg", "") or ""))
    stack = tuple(StackFrame(f.filename, f.lineno or 0, messages.real_function(f.name)) for f in real)
    if text.failed:
        stack = text.failed
    elif not stack:
        # Branches on data are logged after their exception was handled: only the text is left.
        # Of a place that was told before, torch gives the line and no stack.
        stack = text.stack or ((_with_function(text.location),) if text.location else ())
    if not stack:
        return None
    return BreakEvent(
        stack=stack,
        callers=_callers(),
        reason=text.reason,
        id=text.id or _registered_id(text.reason),
        hint=text.hint,
        skipped=bool(getattr(error, "skip_frame", False)) or text.skipped,
        rewritten=_rewritten_by_pytest(error, stack[-1]),
    )


def break_of_exception(error: BaseException) -> BreakEvent | None:
    """The graph break that ``fullgraph=True`` turned into an exception, or None."""
    real = getattr(error, "real_stack", None)
    exc = _module("torch._dynamo.exc")
    if exc is None or not isinstance(error, exc.Unsupported) or not real:
        return None
    text = messages.parse_break(str(error), str(getattr(error, "msg", "") or ""))
    reason = str(getattr(error, "gb_type", None) or text.reason)
    stack = tuple(StackFrame(f.filename, f.lineno or 0, messages.real_function(f.name)) for f in real)
    return BreakEvent(
        stack=stack,
        callers=_callers(),
        reason=reason,
        id=text.id or _registered_id(reason),
        hint=text.hint,
        skipped=False,
        rewritten=_rewritten_by_pytest(error, stack[-1]),
    )


def is_compiler_error(error: BaseException | None) -> bool:
    """Whether an exception says that the compiler failed, and not that the user's code did."""
    exc = _module("torch._dynamo.exc")
    if exc is None or error is None:
        return False
    names = ("BackendCompilerFailed", "InternalTorchDynamoError", "ShapeEnvError", "ResetRequired")
    kinds = tuple(kind for name in names if isinstance(kind := getattr(exc, name, None), type))
    return isinstance(error, kinds)


def from_a_graph(error: BaseException | None) -> bool:
    """Whether an exception came out of a compiled graph or of tracing, which make their changes only when they end."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        seen.add(id(error))
        if type(error).__module__ == "torch._dynamo.exc":
            return True
        if any(_runs_a_graph(frame) for frame, _ in traceback.walk_tb(error.__traceback__)):
            return True
        error = error.__cause__ or error.__context__
    return False


def _runs_a_graph(frame: FrameType) -> bool:
    if str(frame.f_globals.get("__name__")).startswith("torch._functorch._aot_autograd"):
        return True
    # Dynamo calls what it compiled through a wrapper that says so.
    wrapper = frame.f_locals.get("self") if frame.f_code.co_filename.endswith("eval_frame.py") else None
    return "Dynamo-compiled graph" in str(getattr(wrapper, "msg", None))


def parse_convert(record: logging.LogRecord) -> Event | None:
    words = record.msg
    if not isinstance(words, str) or not isinstance(record.args, tuple):
        return None
    if words.startswith(_START):
        name, file, line = record.args[:3]
        values = _compiling_frame()
        reasons = values.get("reasons")
        return CompileEvent(
            compile_id=_compile_id(),
            file=str(file),
            line=int(str(line)),
            function=str(name),
            backend=_innermost(values.get("compiler_fn")),
            reasons=tuple(map(str, reasons)) if isinstance(reasons, (list, tuple)) else (),
            callers=_callers() if _COMPILER_FOLDER in str(file) else (),
        )
    if words.startswith(_LIMIT):
        limit, value, function, reason = record.args[:4]
        name, _, place = str(function).partition("' (")
        file, _, line = place.rstrip(")").rpartition(":")
        return LimitEvent(
            str(limit), int(str(value)), file, int(line) if line.isdigit() else 0, name.strip("'"), str(reason or "")
        )
    if words.startswith(_SKIP):
        name, reason, file = record.args[:3]
        return SkipEvent(str(name), str(reason), str(file))
    return None


def parse_cudagraph_skip(record: logging.LogRecord) -> Event | None:
    text = record.getMessage()
    if not text.startswith("skipping cudagraph"):
        return None
    return CudaGraphSkipEvent(*messages.parse_cudagraph_skip(text))


def parse_cudagraph_recording(record: logging.LogRecord) -> Event | None:
    return CudaGraphRecording() if "Recording function" in record.getMessage() else None


def _compile_id() -> str:
    guards = _module("torch._guards")
    return str(guards.CompileContext.current_compile_id()) if guards is not None else "?"


def _innermost(backend: Any) -> Any:
    while hasattr(backend, "_torchdynamo_orig_backend"):
        backend = backend._torchdynamo_orig_backend
    return backend


def _frames() -> Iterator[FrameType]:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        yield frame
        frame = frame.f_back


def _compiling_frame() -> dict[str, Any]:
    """Variables of Dynamo's function that compiles a frame: its backend and the failed guards."""
    for frame in _frames():
        if frame.f_code.co_filename.endswith(_CONVERT_FILE) and "compiler_fn" in frame.f_locals:
            return frame.f_locals
    return {}


def _callers() -> tuple[StackFrame, ...]:
    """Python frames outside torch, outermost first."""
    found = []
    torch = os.path.join(os.path.dirname(_module("torch").__file__), "")
    for frame in _frames():
        file = frame.f_code.co_filename
        if not file.startswith((torch, _OWN)):
            found.append(StackFrame(file, frame.f_lineno, messages.real_function(frame.f_code.co_name)))
    return tuple(reversed(found))


def _traced(frame: FrameType) -> CodeType | None:
    """What Dynamo's translator traces, if a frame runs a method of it.

    Not by ``getattr``: what Dynamo knows of a value only later answers that by finding it out, which may raise.
    """
    code = inspect.getattr_static(frame.f_locals.get("self"), "f_code", None)
    return code if isinstance(code, CodeType) else None


def _with_function(where: StackFrame) -> StackFrame:
    """Complete a line by the function in which Dynamo is tracing it."""
    for frame in _frames():
        code = _traced(frame)
        if code is not None and code.co_filename == where.file:
            return StackFrame(where.file, where.line, messages.real_function(code.co_name))
    return where


def _rewritten_by_pytest(error: BaseException | None, where: StackFrame) -> bool:
    """Whether the code object that broke holds the names that pytest's assert rewriting puts there."""
    frames: list[FrameType] = []
    trace = error.__traceback__ if error is not None else None
    while trace is not None:
        frames.append(trace.tb_frame)
        trace = trace.tb_next
    for frame in (*reversed(frames), *_frames()):
        code = _traced(frame)
        if code is None or code.co_filename != where.file:
            continue
        if messages.real_function(code.co_name) == where.function:
            return any(n.startswith(_PYTEST_NAMES) for n in (*code.co_names, *code.co_varnames))
    return False


_registry: dict[str, str] = {}


def _registered_id(reason: str) -> str | None:
    """Number of a kind of break in the list that torch ships since 2.8."""
    module = dynamo()
    if not _registry and module is not None:
        path = os.path.join(os.path.dirname(module.__file__), "graph_break_registry.json")
        with contextlib.suppress(OSError), open(path, encoding="utf-8") as file:
            for number, entries in json.load(file).items():
                _registry.update({entry["Gb_type"]: number for entry in entries})
    return _registry.get(reason)


# -- results of compilations ----------------------------------------------------------------------


class ResultReader:
    """Reads what torch keeps of the last compilations, each once.

    Torch keeps 64 of them; read at least at every start of a compilation.
    """

    def __init__(self) -> None:
        self._last: Any = None

    def read(self) -> list[Event]:
        utils = _module("torch._dynamo.utils")
        if utils is None or not hasattr(utils, "get_compilation_metrics"):
            return []
        metrics = utils.get_compilation_metrics()
        for number in range(len(metrics) - 1, -1, -1):
            if metrics[number] is self._last:
                metrics = metrics[number + 1 :]
                break
        if metrics:
            self._last = metrics[-1]
        events: list[Event] = []
        for metric in metrics:
            if not getattr(metric, "is_runtime", False):
                events.append(_result(metric))
                if metric.fail_type and metric.fail_type not in _TOLD and metric.config_suppress_errors:
                    events.append(_suppressed(metric))
        return events


#: Failures that log records of their own tell.
_TOLD = frozenset({"Unsupported", "UserError", "SkipFrame", "RecompileLimitExceeded", "FailOnRecompileLimitHit"})


def _suppressed(metric: Any) -> BreakEvent:
    """An error of the compiler that ``suppress_errors`` turned into eager execution of the frame."""
    name = messages.real_function(str(metric.co_name))
    text = " ".join(str(metric.fail_reason or "").split())[:200]
    return BreakEvent(
        stack=(StackFrame(str(metric.co_filename), metric.co_firstlineno or 0, name),),
        callers=(),
        reason=f"{metric.fail_type}: {text}",
        id=None,
        hint="torch._dynamo.config.suppress_errors hid this error; without it the call raises",
        skipped=True,
    )


def _result(metric: Any) -> CompileResult:
    forward = getattr(metric, "is_forward", True) is not False
    if forward:
        seconds = metric.entire_frame_compile_time_s
    else:
        seconds = (getattr(metric, "backward_cumulative_compile_time_us", None) or 0) / 1e6
    return CompileResult(
        compile_id=str(metric.compile_id),
        fail_type=metric.fail_type,
        ops=metric.graph_op_count,
        seconds=seconds,
        forward=forward,
        recompile_reason=getattr(metric, "recompile_reason", None),
        cache_hits=_sum(metric, "inductor_fx_local_cache_hit_count", "aotautograd_local_cache_hit_count"),
        cache_misses=_sum(metric, "inductor_fx_local_cache_miss_count", "aotautograd_local_cache_miss_count"),
    )


def _sum(metric: Any, *names: str) -> int | None:
    values = [getattr(metric, name, None) for name in names]
    return None if all(v is None for v in values) else sum(v or 0 for v in values)


# -- state of the compiler ------------------------------------------------------------------------


def reset() -> None:
    """Throw away all compiled code, if there is any."""
    module = dynamo()
    if module is not None:
        module.reset()


def switched_off() -> str | None:
    """By what compilation is switched off in this process, or None."""
    for name in ("TORCHDYNAMO_DISABLE", "TORCH_COMPILE_DISABLE"):
        if os.environ.get(name) == "1":
            return f"{name}=1"
    config = _module("torch._dynamo.config")
    if config is not None and getattr(config, "disable", False):
        return "torch._dynamo.config.disable"
    frames = _module("torch._dynamo.eval_frame")
    stance = getattr(getattr(frames, "_stance", None), "stance", None)
    if stance == "force_eager":
        return 'torch.compiler.set_stance("force_eager")'
    return None


def load() -> None:
    """Import the compiler, so that its configuration can be read before a test changes it."""
    import torch._dynamo
    import torch._functorch.config
    import torch._inductor.config  # noqa: F401


CONFIGS = ("torch._dynamo.config", "torch._inductor.config", "torch._functorch.config")


def config_values() -> dict[str, dict[str, Any]]:
    """Values of torch's global configuration, of the parts that have been imported."""
    values = {}
    for name in CONFIGS:
        module = _module(name)
        if module is not None and hasattr(module, "get_config_copy"):
            values[name] = module.get_config_copy()
    frames = _module("torch._dynamo.eval_frame")
    stance = getattr(frames, "_stance", None)
    if stance is not None:
        values["torch.compiler"] = {"stance": stance}
    return values


def restore_config(part: str, name: str, value: Any) -> None:
    if part == "torch.compiler":
        _module("torch._dynamo.eval_frame")._set_stance(value)
    else:
        setattr(_module(part), name, value)


def changed_config() -> list[str]:
    """Lines of Python that set what differs from the defaults in torch's configuration."""
    lines = []
    for name in CONFIGS:
        module = _module(name)
        if module is not None and hasattr(module, "codegen_config"):
            lines += [line for line in module.codegen_config().splitlines() if line.startswith("torch.")]
    imports = {line.partition(".config.")[0] + ".config" for line in lines}
    return [*(f"import {name}" for name in sorted(imports)), *lines]


def bisect(agrees: Callable[[], bool]) -> str | None:
    """What torch's compiler bisector finds for a call; None: it finds nothing.

    ``agrees`` compiles the call again and says whether it does what eager does.
    """
    from torch._inductor import config
    from torch._inductor.compiler_bisector import CompilerBisector

    with config.patch({"force_disable_caches": True}):
        found = CompilerBisector.do_bisect(agrees)
    if found is None:
        return None
    words = [found.backend, found.subsystem]
    if found.bisect_number:
        words.append(f"number {found.bisect_number}")
    text = ", ".join(word for word in words if word)
    return f"{text} ({found.debug_info})" if found.debug_info else text


#: Profile-guided state makes counts depend on earlier runs; both names are read at import.
PGO_ENVIRONMENT = ("TORCH_DYNAMO_AUTOMATIC_DYNAMIC_LOCAL_PGO", "TORCH_DYNAMO_AUTOMATIC_DYNAMIC_REMOTE_PGO")


def switch_profile_guided_state_off() -> None:
    """Switch it off where torch has been imported already; the environment does it for later."""
    config = _module("torch._dynamo.config")
    for name in ("automatic_dynamic_local_pgo", "automatic_dynamic_remote_pgo"):
        if config is not None and hasattr(config, name):
            setattr(config, name, False)


def code_of(fn: Any) -> CodeType | None:
    """Code object that Dynamo compiles first when ``torch.compile(fn)`` is called, or None."""
    if not hasattr(fn, "__code__"):
        fn = getattr(fn, "forward", None) or type(fn).__call__
    code = getattr(fn, "__code__", None)
    return code if isinstance(code, CodeType) else None


def uncompiled(fn: Any) -> Any:
    """What is under something that ``torch.compile`` returned; ``fn`` itself otherwise."""
    while True:
        frames = _module("torch._dynamo.eval_frame")
        if frames is not None and isinstance(fn, frames.OptimizedModule):
            fn = fn._orig_mod
        elif _made_by_dynamo(fn) and not getattr(fn, "_torchdynamo_disable", False):
            fn = fn._torchdynamo_orig_callable
        else:
            return fn


def _made_by_dynamo(fn: Any) -> bool:
    """Whether ``fn`` is a wrapper of Dynamo's, and not one whose attributes `functools.wraps` copied."""
    file = getattr(getattr(fn, "__code__", None), "co_filename", "")
    return hasattr(fn, "_torchdynamo_orig_callable") and file.endswith(
        os.path.join("torch", "_dynamo", "eval_frame.py")
    )


def fresh_caches() -> Any:
    """A context in which inductor and Triton have empty caches of their own."""
    from torch._inductor import utils

    make = getattr(utils, "fresh_cache", None) or utils.fresh_inductor_cache
    return make()


def with_fallback_random(kwargs: dict[str, Any]) -> dict[str, Any]:
    """``torch.compile`` keywords under which inductor draws the random numbers that eager draws."""
    # CUDA graphs change no numbers, and their warm-up calls would draw more of them.
    return with_options(kwargs, {"fallback_random": True, "triton.cudagraphs": False})


def with_options(kwargs: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    """``torch.compile`` keywords for inductor with other options, which it refuses beside a mode."""
    import torch._inductor

    kwargs = dict(kwargs)
    mode = kwargs.pop("mode", None)
    options = dict(kwargs.pop("options", None) or {})
    if mode is not None:
        options = {**torch._inductor.list_mode_options(mode, kwargs.get("dynamic")), **options}
    return {**kwargs, "options": {**options, **changes}}


def _cudagraph_manager() -> Any:
    """What manages the CUDA graphs of the current device; None: there are none."""
    trees = _module("torch._inductor.cudagraph_trees")
    torch = _module("torch")
    if trees is None or not torch.cuda.is_initialized():
        return None
    return trees.get_manager(torch.cuda.current_device(), create_if_none_exists=False)


def last_call_replayed() -> bool | None:
    """Whether the last CUDA graph on the current device was replayed; None: can't be told."""
    try:
        manager = _cudagraph_manager()
        if manager is None:
            return False
        return manager.path_state is _module("torch._inductor.cudagraph_trees").ExecutionState.EXECUTION
    except AttributeError:
        return None


def held_by_cudagraphs_only(key: int) -> bool:
    """Whether nobody but the CUDA graph that gave it still holds a storage.

    Replays of a graph return the same tensor object each time, which the graph keeps.
    """
    try:
        manager = _cudagraph_manager()
        nodes = [] if manager is None else [node for roots in manager.roots.values() for node in roots]
        while nodes:
            node = nodes.pop()
            for output in node.outputs_weakrefs:
                if output is not None and output.ref.cdata == key:
                    return bool(output.expired())
            nodes += [child for children in node.children.values() for child in children]
    except (AttributeError, AssertionError):
        return False
    return False


# -- tensors --------------------------------------------------------------------------------------


def storage_key(tensor: Any) -> int | None:
    """What identifies the storage of a plain strided tensor; None for other tensors."""
    import torch

    if torch.nn.parameter.is_lazy(tensor):
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta or tensor.is_nested:
        return None
    if is_wrapper(tensor) or torch._is_functional_tensor(tensor):
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (NotImplementedError, RuntimeError):  # wrappers of functorch's transforms
        return None


def geometry(tensor: Any) -> Any:
    """Storage, offset, size and strides of a plain tensor; None for others."""
    key = storage_key(tensor)
    return None if key is None else (key, tensor.storage_offset(), tensor.size(), tensor.stride())


def unreadable(values: Any) -> str | None:
    """Why values of tensors can't be read at present, or None."""
    import torch

    tensors = tensors_in(values)
    guards = _module("torch._guards")
    if guards is not None and guards.detect_fake_mode(tensors) is not None:
        return "FakeTensors have no values"
    if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in tensors):
        return "within a transform of torch.func values can't be read"
    return None


def is_compilers(name: str) -> bool:
    """Whether an attribute of a user's object is one that the compiler puts there for itself."""
    return name.startswith(("_dynamo", "_torchdynamo", "_is_torch_compile"))


def hooks(module: Any) -> list[Any]:
    """What a module calls before and after its forward and backward."""
    kinds = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
    return [hook for kind in kinds for hook in kind.values()]


def is_wrapper(tensor: Any) -> bool:
    """Whether a tensor only wraps others and has no storage of its own, as DTensor does."""
    return hasattr(tensor, "__tensor_flatten__")


def view_of(storage: Any, like: Any) -> Any:
    """A plain tensor over ``storage`` with the geometry and the conj and neg bits of ``like``."""
    import torch

    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        new = torch.empty(0, dtype=like.dtype, device=like.device)
        new.set_(storage, like.storage_offset(), like.size(), like.stride())
        if like.is_conj():
            new = new.conj()
        if like.is_neg():
            new = torch._neg_view(new)
    return new


def dispatch_mode() -> Any:
    """Base class of modes that see every operation."""
    from torch.utils._python_dispatch import TorchDispatchMode

    return TorchDispatchMode


def without_modes() -> Any:
    """Context in which operations are not shown to modes."""
    from torch.utils._python_dispatch import _disable_current_modes

    return _disable_current_modes()


def tensors_in(value: Any) -> list[Any]:
    import torch
    from torch.utils._pytree import tree_leaves

    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def map_values(change: Callable[[Any], Any], tree: Any) -> Any:
    """Apply ``change`` to every value in nested lists, tuples and dicts."""
    from torch.utils._pytree import tree_map

    return tree_map(change, tree)


def is_operator(func: Any) -> bool:
    """Whether ``func`` is an operator with a schema, and no operator of a higher order."""
    import torch

    return isinstance(func, torch._ops.OpOverload)


def in_backward() -> bool:
    """Whether a gradient is being computed in this thread, and no forward pass again as for a checkpoint."""
    import torch

    if torch._C._current_graph_task_id() == -1:
        return False
    # Where gradients are differentiated again they are computed in grad mode, as a checkpoint's forward pass is.
    return not torch.is_grad_enabled() or not any(frame.f_code.co_filename.endswith(_CHECKPOINT) for frame in _frames())


def saved_tensors_hooks() -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Hooks that pack and unpack what autograd saves, if any are in force."""
    top = getattr(getattr(sys.modules["torch"]._C, "_autograd", None), "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(True)


def casts(func: Any) -> bool:
    """Whether an operation gives its operand another dtype."""
    return str(func) == "aten._to_copy.default"


def watched_bodies(mode: Any, args: Any) -> Any:
    """Arguments of an operator of a higher order, with functions that show a mode what they do."""
    import torch

    def watched(value: Any) -> Any:
        if isinstance(value, torch.Tensor) or not callable(value):
            return value

        def body(*inner: Any, **kwargs: Any) -> Any:
            with mode:
                return value(*inner, **kwargs)

        return body

    return tuple(map_values(watched, list(args)))


def reinterprets_bits(func: Any) -> bool:
    return str(func) == "aten.view.dtype"


def draws_random_numbers(func: Any) -> bool:
    import torch

    return torch.Tag.nondeterministic_seeded in func.tags


def makes_number(func: Any) -> bool:
    return str(func) == "aten._local_scalar_dense.default"


def makes_views(func: Any) -> bool:
    """Whether an operation returns views of its operands and writes nothing."""
    found = [argument.alias_info for argument in func._schema.arguments if argument.alias_info is not None]
    return bool(found) and not any(info.is_write for info in found)


def is_dropout(func: Any) -> bool:
    return str(func) == "aten.native_dropout.default"


#: Operations whose results hold nothing but numbers of their operands, or whole numbers that every computer finds. A
#: cast rounds as the program says: that is no freedom of whoever computes.
_COPYING = frozenset(
    {
        *(
            "clone",
            "copy_",
            "_to_copy",
            "cat",
            "stack",
            "index",
            "index_select",
            "gather",
            "embedding",
            "where",
            "fill_",
            "zero_",
        ),
        *("neg", "abs", "relu", "sort", "topk", "max", "min", "amax", "amin", "maximum", "minimum", "flip", "roll"),
        *("constant_pad_nd", "repeat", "max_pool2d_with_indices", "threshold_backward", "zeros_like", "ones_like"),
        *("full_like", "empty_like", "new_zeros", "new_ones", "new_empty", "new_full", "masked_fill", "clamp"),
        *("slice_backward", "select_backward", "index_put", "index_put_", "scatter", "masked_select", "tril", "triu"),
        *("round", "floor", "ceil", "trunc", "round_", "floor_", "ceil_", "trunc_", "sign", "sgn", "clamp_", "relu_"),
        *("clamp_min", "clamp_max", "neg_", "abs_", "masked_fill_", "hardtanh", "hardtanh_backward"),
    }
)


def copies(func: Any) -> bool:
    """Whether an operation computes nothing and so rounds nothing."""
    return func.overloadpacket.__name__ in _COPYING


#: Operations in which compiled code adds in an order of its own, which is that of their decomposition.
_ADDING = frozenset(
    {
        *("native_layer_norm", "native_layer_norm_backward", "native_group_norm", "native_group_norm_backward"),
        *("native_batch_norm_backward", "var", "var_mean", "std", "std_mean", "linalg_vector_norm"),
        *("_softmax", "_log_softmax", "_softmax_backward_data", "_log_softmax_backward_data"),
        *("nll_loss_forward", "mse_loss"),
    }
)


def decomposition(func: Any) -> Any:
    """A function of simpler operations that does what an operation does that adds up; None: it doesn't, or is none."""
    table = getattr(_module("torch._decomp"), "decomposition_table", {})
    return table.get(func) if func.overloadpacket.__name__ in _ADDING else None


#: Operations whose results are sums of products: near zero those are as wrong as elsewhere.
_PRODUCTS = frozenset(
    {
        *("mm", "addmm", "bmm", "baddbmm", "mv", "addmv", "dot", "vdot", "linear", "matmul", "einsum"),
        *("convolution", "convolution_backward", "cudnn_convolution", "conv1d", "conv2d", "conv3d"),
    }
)


def adds_products(func: Any) -> bool:
    return func.overloadpacket.__name__ in _PRODUCTS


#: Which argument of a sum of products is only added, so that its precision is kept.
_ADDENDS = {"addmm": 0, "baddbmm": 0, "addmv": 0, "linear": 2, "convolution": 2, "conv1d": 2, "conv2d": 2, "conv3d": 2}
#: One rounding step of what the numbers that are multiplied are rounded to, by the names in `torch.backends`.
_FACTOR_STEPS = {"tf32": 2.0**-10, "bf16": 2.0**-7}


def addend(func: Any) -> int | None:
    """The position of the argument of a sum of products that is only added to it."""
    return _ADDENDS.get(func.overloadpacket.__name__)


def factor_step(device_type: str, func: Any = None) -> float:
    """One rounding step to which kernels may round what they multiply in float32; 0.0: they keep all its digits.

    Args:
        device_type: as in ``tensor.device.type``.
        func: an operation that adds products; without it the coarser of convolutions and of other products.
    """
    name = "" if func is None else func.overloadpacket.__name__
    kinds = ("conv", "matmul") if func is None else ("conv",) if "conv" in name else ("matmul",)
    return max(_FACTOR_STEPS.get(_float32_precision(device_type, kind), 0.0) for kind in kinds)


def _float32_precision(device_type: str, kind: str) -> str:
    import torch

    backends = torch.backends
    if device_type == "cuda":
        # Before 2.9 there are only the flags; later, reading them raises where the new settings are mixed with them.
        setting: Any = getattr(backends.cudnn, "conv", None) if kind == "conv" else backends.cuda.matmul
        if hasattr(setting, "fp32_precision"):
            return str(setting.fp32_precision)
        return "tf32" if (backends.cudnn if kind == "conv" else backends.cuda.matmul).allow_tf32 else "ieee"
    if device_type != "cpu":
        return "ieee"
    setting = getattr(backends.mkldnn, kind, None)
    if setting is not None:
        precision = str(setting.fp32_precision)
    else:
        precision = "bf16" if kind == "matmul" and torch.get_float32_matmul_precision() == "medium" else "ieee"
    return precision if precision == "bf16" else "ieee"  # CPUs rarely have TF32


def sums(func: Any) -> str | None:
    """``sum``, ``mean`` or, for the gradient of a bias, ``convolution_backward``, if an operation is that."""
    name: str = func.overloadpacket.__name__
    return name if name in ("sum", "mean", "convolution_backward") and "out" not in str(func) else None


#: Operations that write the running statistics, their fourth and fifth argument, and do not say it.
_NORMS = frozenset(
    {
        *("native_batch_norm", "cudnn_batch_norm", "miopen_batch_norm"),
        *("batch_norm", "instance_norm", "_batch_norm_impl_index"),
    }
)


def written_arguments(func: Any, args: Any, kwargs: Any) -> list[Any]:
    """Tensors that an operator says it writes to. Batch normalisation does not say it."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return []
    written: list[Any] = []
    if schema.is_mutable:
        for number, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                written.append(args[number] if number < len(args) else kwargs.get(argument.name))
    # In inference mode the composite operations arrive, which say it as little.
    if func.overloadpacket.__name__ in _NORMS:
        written.extend(args[3:5])
    return tensors_in(written)


def plain_parts(actual: Any, expected: Any) -> list[tuple[str, Any, Any]] | None:
    """Pairs of strided tensors with the values of two tensors of one type; None: can't be read."""
    import torch

    if is_wrapper(expected):
        names = [t.__tensor_flatten__()[0] for t in (actual, expected)]
        if names[0] != names[1]:
            return None
        inner = [(name, getattr(actual, name), getattr(expected, name)) for name in names[0]]
        parts = [(f".{name}", plain_parts(a, e)) for name, a, e in inner]
        if any(part is None for _, part in parts):
            return None
        return [(head + tail, a, e) for head, part in parts for tail, a, e in part or ()]
    if expected.is_nested:
        return [(f"[{i}]", a, e) for i, (a, e) in enumerate(zip(actual.unbind(), expected.unbind()))]
    if expected.is_quantized:
        return [(".int_repr()", actual.int_repr(), expected.int_repr())]
    if expected.layout is not torch.strided:
        return [(".to_dense()", actual.to_dense(), expected.to_dense())]
    return [("", actual, expected)]


# -- does this torch still speak the language that this file understands? -------------------------


def inspect_signals(seen: list[Event]) -> Signals:
    """Judge by the events of ``probe`` which signals this torch gives."""
    trees = _module("torch._inductor.cudagraph_utils")
    loggers = logging.getLogger().manager.loggerDict
    results = [event for event in seen if isinstance(event, CompileResult)]
    return Signals(
        breaks=any(isinstance(event, BreakEvent) for event in seen),
        compiles=any(isinstance(event, CompileEvent) for event in seen),
        results=any(event.fail_type is None and event.ops for event in results),
        recompiles=any(isinstance(e, CompileEvent) and (e.attempt > 0 or e.reasons) for e in seen),
        limit_hits=any(isinstance(event, LimitEvent) for event in seen),
        cudagraph_skips=trees is None or any(name in loggers for name in CUDAGRAPH_SKIP_LOGGERS),
    )


def probe() -> None:
    """Compile a function that breaks, recompiles and reaches the limit."""
    import torch

    def breaks(x: Any) -> Any:
        x = x + 1
        torch._dynamo.graph_break()
        return x + 2

    from torch._dynamo import config
    from torch._dynamo.utils import counters

    limit = "recompile_limit" if hasattr(config, "recompile_limit") else "cache_size_limit"
    calm = {"fail_on_recompile_limit_hit": False, "error_on_recompile": False, "suppress_errors": False}
    counted = {name: counter.copy() for name, counter in counters.items()}
    with torch.compiler.set_stance("default"), config.patch({n: v for n, v in calm.items() if hasattr(config, n)}):
        # Dynamo remembers code objects: a new one each time, or a second look sees nothing.
        fresh = FunctionType(breaks.__code__.replace(), globals(), "breaks", None, breaks.__closure__)
        step = torch.compile(fresh, backend="eager")
        step(torch.ones(1))
        with config.patch({limit: 2}):
            step(torch.ones(1, dtype=torch.float64))
        with config.patch({limit: 1}):
            step(torch.ones(1, dtype=torch.int32))
    counters.clear()
    counters.update(counted)
