"""Where a client finds the daemon of this host when it is not told."""

import os
from pathlib import Path


def default_address() -> str:
    """Of the default configuration, or of KVSTORED_SOCKET and KVSTORED_STATE_DIR: the rule of config.py without what it imports."""
    environ = os.environ  # noqa: TID251 - clients do not load the settings and their dependencies
    if environ.get("KVSTORED_SOCKET"):
        return f"unix://{environ['KVSTORED_SOCKET']}"
    runtime, state = environ.get("XDG_RUNTIME_DIR", ""), environ.get("XDG_STATE_HOME", "")
    home = Path(state) if state.startswith("/") else Path.home() / ".local/state"
    state_dir = Path(environ.get("KVSTORED_STATE_DIR") or home / "kvstored")
    beside = Path(runtime) / "kvstored" if runtime.startswith("/") else state_dir
    return f"unix://{beside / 'kvstored.sock'}"
