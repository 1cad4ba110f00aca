import pytest

from kvstored import native


@pytest.fixture(scope="session")
def copies() -> native.Copies:
    if native.copies is None:
        pytest.skip(f"the client's copies in C are not here: {native.state}")
    return native.copies
