from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.methods import (
    ACQUIRE_STORED,
    BY_NAME,
    BY_NUMBER,
    GPU_POOL,
    METHODS,
    PROJECTION,
    REPORT_BULK,
    SEGMENT,
    WAIT_LAYERS,
)

STREAMING_ONLY = {"Put", "Get", "WatchEvents"}


def test_every_method_of_the_service_is_in_the_table_with_its_own_messages() -> None:
    service = pb.DESCRIPTOR.services_by_name["Kvstored"]
    for described in service.methods:
        if described.name in STREAMING_ONLY:
            assert described.name not in BY_NAME
            continue
        method = BY_NAME[described.name]
        assert method.request.DESCRIPTOR is described.input_type
        assert method.response.DESCRIPTOR is described.output_type
    described_names = {described.name for described in service.methods}
    here_only = {
        m.name for m in (SEGMENT, PROJECTION, REPORT_BULK, ACQUIRE_STORED, GPU_POOL, WAIT_LAYERS)
    }
    assert {method.name for method in METHODS} - described_names == here_only


def test_names_and_numbers_are_unique_and_fit_the_header() -> None:
    assert len(BY_NAME) == len(BY_NUMBER) == len(METHODS)
    assert all(0 < number < 1 << 16 for number in BY_NUMBER)
