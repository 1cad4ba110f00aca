"""What the order saw, noted while a request waits and counted beside the traffic, in the order in which it was seen.

Nothing of it decides anything before the next tables or the next judgement of the rival. Of what does not fit any more the counting begins at once.
"""

from collections.abc import Callable

NOTES_MAX = 4096
"""Some 200 bytes each, and 2 us to count."""


class Lessons:
    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., None], tuple[object, ...]]] = []
        self._size = 0

    def note(self, call: Callable[..., None], *what: object, size: int = 1) -> None:
        """To be called later. `size`: what it holds, as so many notes."""
        self._notes.append((call, what))
        self._size += size
        if self._size > NOTES_MAX:
            self.count()

    def count(self) -> None:
        notes, self._notes, self._size = self._notes, [], 0
        for call, what in notes:
            call(*what)
