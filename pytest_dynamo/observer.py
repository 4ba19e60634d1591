"""Listens to the compiler. The taps need no torch: they can be in place before it is imported."""

from __future__ import annotations

import hashlib
import logging
import re
import threading
from collections.abc import Callable
from collections.abc import Iterator
from contextlib import contextmanager

from pytest_dynamo import _torch
from pytest_dynamo._torch import Signals
from pytest_dynamo.events import CompileEvent
from pytest_dynamo.events import Event
from pytest_dynamo.events import ResetEvent


Parse = Callable[[logging.LogRecord], "Event | None"]


class LoggerTap:
    """Sees every record that a logger would make, and changes nothing for anybody else.

    Two public methods are overridden on the one logger: ``isEnabledFor`` answers yes from ``level``
    on, ``handle`` passes a record on only if the user had enabled it. Unlike a handler with a level,
    this survives ``set_logs`` of torch, ``logging.disable`` and ``dictConfig``.
    """

    def __init__(self, name: str, sink: Callable[[logging.LogRecord], None], level: int) -> None:
        self.logger = logging.getLogger(name)
        self.sink = sink
        self.level = level
        #: Pass nothing on, not even what the user enabled: the plugin itself made these records.
        self.muted = False
        self._replaced: dict[str, object] = {}

    def install(self) -> None:
        logger, sink, level = self.logger, self.sink, self.level
        self._replaced = {name: vars(logger).get(name) for name in ("isEnabledFor", "handle")}
        enabled, handle = logger.isEnabledFor, logger.handle

        def tapped_enabled(asked: int) -> bool:
            return asked >= level or enabled(asked)

        def tapped_handle(record: logging.LogRecord) -> None:
            sink(record)
            if enabled(record.levelno) and not self.muted:
                handle(record)

        logger.isEnabledFor = tapped_enabled  # type: ignore[method-assign, assignment]
        logger.handle = tapped_handle  # type: ignore[method-assign]

    def remove(self) -> None:
        for name, before in self._replaced.items():
            if before is None:
                vars(self.logger).pop(name, None)
            else:
                setattr(self.logger, name, before)
        self._replaced = {}


class Observer:
    """Collects events from all threads until somebody takes them."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._lock = threading.Lock()
        self._results = _torch.ResultReader()
        self._taps = [
            *(LoggerTap(name, self._sink(_torch.parse_break), logging.DEBUG) for name in _torch.BREAK_LOGGERS),
            LoggerTap(_torch.CONVERT_LOGGER, self._sink(_torch.parse_convert), logging.DEBUG),
            *(
                LoggerTap(name, self._sink(_torch.parse_cudagraph_skip), logging.WARNING)
                for name in _torch.CUDAGRAPH_SKIP_LOGGERS
            ),
            LoggerTap(_torch.CUDAGRAPH_RECORD_LOGGER, self._sink(_torch.parse_cudagraph_recording), logging.DEBUG),
        ]
        #: Whether anything was compiled since the last reset, or may have been before the taps were in.
        self.dirty = True
        #: What this torch tells; None until ``check_signals`` has been called.
        self.signals: Signals | None = None
        #: Reports that this plugin failed to understand: counts may be too low.
        self.errors: list[str] = []

    def install(self) -> None:
        self._results.read()
        for tap in self._taps:
            tap.install()

    def remove(self) -> None:
        for tap in reversed(self._taps):
            tap.remove()

    def _sink(self, parse: Parse) -> Callable[[logging.LogRecord], None]:
        def sink(record: logging.LogRecord) -> None:
            # An observer must never break a compilation: the error is kept, and the counts of the
            # test are then reported as not checked.
            try:
                event = parse(record)
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error} in a record of {record.name}")
                return
            if event is not None:
                with self._lock:
                    if isinstance(event, CompileEvent):
                        self.dirty = True
                        self._events += self._results.read()
                    self._events.append(event)

        return sink

    def take(self) -> list[Event]:
        """Return the events since the last call."""
        with self._lock:
            events = [*self._events, *self._results.read()]
            self._events.clear()
        return events

    def reset(self) -> None:
        """Throw compiled code away, and remember that numbers of frames start again."""
        _torch.reset()
        self.dirty = False
        with self._lock:
            self._events += self._results.read()
            self._events.append(ResetEvent())

    def check_signals(self) -> Signals:
        """Find out, once, what this torch tells, by compiling a small function that breaks."""
        if self.signals is None:
            mine = self.take()
            for tap in self._taps:
                tap.muted = True
            try:
                with quiet_trace():
                    _torch.probe()
            except Exception as error:
                self.errors.append(f"{type(error).__name__}: {error} while compiling a small function to listen to")
            finally:
                for tap in self._taps:
                    tap.muted = False
            self.signals = _torch.inspect_signals(self.take())
            with self._lock:
                self._events[:0] = mine
        return self.signals


class GeneratedCode:
    """Hashes the code that inductor generates, or finds in its cache, while it is entered."""

    #: Paths and names of caches, and addresses: they differ though the code is the same.
    _ELSEWHERE = re.compile(r"/\S+|\bc[a-z0-9]{51}\b|0x[0-9a-f]+")

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._taps = [LoggerTap(name, self._see, logging.DEBUG) for name in _torch.OUTPUT_CODE_LOGGERS]

    def _see(self, record: logging.LogRecord) -> None:
        if record.args and str(record.msg).startswith("Output code: "):
            self._parts.append(self._ELSEWHERE.sub("", str(next(iter(record.args)))))

    def __enter__(self) -> None:
        for tap in self._taps:
            tap.install()

    def __exit__(self, *error: object) -> None:
        for tap in self._taps:
            tap.remove()

    @property
    def hash(self) -> str | None:
        """Sixteen hex digits; None: no code was seen."""
        return hashlib.sha256("\n".join(self._parts).encode()).hexdigest()[:16] if self._parts else None


@contextmanager
def quiet_trace() -> Iterator[None]:
    """Keep pytest's log capture off ``torch.__trace``.

    Since pytest 9.1 it attaches to every logger that does not propagate. That makes torch build its
    structured trace for each compilation (about a tenth of the time), and fills reports with it.
    """
    logger = logging.getLogger(_torch.TRACE_LOGGER)
    attached = [h for h in logger.handlers if type(h).__module__ == "_pytest.logging"]
    for handler in attached:
        logger.removeHandler(handler)
    try:
        yield
    finally:
        for handler in attached:
            logger.addHandler(handler)
