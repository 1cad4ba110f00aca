"""What a trace can say of its requests, as an engine would."""

from collections.abc import Sequence

from kvstored.core.hints import NO_HINT, Hint
from kvstored.sim.traces import Request

HINTS = ("outlen", "session")
"""`session` is the label of a kvt1 row; no trace format here knows the stop reason."""


def hint_of(request: Request, hints: Sequence[str]) -> Hint:
    """As far as wanted."""
    if not hints:
        return NO_HINT
    return Hint(
        output_tokens=request.output_tokens if "outlen" in hints else None,
        session=request.tag if "session" in hints else "",
    )
