from pathlib import Path

import pytest

from kvstored import config
from kvstored.client import Client
from kvstored.client.address import default_address


@pytest.mark.parametrize(
    "environ",
    [
        {},
        {"XDG_RUNTIME_DIR": "/run/user/7"},
        {"XDG_STATE_HOME": "/state"},
        {"XDG_STATE_HOME": "relative", "XDG_RUNTIME_DIR": "relative"},
        {"KVSTORED_STATE_DIR": "/elsewhere"},
        {"KVSTORED_STATE_DIR": "/elsewhere", "XDG_RUNTIME_DIR": "/run/user/7"},
        {"KVSTORED_SOCKET": "/elsewhere/s", "XDG_RUNTIME_DIR": "/run/user/7"},
    ],
)
def test_without_an_address_a_client_goes_where_the_daemon_listens_by_default(
    environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("KVSTORED_SOCKET", "KVSTORED_STATE_DIR", "XDG_RUNTIME_DIR", "XDG_STATE_HOME"):
        monkeypatch.delenv(name, raising=False)
    environ = {"HOME": str(tmp_path)} | environ
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert default_address() == f"unix://{config.load(environ=environ).config.socket}"
    assert Client().address == default_address()
