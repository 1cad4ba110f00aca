"""How much of a long piece of work one turn of the loop takes: as many rows as some hundred microseconds do, whatever a row costs."""

STEP_MIN, STEP_MAX = 32, 512
TURN_S = 0.001


class Pace:
    """`step` rows are to be taken next."""

    def __init__(self) -> None:
        self.step = STEP_MIN

    def took(self, seconds_s: float) -> None:
        """The last step took so long: those that follow are shorter or longer."""
        if seconds_s > TURN_S:
            self.step = max(STEP_MIN, self.step // 2)
        elif seconds_s < TURN_S / 2:
            self.step = min(STEP_MAX, self.step * 2)
