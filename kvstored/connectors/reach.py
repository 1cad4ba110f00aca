"""Whether the daemon is there: reaches for it in the background, and tells of every change once.

The one place that decides what an error means: a daemon that is away, one that refuses, or a call that is only a miss.
"""

import logging
import threading
from collections.abc import Callable
from typing import TypeVar

from kvstored.client import Client, Namespace, NamespaceSpec
from kvstored.clock import Clock
from kvstored.connectors.breaker import Breaker, State
from kvstored.connectors.options import ConnectorOptions
from kvstored.connectors.statistics import Stat, Statistics
from kvstored.errors import (
    Busy,
    DeadlineExceeded,
    InvalidArgument,
    KvstoredError,
    NotFound,
    PermissionDenied,
    Unavailable,
)

T = TypeVar("T")

log = logging.getLogger("kvstored.connectors")

_GONE = (Unavailable, DeadlineExceeded, NotFound)
"""The daemon, or the namespace in it, is not there any more: open it again."""


class Reach:
    """Thread-safe. Begins to reach for the daemon at once."""

    def __init__(
        self,
        spec: NamespaceSpec,
        options: ConnectorOptions,
        statistics: Statistics,
        *,
        name: str,
        clock: Clock,
    ) -> None:
        self._spec = spec
        self._options = options
        self._statistics = statistics
        self._name = name
        self._clock = clock
        self._client = Client(
            options.address,
            name=name,
            timeout_s=options.load_s,
            connect_timeout_s=options.probe_s,
            clock=clock,
        )
        self._namespace: Namespace | None = None
        self._breaker = Breaker()
        self._changed = threading.Condition()
        self._is_closed = False
        self._logged: set[type[BaseException]] = set()
        threading.Thread(target=self._reach, name="kvstored-reach", daemon=True).start()

    @property
    def state(self) -> State:
        return self._breaker.state

    def connected(self, timeout_s: float) -> bool:
        with self._changed:
            self._changed.wait_for(lambda: self.state is not State.AWAY, timeout_s)
            return self.state is State.UP

    def attempt(self, call: Callable[[Namespace], T], otherwise: T) -> T:
        """Never raises: `otherwise` where the call fails, or is not tried."""
        namespace = self._namespace
        if namespace is None or self.state is not State.UP:
            self._statistics.count(Stat.SKIPPED_CALLS)
            return otherwise
        try:
            found = call(namespace)
        except Exception as error:  # noqa: BLE001 - the border to the engine: a cache never ends it
            self.failed(error)
            return otherwise
        self._breaker.answered()
        return found

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._breaker.refused()
            self._changed.notify_all()
        self._client.close()

    def timed_out(self, wait_s: float) -> None:
        """A lookup had no answer in time; a few of them, one after the other, are an outage."""
        self._statistics.count(Stat.TIMEOUT_ERRORS)
        with self._changed:
            is_new = self._breaker.timed_out()
            self._changed.notify_all()
        if is_new:
            self._statistics.count(Stat.OUTAGES)
            self._told_away(DeadlineExceeded(f"lookups have no answer seconds={wait_s}"))

    def failed(self, error: Exception) -> None:
        if isinstance(error, Unavailable):
            self._statistics.count(Stat.UNAVAILABLE_ERRORS)
        elif isinstance(error, DeadlineExceeded):
            self._statistics.count(Stat.TIMEOUT_ERRORS)
        else:
            self._statistics.count(Stat.OTHER_ERRORS)
        if isinstance(error, _GONE):
            self._lost(error)
        elif not isinstance(error, Busy) and type(error) not in self._logged:
            self._logged.add(type(error))
            log.error("a call failed, a miss: connector=%s", self._name, exc_info=error)

    # ---- the thread

    def _reach(self) -> None:
        """The thread that opens the namespace, again and again while the daemon is away."""
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._is_closed or self.state is State.AWAY)
                if self._is_closed or self.state is State.OFF:
                    return
            began_s = self._clock.elapsed_s()
            try:
                opened = self._client.open_namespace(
                    self._spec, supersede=self._options.supersede, timeout_s=self._options.probe_s
                )
            except (InvalidArgument, PermissionDenied) as error:
                self._refused(error)
                return
            except Exception as error:  # noqa: BLE001 - the border of a thread: told once, tried again
                self._told_away(error)
                with self._changed:
                    wait_s = self._breaker.next_try_s()
                    self._changed.wait_for(lambda: self._is_closed, wait_s)
            else:
                self._reached(opened, self._clock.elapsed_s() - began_s)

    def _reached(self, namespace: Namespace, took_s: float) -> None:
        log.warning(
            "kvstored is there: connector=%s address=%s namespace=%s seconds=%.3f",
            self._name,
            self._client.address,
            namespace.digest.hex()[:16],
            took_s,
        )
        with self._changed:
            if self._is_closed:
                return
            self._namespace = namespace
            self._breaker.reached()
            self._logged.clear()
            self._changed.notify_all()

    def _refused(self, error: KvstoredError) -> None:
        """Told before it shows, so that who asks why finds the reason."""
        log.error(
            "kvstored refuses this engine, its connector is off: connector=%s %s", self._name, error
        )
        with self._changed:
            self._breaker.refused()
            self._changed.notify_all()

    def _told_away(self, error: BaseException) -> None:
        """Once an outage, and for each new kind of error in it."""
        if type(error) not in self._logged:
            self._logged.add(type(error))
            log.warning("kvstored is away, going on without: connector=%s %s", self._name, error)

    def _lost(self, error: BaseException) -> None:
        with self._changed:
            is_new = self._breaker.lost()
            self._changed.notify_all()
        if is_new:
            self._statistics.count(Stat.OUTAGES)
            self._told_away(error)
