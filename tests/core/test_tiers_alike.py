"""Whatever is read, held, pinned and put after it: from a GPU the same blocks leave as from DRAM, each above a tier that has them too."""

import random

import pytest

from kvstored.core.types import NamespaceSpec, Part, TierId
from tests.core.desk import LINEAR, SPARSE, Desk, spec_of

NAMES = "abcdefghijklmnopqrstuvwxyz"
BLOCKS = 12


class Side:
    """A full tier above one that has everything: DRAM above NVMe, or a GPU above DRAM."""

    def __init__(self, tier: TierId, policy: str, spec: NamespaceSpec) -> None:
        units = BLOCKS * len(spec.groups)
        self.tier = tier
        limits = {"policy": policy, "high": 0.9, "low": 0.6}
        self.desk = (
            Desk(spec, dram=units, nvme=2000, **limits)  # type: ignore[arg-type]  # shares and a name
            if tier is TierId.DRAM
            else Desk(spec, dram=2000, hbm=units, **limits)  # type: ignore[arg-type]  # as above
        )

    def put(self, path: str) -> None:
        self.desk.put(path[-1], under=path[-2] if len(path) > 1 else None)
        if self.tier is TierId.DRAM:
            self.desk.write_back()
        else:
            desk = self.desk
            loads, _ = desk.catalog.prefetch(desk.ns, desk.keys(path[-1]), TierId.HBM, desk.now_s)
            desk.carry(loads)

    def read(self, names: str) -> None:
        desk = self.desk
        here = self.here(names)
        call = desk.namers[0].acquire(desk.session, here, tier=self.tier, load=False)
        acquired = desk.catalog.acquire(call, desk.now_s)
        grant = desk.catalog.grant(acquired.lease, desk.now_s)
        desk.catalog.release(desk.session, [grant.lease], desk.now_s)

    def run(self, names: str) -> None:
        desk = self.desk
        desk.catalog.begin_request(
            desk.session, names.encode(), desk.ns, desk.keys(names), desk.now_s
        )

    def end(self, names: str) -> None:
        desk = self.desk
        desk.catalog.complete_request(desk.session, names.encode(), False, desk.now_s)

    def pin(self, names: str) -> None:
        desk = self.desk
        desk.catalog.pin(
            desk.session, desk.ns, desk.keys(names), hard=True, ttl_s=3600.0, now_s=desk.now_s
        )

    def here(self, names: str) -> str:
        return "".join(name for name in names if self.tier in self.desk.tiers_of(name))

    def room(self) -> None:
        self.desk.catalog.make_room(self.tier, self.desk.now_s)


def history(rng: random.Random) -> list[tuple[str, str]]:
    """Calls with a path each. Requests run while their blocks are there and end in time."""
    calls: list[tuple[str, str]] = []
    left, paths, running = list(NAMES), list[str](), list[str]()
    for _ in range(60):
        what = rng.choice(["put", "put", "put", "read", "read", "run", "end", "pin", "room"])
        if what == "put" and left:
            above = rng.choice(["", *paths[-6:]])
            paths.append(above + left.pop(0))
            calls.append(("put", paths[-1]))
        elif what in ("read", "pin") and paths:
            if what == "read" or rng.random() < 0.15:
                calls.append((what, rng.choice(paths)))
        elif what == "run" and paths and len(running) < 2:
            path = rng.choice(paths[-4:])
            if path not in running:
                running.append(path)
                calls.append(("run", path))
        elif what == "end" and running:
            calls.append(("end", running.pop(0)))
        elif what == "room":
            calls.append(("room", ""))
    return calls


@pytest.mark.parametrize("policy", ["lru", "s3fifo", "composite"])
@pytest.mark.parametrize("sinks", [0, 4], ids=["no sinks", "sinks"])
def test_the_same_blocks_leave_a_gpu_as_leave_dram(policy: str, sinks: int) -> None:
    spec = spec_of("m", LINEAR, sink_tokens=sinks)
    left = 0
    for seed in range(5):
        sides = [Side(tier, policy, spec) for tier in (TierId.DRAM, TierId.HBM)]
        for at, (what, path) in enumerate(history(random.Random(seed))):
            for side in sides:
                side.desk.wait(1.0)
                getattr(side, what)(*([path] if path else []))
            below, above = (side.here(NAMES) for side in sides)
            assert above == below, (seed, at, what, path)
        for side in sides:
            side.desk.catalog.check()
        left += len(NAMES) - len(sides[0].here(NAMES))
    assert left > 40, "nothing had to leave"


def test_sparse_groups_leave_a_gpu_before_the_dense_ones_of_the_same_touch() -> None:
    side = Side(TierId.HBM, "lru", spec_of("m", LINEAR, SPARSE))
    path = NAMES[:BLOCKS]
    for end in range(1, BLOCKS + 1):
        side.put(path[:end])
    side.read(path)
    side.room()
    found = {part: sum(TierId.HBM in side.desk.tiers_of(n, part) for n in path) for part in Part}
    assert (found[Part.DENSE], found[Part.SPARSE]) == (BLOCKS, 2)
