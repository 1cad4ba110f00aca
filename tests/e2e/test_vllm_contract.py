"""What the connectors override is what vLLM calls, release by release: a change there fails here with its name."""

import importlib.util
import inspect
from typing import Any

import pytest

pytestmark = pytest.mark.engine
if importlib.util.find_spec("vllm") is None:
    pytest.skip("vLLM is not in this environment: make e2e", allow_module_level=True)

from vllm.distributed.kv_transfer.kv_connector.v1.base import (  # noqa: E402 - only where it is there
    KVConnectorBase_V1,
    SupportsHMA,
)
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import (  # noqa: E402
    KVConnectorPromMetrics,
    KVConnectorStats,
)

from kvstored.connectors import versions  # noqa: E402
from kvstored.connectors.vllm import KvstoredConnector  # noqa: E402
from kvstored.connectors.vllm_metrics import KvstoredPromMetrics, KvstoredStats  # noqa: E402

try:
    from vllm.v1.kv_offload.tiering.async_lookup import AsyncLookupManager
    from vllm.v1.kv_offload.tiering.base import SecondaryTierManager

    from kvstored.connectors.vllm_tier import KvstoredTier, _Lookups

    TIERS: list[tuple[type, tuple[type, ...]]] = [
        (KvstoredTier, (SecondaryTierManager,)),
        (_Lookups, (AsyncLookupManager,)),
    ]
except ImportError:
    assert not (versions.installed(versions.VLLM) or "").startswith("0.33")
    TIERS = []

PAIRS = [
    (KvstoredConnector, (KVConnectorBase_V1, SupportsHMA)),
    (KvstoredStats, (KVConnectorStats,)),
    (KvstoredPromMetrics, (KVConnectorPromMetrics,)),
    *TIERS,
]


def called(method: Any) -> list[str]:
    """Names of the arguments that vLLM may give, by position."""
    if isinstance(method, property):
        return []
    function = getattr(method, "__func__", method)
    return [
        name
        for name, each in inspect.signature(function).parameters.items()
        if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)
    ]


@pytest.mark.parametrize(("ours", "bases"), PAIRS, ids=lambda each: getattr(each, "__name__", ""))
def test_every_method_takes_what_vllm_gives(ours: type, bases: tuple[type, ...]) -> None:
    assert not inspect.isabstract(ours), getattr(ours, "__abstractmethods__", ())
    checked = 0
    for name, method in vars(ours).items():
        if name.startswith("_") or not callable(getattr(ours, name, None)):
            continue
        base = next(
            (vars(each)[name] for base in bases for each in base.__mro__ if name in vars(each)),
            None,
        )
        assert base is not None, f"vLLM does not call {name} any more"
        theirs = called(base)
        assert called(method)[: len(theirs)] == theirs, f"{name} is called with {theirs}"
        checked += 1
    assert checked > 0


def test_the_connector_is_for_hybrid_models_and_is_a_cache() -> None:
    from vllm.distributed.kv_transfer.kv_connector.v1.base import supports_hma

    assert supports_hma(KvstoredConnector)
    assert KvstoredConnector.requires_piecewise_for_cudagraph({"layerwise": True})
    assert not KvstoredConnector.requires_piecewise_for_cudagraph({})
