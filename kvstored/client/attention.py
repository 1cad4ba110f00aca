"""Reports of attention and of working sets, as messages."""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from kvstored.client.keys import Keys, checked
from kvstored.client.links import milliseconds
from kvstored.core.tags import Tag
from kvstored.core.types import NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb


def access_message(
    spec: NamespaceSpec,
    keys: Keys,
    selected: ArrayLike | None,
    mass: Sequence[float],
    tags: Sequence[Tag],
    group: str,
    layer: int | None,
) -> pb.ReportAccessRequest:
    """`selected`: (steps, keys) booleans, oldest step first."""
    names = [each.name for each in spec.groups]
    if group and group not in names:
        raise InvalidArgument(f"no such group name={group!r} groups={names}")
    request = pb.ReportAccessRequest(
        keys=checked(keys).message(),
        group=names.index(group) if group else 0,
        layer=layer,
        mass=mass,
        tags=bytes(tags),
    )
    if selected is not None:
        bits = np.atleast_2d(np.asarray(selected, dtype=np.bool_))
        request.steps = len(bits)
        request.selected = np.packbits(bits, axis=1, bitorder="little").tobytes()
    return request


def resident_message(keys: Keys, deadline_s: float) -> pb.ReportResidentRequest:
    return pb.ReportResidentRequest(
        keys=checked(keys).message(), deadline_ms=milliseconds(deadline_s)
    )
