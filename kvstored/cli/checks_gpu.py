"""What `kvstored doctor` finds about the GPUs that are configured. CuPy is imported only where one is."""

import importlib

from kvstored import units
from kvstored.cli.checks import Finding, Level
from kvstored.config import Config
from kvstored.core.devices import is_stand_in

CHECK = "HBM tier"
_TAKEN_SHARE_MAX = 0.9
"""Of a device: contexts, the engine's weights and activations need some."""


def hbm(config: Config) -> list[Finding]:
    names = config.hbm.devices
    found = [_stand_in(name) for name in names if is_stand_in(name)]
    ordinals = [int(name) for name in names if not is_stand_in(name)]
    return found + (_gpus(ordinals, config.hbm.capacity_bytes) if ordinals else [])


def _stand_in(name: str) -> Finding:
    text = f"{name} is host memory in place of a GPU's: for trials and tests"
    return Finding(CHECK, Level.WARN, text, "name a GPU in hbm.devices, such as 0")


def _gpus(ordinals: list[int], pool_bytes: int) -> list[Finding]:
    try:
        runtime = importlib.import_module("cupy").cuda.runtime
        devices = runtime.getDeviceCount()
    except Exception as error:  # noqa: BLE001 - a broken CUDA installation fails in any way it likes
        remedy = (
            "install the extra cuda12 or cuda13, whichever the driver has, or set hbm.devices=off"
        )
        return [Finding(CHECK, Level.FAIL, f"no GPU can be used: {error}", remedy)]
    found: list[Finding] = []
    for ordinal in ordinals:
        if ordinal >= devices:
            text = f"device {ordinal} is not there: {devices} devices"
            found.append(Finding(CHECK, Level.FAIL, text, "correct hbm.devices"))
            continue
        total_bytes = int(runtime.getDeviceProperties(ordinal)["totalGlobalMem"])
        found.append(_room(ordinal, pool_bytes, total_bytes))
    return found


def _room(ordinal: int, pool_bytes: int, total_bytes: int) -> Finding:
    sizes = f"{units.format_about(pool_bytes)} of {units.format_about(total_bytes)}"
    text = f"device {ordinal}: a pool of {sizes}"
    if pool_bytes > total_bytes * _TAKEN_SHARE_MAX:
        return Finding(CHECK, Level.FAIL, f"{text} does not fit", "lower hbm.capacity")
    return Finding(CHECK, Level.OK, text)
