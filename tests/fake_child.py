"""Stands for the daemon under the keeper: tells its state in a file, keeps a memfd with the keeper, does what its name says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

from kvstored.lifeline import die_with_keeper
from kvstored.notify import Notifier, listen_fds

directory, behaviour = Path(sys.argv[1]), sys.argv[2]
options = dict(zip(sys.argv[3::2], sys.argv[4::2], strict=True))
die_with_keeper(int(options["--keeper-pid"]))
config_fd = int(options["--config-fd"])

fds = listen_fds()
notifier = Notifier.from_environment()
starts = directory / f"{behaviour}.starts"
record = {
    "pid": os.getpid(),
    "fds": {name: os.pread(fd, 100, 0).decode() for name, fd in fds},
    "config": os.pread(config_fd, 1000, 0).decode(),
}
with starts.open("a") as file:
    file.write(json.dumps(record) + "\n")


def drained(*_: object) -> None:
    time.sleep(0.5 if behaviour == "slow" else 0)
    sys.exit(0)


if behaviour == "crash":
    sys.exit(3)
if behaviour == "refuse":
    sys.exit(78)
if behaviour == "poisoned" and fds:
    sys.exit(4)
if behaviour == "stubborn":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
else:
    signal.signal(signal.SIGTERM, drained)
if behaviour in ("store", "poisoned") and not fds:
    for number in range(3):
        memfd = os.memfd_create("segment")
        os.write(memfd, f"content {number}".encode())
        notifier.store(f"segment-{number}", memfd)
        notifier.store(f"segment-{number}", memfd)
    notifier.remove("segment-1")
notifier.ready("here")
while True:
    time.sleep(60)
