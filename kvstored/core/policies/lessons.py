"""What the order saw, noted while a request waits and counted beside the traffic, in the order in which it was seen.

Nothing of it decides anything before the next tables or the next judgement of the rival. Of what does not fit any more the counting begins at once.
"""

from collections.abc import Callable

NOTES_MAX = 4096
"""Some 200 bytes each, and 2 us to count."""


class Lessons:
    def __init__(self) -> None:
        self._notes: list[tuple[Callable[..., None], tuple[object, ...], int]] = []
        """With how often it was noted in a row; 0 where that is not counted."""
        self._size = 0

    def note(self, call: Callable[..., None], *what: object, size: int = 1) -> None:
        """To be called later. `size`: what it holds, as so many notes."""
        self._add(call, what, 0, size)

    def note_often(self, call: Callable[..., None], *what: object) -> None:
        """The same of what is noted many times in a row: it is called once for them, with their number before the rest."""
        last = self._notes[-1] if self._notes else None
        if last is None or not last[2] or last[1] != what or last[0] != call:
            self._add(call, what, 1, 1)
        else:
            self._notes[-1] = call, what, last[2] + 1

    def _add(
        self, call: Callable[..., None], what: tuple[object, ...], times: int, size: int
    ) -> None:
        self._notes.append((call, what, times))
        self._size += size
        if self._size > NOTES_MAX:
            self.count()

    def count(self) -> None:
        notes, self._notes, self._size = self._notes, [], 0
        for call, what, times in notes:
            if times:
                call(times, *what)
            else:
                call(*what)
