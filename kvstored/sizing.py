"""Whether the configured sizes fit this machine or container: refused before anything starts, or said as a warning."""

from kvstored import machine, units
from kvstored.config import Config
from kvstored.errors import ConfigError

MEMORY_RESERVE_SHARE = 0.05
MEMORY_RESERVE_MIN_BYTES = 128 * 2**20
"""Memory under the limit that the arena must leave for the processes themselves."""


def check_sizes(config: Config) -> list[str]:
    """Refuses sizes that can never fit this machine or container; returns warnings about what does not fit just now."""
    memory = machine.memory_limit()
    reserve_bytes = max(int(memory.limit_bytes * MEMORY_RESERVE_SHARE), MEMORY_RESERVE_MIN_BYTES)
    fits_bytes = max(memory.limit_bytes - reserve_bytes, 0) // 2**20 * 2**20
    wanted = f"dram.capacity={units.format_size(config.dram.capacity_bytes)}"
    if config.dram.capacity_bytes > fits_bytes:
        raise ConfigError(
            f"shared memory does not fit: {wanted} limit={units.format_about(memory.limit_bytes)} "
            f"of={memory.source}; at most {units.format_size(fits_bytes)}"
        )
    warnings = []
    if config.dram.capacity_bytes > memory.available_bytes:
        available = units.format_about(memory.available_bytes)
        warnings.append(
            f"more memory than is free now, the arena grows as far as it can: {wanted} {available=}"
        )
    return warnings + _check_disk(config)


def _check_disk(config: Config) -> list[str]:
    wanted_bytes = config.disk.capacity_bytes
    if not wanted_bytes:
        return []
    space = machine.disk_space(config.disk.path)
    wanted = f"disk.capacity={units.format_size(wanted_bytes)}"
    if wanted_bytes > space.total_bytes:
        raise ConfigError(
            f"disk tier does not fit its filesystem: {wanted} "
            f"total={units.format_about(space.total_bytes)} path={space.filesystem}"
        )
    if wanted_bytes > space.free_bytes + machine.allocated_bytes(config.disk.path):
        free = units.format_about(space.free_bytes)
        return [f"more disk than is free now, the tier fills as far as it can: {wanted} {free=}"]
    return []
