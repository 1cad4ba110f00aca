"""How `serve` becomes the keeper: the plan of what to keep running, handed over in memory, and the jump into a fresh small interpreter.

Imports little: it is part of the keeper.
"""

import json
import os
import sys
from collections.abc import Sequence
from typing import NamedTuple, NoReturn

NON_TEMPORAL = "glibc.cpu.x86_non_temporal_threshold"


class ChildPlan(NamedTuple):
    name: str
    argv: Sequence[str]
    """Gets `--config-fd N --keeper-pid N` appended."""
    keeps_fds: bool
    """May store descriptors, and gets them at its next start."""
    restart_signal: int
    """Asks it to leave quickly, because it will be started again."""


class Plan(NamedTuple):
    state_dir: str
    drain_s: float
    log_json: bool
    children: Sequence[ChildPlan]


def launch(plan: Plan, config_json: str, non_temporal_bytes: int) -> NoReturn:
    """Becomes the keeper: same process, so that a service manager's main pid stays right. `non_temporal_bytes`: what the C library is
    told at the start of every process, 0 for nothing."""
    children = [child._asdict() for child in plan.children]
    plan_json = json.dumps({**plan._asdict(), "children": children})
    fds = [_in_memory("kvstored-plan", plan_json), _in_memory("kvstored-config", config_json)]
    argv = [*python_module("kvstored.keeper"), *map(str, fds)]
    os.execve(sys.executable, argv, tuned(_environ(), non_temporal_bytes))


def tuned(environ: dict[str, str], non_temporal_bytes: int) -> dict[str, str]:
    """With the tunable of glibc, unless the environment has it already: who set it there meant it."""
    tunables = environ.get("GLIBC_TUNABLES", "")
    if not non_temporal_bytes or NON_TEMPORAL in tunables:
        return environ
    told = f"{NON_TEMPORAL}={non_temporal_bytes:#x}"
    return {**environ, "GLIBC_TUNABLES": ":".join(filter(None, (tunables, told)))}


def python_module(name: str) -> list[str]:
    """A command for it in this interpreter; -P: the working directory is no place to import from."""
    return [sys.executable, "-P", "-m", name]


def read_plan(fd: int) -> Plan:
    content = json.loads(os.pread(fd, 2**20, 0))
    children = [ChildPlan(**child) for child in content.pop("children")]
    return Plan(**content, children=children)


def _in_memory(name: str, text: str) -> int:
    fd = os.memfd_create(name, 0)
    os.write(fd, text.encode())
    return fd


def _environ() -> dict[str, str]:
    """A package that runs from its source tree must be found there by its other processes too."""
    root = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
    if root.endswith("-packages"):
        return dict(os.environ)
    inherited = os.environ.get("PYTHONPATH")
    return {**os.environ, "PYTHONPATH": os.pathsep.join([root, *filter(None, [inherited])])}
