import grpc
import pytest

from kvstored import errors
from kvstored.errors import KvstoredError
from kvstored.wire import status


def every_error() -> list[type[KvstoredError]]:
    found: list[type[KvstoredError]] = [KvstoredError]
    for value in vars(errors).values():
        if isinstance(value, type) and issubclass(value, KvstoredError) and value not in found:
            found.append(value)
    return found


@pytest.mark.parametrize("kind", every_error())
def test_every_error_class_survives_both_channels(kind: type[KvstoredError]) -> None:
    error = kind("it failed name=value")
    number = status.status_of(error).number
    payload = status.failure_of(error).SerializeToString()
    back = status.error_of(number, payload)
    assert (type(back), str(back)) == (kind, "it failed name=value")
    code = status.status_of(error).grpc_code
    back = status.error_of_grpc(code, "", payload)
    assert (type(back), str(back)) == (kind, "it failed name=value")


@pytest.mark.parametrize("code", [c for c in grpc.StatusCode if c is not grpc.StatusCode.OK])
def test_every_grpc_code_has_an_error_even_without_our_detail(code: grpc.StatusCode) -> None:
    error = status.error_of_grpc(code.name, "from a proxy", None)
    assert isinstance(error, KvstoredError)
    assert type(error) is not KvstoredError or code.name in ("UNKNOWN", "INTERNAL")


def test_codes_of_the_table_exist_in_grpc_and_numbers_are_unique() -> None:
    assert all(hasattr(grpc.StatusCode, s.grpc_code) for s in status.STATUSES)
    assert len(status.BY_NUMBER) == len(status.BY_KIND) == len(status.STATUSES)
    assert status.OK not in status.BY_NUMBER


def test_a_subclass_travels_as_its_nearest_known_base() -> None:
    class Odd(errors.NoSpace):
        pass

    assert status.status_of(Odd("x")).error is errors.NoSpace


def test_unreadable_details_and_unknown_numbers_are_still_typed_errors() -> None:
    assert type(status.error_of(7, b"\xff\xff\xff")) is errors.Busy
    assert type(status.error_of(999, b"")) is KvstoredError
