"""Every known hit ratio of leaf-first LRU on the real traces, replayed on the real core; exits with 1 on any difference.

    python bench/replay_known_values.py [PATTERN ...]

The tests compare the core with an oracle on the heads of these traces only (tests/sim/test_known_values.py); this replays all of them
whole, or those whose name matches one of the patterns (`weka_dev-*`). It takes about a quarter of a millisecond for every block that is stored anew.
"""

import sys
from fnmatch import fnmatch
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "sim")]

from known import KNOWN, TRACES, Known  # type: ignore[import-not-found]  # noqa: E402 - of the tests

from kvstored.core.types import TierId  # noqa: E402
from kvstored.sim.core import CoreModel  # noqa: E402
from kvstored.sim.offline import replay_offline  # noqa: E402
from kvstored.sim.report import Result, offline_setup  # noqa: E402
from kvstored.sim.traces import open_trace  # noqa: E402


def replayed(known: Known) -> Result:
    trace = open_trace(TRACES / known.file)
    capacity = None if known.capacity_blocks is None else {TierId.DRAM: known.capacity_blocks}
    model = CoreModel(trace, policy="lru", capacity_blocks=capacity)
    setup = offline_setup(trace, policy="lru", capacity_blocks=capacity)
    return replay_offline(trace, model, setup, limit=None, advance=lambda _: None)


def main(wanted: list[str]) -> int:
    chosen = [known for known in KNOWN if not wanted or any(fnmatch(str(known), w) for w in wanted)]
    wrong = 0
    for known in chosen:
        done = replayed(known)
        is_right = round(done.block_hit_ratio, 4) == known.ratio
        wrong += not is_right
        print(
            f"{known!s:32} {done.block_hit_ratio:.4f} known {known.ratio:.4f} "
            f"{'ok' if is_right else 'WRONG':5} put {done.put_blocks:>9,} {done.elapsed_s:7.1f} s "
            f"{done.requests / done.elapsed_s:7.0f} requests/s",
            flush=True,
        )
    print(f"{len(chosen) - wrong} of {len(chosen)} known values")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
