"""Clients whose rights are over and who do not know: whatever they write, nobody else reads it as a block; whatever they read, they are told."""

import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

from kvstored.client import Client, FillStatus, Keys, ReadStatus
from kvstored.errors import LeaseLost, NotFound
from kvstored.pb import kvstored_pb2 as pb
from tests.crash.blocks import content_of, is_right, spec_of
from tests.crash.raw import Filling, Scribbler, acquire, commit, overlap, release, reserve
from tests.crash.served import ROOT, Served, environment, wait_until

SIZE = 64 << 10
BATCH = 16
ARENA = "8MiB"
ARENA_BLOCKS = 128
HOLDER = """
import sys
from kvstored.client import Client
from tests.crash.blocks import spec_of
from tests.crash.raw import reserve
with Client(sys.argv[1]) as client:
    namespace = client.open_namespace(spec_of(64 << 10))
    filling = reserve(client, namespace, [f"late {i:02}".encode() * 4 for i in range(8)], ttl_s=600)
    print("ready", flush=True)
    sys.stdin.read()
"""


class Others:
    """Everyone else: puts ever new blocks and reads each at once."""

    def __init__(self, client: Client) -> None:
        self.client = client
        self.namespace = client.open_namespace(spec_of(SIZE))
        self._numbers = count()

    def put(self) -> list[bytes]:
        keys = [next(self._numbers).to_bytes(32, "big") for _ in range(BATCH)]
        rows = [content_of(key, SIZE) for key in keys]
        assert self.namespace.put(Keys.opaque(keys), rows).committed == BATCH
        return keys

    def read(self, keys: Sequence[bytes]) -> int:
        """Hits; none of them is wrong, whether copied or looked at in place."""
        got = self.namespace.get(Keys.opaque(keys, unchained=True))
        for key, block in zip(keys, got.blocks, strict=True):
            assert block is None or is_right(key, block[0])
        return got.hits

    def turn_over(self, late: Filling) -> None:
        """Fill the whole arena twice: every block can be read, and none lies where the late one writes."""
        for _ in range(2 * ARENA_BLOCKS // BATCH):
            keys = self.put()
            assert self.read(keys) == BATCH
            reading = acquire(self.client, self.namespace, keys)
            assert not any(overlap(place, late.extents) for place in reading.extents)
            release(self.client, reading.lease)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    settings = {"limits.quarantine": "4s", "limits.fill_ttl": "1s"}
    with Served(tmp_path, dram=ARENA, disk="0MiB", settings=settings) as served:
        yield served


@pytest.fixture
def late(served: Served) -> Iterator[Client]:
    with Client(served.address, name="late") as client:
        yield client


@pytest.fixture
def others(served: Served) -> Iterator[Others]:
    with Client(served.address, name="others") as client:
        yield Others(client)


def keys_of_late() -> list[bytes]:
    return [b"late" + number.to_bytes(28, "big") for number in range(8)]


def quarantined_bytes(served: Served) -> int:
    return int(served.stat().tiers[0].quarantined_bytes)


def test_the_space_of_an_expired_fill_is_nobodys_until_the_timer_ends_and_hashed_after_it(
    served: Served, late: Client, others: Others
) -> None:
    namespace = late.open_namespace(spec_of(SIZE))
    filling = reserve(late, namespace, keys_of_late(), ttl_s=0.2)
    with Scribbler(filling.memory):
        wait_until(lambda: served.stat().fills == 0, what="the fills expire")
        assert quarantined_bytes(served) == 8 * SIZE
        assert commit(late, filling) == [FillStatus.LOST] * 8
        others.turn_over(filling)
        wait_until(lambda: quarantined_bytes(served) == 0, what="the quarantine ends")
        assert _blocks_in(others, filling) > 0
    # it went away at last: blocks in its space are right, and still hashed
    assert _blocks_in(others, filling, all_hit=True) > 0


def _blocks_in(others: Others, late: Filling, *, all_hit: bool = False) -> int:
    """Turn the arena over; how many blocks came to lie where the late one writes. Each of them must be verified or is a miss."""
    found = 0
    for _ in range(3 * ARENA_BLOCKS // BATCH):
        keys = others.put()
        hits = others.read(keys)
        assert hits == BATCH or not all_hit
        reading = acquire(others.client, others.namespace, keys)
        for status, must_verify, place in zip(
            reading.status, reading.must_verify, reading.extents, strict=True
        ):
            is_there = overlap(place, late.extents)
            assert status is ReadStatus.MISS or must_verify == is_there
            found += is_there
        found += BATCH - hits
        release(others.client, reading.lease)
    return found


def test_a_view_kept_past_its_lease_raises_at_its_end(
    served: Served, late: Client, others: Others
) -> None:
    keys = others.put()
    view = late.open_namespace(spec_of(SIZE)).get_view(Keys.opaque(keys), ttl_s=0.2)
    wait_until(lambda: served.stat().leases == 0, what="the lease expires")
    for _ in range(2 * ARENA_BLOCKS // BATCH):
        assert others.read(others.put()) == BATCH
    # in quarantine: what it looks at is still there, though nobody promised
    shown = zip(keys, view.blocks, strict=True)
    assert all(block is not None and is_right(key, block[0]) for key, block in shown)
    with pytest.raises(LeaseLost), view:
        pass
    view.release()  # a second end does nothing


def test_a_view_that_is_renewed_is_held(served: Served, late: Client, others: Others) -> None:
    keys = others.put()
    with late.open_namespace(spec_of(SIZE)).get_view(Keys.opaque(keys), ttl_s=0.3) as view:
        for _ in range(6):
            view.renew(0.3)
            assert others.read(others.put()) == BATCH
        assert view.hits == BATCH


@pytest.mark.parametrize("how", ["killed", "restarted"])
def test_a_client_from_before_the_restart_has_lost_everything_and_disturbs_nobody(
    served: Served, late: Client, others: Others, how: str
) -> None:
    keys = others.put()
    namespace = late.open_namespace(spec_of(SIZE))
    filling = reserve(late, namespace, keys_of_late(), ttl_s=600)
    view = namespace.get_view(Keys.opaque(keys), ttl_s=600)
    epoch = served.stat().epoch
    with Scribbler(filling.memory):
        if how == "killed":
            served.kill_daemon()
        else:
            served.restart()
        served.answered(after_epoch=epoch)
        served.recovered()
        assert quarantined_bytes(served) == 8 * SIZE
        with pytest.raises(LeaseLost):
            view.renew(10.0)
        _check_commit_is_lost(late, filling)
        with pytest.raises(LeaseLost):
            view.release()
        assert others.read(keys) == BATCH
        others.turn_over(filling)
        missed = namespace.get(Keys.opaque(keys_of_late(), unchained=True))
        assert missed.hits == 0
        wait_until(lambda: quarantined_bytes(served) == 0, what="the quarantine ends")
        assert _blocks_in(others, filling) > 0


def _check_commit_is_lost(late: Client, filling: Filling) -> None:
    """In its own session, which ended, and in the one that it has now."""
    with pytest.raises(NotFound):
        commit(late, filling)
    assert commit(late, filling, session=late.session()) == [FillStatus.LOST] * 8


def test_the_space_of_a_dead_writer_is_free_at_once(tmp_path: Path) -> None:
    """Also of one that was writing when the daemon before this one died."""
    with Served(tmp_path, dram=ARENA, disk="0MiB", settings={"limits.quarantine": "1h"}) as served:
        for is_restarted in (False, True):
            holder = _holder(served)
            if is_restarted:
                stat = served.kill_daemon()
                served.answered(after_epoch=stat.epoch)
                served.recovered()
                assert quarantined_bytes(served) == 8 * SIZE
            holder.send_signal(signal.SIGKILL)
            holder.communicate(timeout=10)
            wait_until(lambda: _is_at_rest(served.stat()), what="a dead writer's space is free")


def _is_at_rest(stat: pb.StatResponse) -> bool:
    return not (stat.fills or stat.leases or stat.tiers[0].quarantined_bytes) and stat.sessions == 1


def _holder(served: Served) -> subprocess.Popen[str]:
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLDER, served.address],
        env=environment(),
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "ready\n"
    return holder


def test_a_client_that_closes_after_its_gets_keeps_nothing_aside(
    served: Served, others: Others
) -> None:
    """The releases that ride on the next get never left: what had been copied long ago was kept from everyone for the whole quarantine."""
    keys = others.put()
    with Client(served.address) as client:
        namespace = client.open_namespace(spec_of(SIZE))
        assert namespace.get(Keys.opaque(keys)).hits == BATCH
    stat = served.stat()
    assert (stat.leases, stat.tiers[0].leased_bytes) == (0, 0)
