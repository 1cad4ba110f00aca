"""The committed conversation of proto/kvstored/v1/golden.json: implementations in other languages are checked against it too."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from google.protobuf.json_format import MessageToDict, ParseDict
from google.protobuf.message import Message

from kvstored.core.keys import block_keys, root
from kvstored.core.namespace import digest
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.namespaces import spec_of

GOLDEN = json.loads(
    (Path(__file__).parents[2] / "proto/kvstored/v1/golden.json").read_text(encoding="utf-8")
)
FACTS: dict[str, Any] = GOLDEN["facts"]
MESSAGES: list[dict[str, Any]] = GOLDEN["messages"]


def type_of(entry: dict[str, Any]) -> type[Message]:
    method = pb.DESCRIPTOR.services_by_name["Kvstored"].methods_by_name[entry["method"]]
    described = method.input_type if entry["side"] == "request" else method.output_type
    made: type[Message] = getattr(pb, described.name)
    return made


def first(method: str, side: str) -> Any:
    entry = next(e for e in MESSAGES if (e["method"], e["side"]) == (method, side))
    return ParseDict(entry["json"], type_of(entry)())


@pytest.mark.parametrize(
    "entry", MESSAGES, ids=[f"{i}-{e['method']}-{e['side']}" for i, e in enumerate(MESSAGES)]
)
def test_a_message_still_encodes_to_its_bytes_and_decodes_from_them(entry: dict[str, Any]) -> None:
    encoded = bytes.fromhex(entry["hex"])
    message = ParseDict(entry["json"], type_of(entry)())
    assert message.SerializeToString(deterministic=True) == encoded
    decoded = type_of(entry).FromString(encoded)
    assert MessageToDict(decoded, preserving_proto_field_name=True) == entry["json"]


def test_the_digest_is_that_of_the_namespace_that_was_opened() -> None:
    asked, opened = first("OpenNamespace", "request"), first("OpenNamespace", "response")
    assert opened.digest.hex() == FACTS["digest"]
    assert digest(spec_of(opened.namespace, caller_tenant="someone else's")) == opened.digest
    assert digest(spec_of(asked.namespace, caller_tenant="default")) == opened.digest


def test_the_keys_are_those_of_the_tokens() -> None:
    start = root(bytes.fromhex(FACTS["digest"]), [key.encode() for key in FACTS["extra_keys"]])
    made = block_keys(start, FACTS["tokens"], FACTS["block_tokens"])
    assert start.hex() == FACTS["root"]
    assert [key.hex() for key in made] == FACTS["keys"]
    for method in ("Match", "Put", "Get", "Reserve", "Acquire"):
        request = first(method, "request")
        inner = {"Put": "reserve", "Get": "acquire"}.get(method)
        keys = (getattr(request, inner) if inner else request).keys
        assert keys.packed == b"".join(made)
        assert keys.key_bytes == 32


def test_the_checksums_are_those_of_the_bytes() -> None:
    data = [bytes.fromhex(each) for each in FACTS["data"]]
    assert [len(each) for each in data] == FACTS["sizes"]
    sums = [xxhash.xxh3_64_intdigest(each) for each in data]
    assert [f"{each:016x}" for each in sums] == FACTS["checksums"]
    puts = [e for e in MESSAGES if (e["method"], e["side"]) == ("Put", "request")]
    sent = [ParseDict(e["json"], pb.PutRequest()) for e in puts]
    assert b"".join(each.data for each in sent) == b"".join(data)
    assert np.frombuffer(sent[-1].checksums, "<u8").tolist() == sums
