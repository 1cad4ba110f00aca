import pytest

from bench.peers.figures import Measured, Taken, figures_of, measured_of, quantile
from bench.peers.plan import COLD, GET, MIB, WARM, Shape


def _cell(round_: int, rate: float, copy_rate: float) -> Measured:
    shape = Shape(MIB, 1, 1)
    return Measured(round_, "store", shape, WARM, GET, 1 / rate, 2 / rate, rate, 1.0, copy_rate, 5)


def test_a_quantile_is_the_smallest_value_that_so_many_do_not_exceed() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert quantile(values, 0.5) == 50.0
    assert quantile(values, 0.99) == 99.0
    assert quantile(values, 1.0) == 100.0
    assert quantile([7.0], 0.99) == 7.0
    with pytest.raises(AssertionError):
        quantile([], 0.5)


def test_one_client_is_as_fast_as_its_median_call() -> None:
    turns = [[Taken([0.1, 0.2], 5.0)], [Taken([0.2], 5.0)]]
    copies = [[Taken([0.1], 1.0)]]
    cell = measured_of((0, "store", Shape(MIB, 1, 1), WARM, GET), turns, copies)
    assert cell.rate == MIB / 0.2
    assert cell.copy_rate == MIB / 0.1
    assert cell.ratio == pytest.approx(0.5)
    assert cell.samples == 3


def test_several_clients_are_as_fast_as_what_they_did_together_until_the_last_was_done() -> None:
    """On two cores four clients' median calls do not see that the others wait."""
    turn = [Taken([0.1, 0.1], 0.4), Taken([0.1, 0.1], 0.8)]
    cell = measured_of((0, "store", Shape(MIB, 1, 2), WARM, GET), [turn], [turn])
    assert cell.rate == 4 * MIB / 0.8


def test_a_rate_from_disk_counts_all_the_time() -> None:
    """The kernel reads ahead: most calls are answered from memory, one of them waits for the disk."""
    turn = [Taken([0.01, 0.01, 0.58], 0.6)]
    cell = measured_of((0, "store", Shape(MIB, 1, 1), COLD, GET), [turn], [turn])
    assert cell.rate == pytest.approx(3 * MIB / 0.6)


def test_a_figure_is_the_median_of_its_rounds_and_its_ratio_the_median_of_their_ratios() -> None:
    (figure,) = figures_of([_cell(0, 10.0, 10.0), _cell(1, 30.0, 60.0), _cell(2, 20.0, 100.0)])
    assert figure.rate == 20.0
    assert figure.ratio == 0.5
    assert (figure.ratio_least, figure.ratio_most) == (0.2, 1.0)
    assert figure.rounds == 3
