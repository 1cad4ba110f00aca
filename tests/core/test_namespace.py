"""Identity of namespaces: golden digests, refusals, and the registry's life of names."""

import ast
import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstored.core.groups
import kvstored.core.keys
import kvstored.core.namespace
import kvstored.core.validation
from kvstored.core.groups import default_block_tokens
from kvstored.core.keys import block_keys, root
from kvstored.core.namespace import (
    NAMESPACES_MAX,
    Namespaces,
    alias,
    canonical,
    diff,
    digest,
    seed,
    validated,
)
from kvstored.core.types import (
    Access,
    CheckpointPolicy,
    GroupKind,
    GroupSpec,
    NamespaceSpec,
)
from kvstored.errors import Corrupt, InvalidArgument, NamespaceMismatch, NoSpace, NotFound
from tests.core.specs import COMPRESSED_4, COMPRESSED_128, HYBRID, LINEAR, PLAIN, STATE, spec_of

GOLDEN_CANONICAL = (
    "6b76732e6e73000101000700000064656661756c740200090000006f72672f6d6f64656c03000200"
    "0000723104000800000062666c6f617431360500030000006e686406000800000001000000000000"
    "00070008000000000100000000000008000800000001000000000000000900080000000100000000"
    "0000000a0008000000626f756e646172790b000800000000000000000000000c0001000000000d00"
    "7b00000001000000730000000100020000006b760200060000006c696e6561720300080000000000"
    "02000000000004000800000001000000000000000500080000000000000000000000060001000000"
    "0007000500000064656e736508000100000000090001000000000a0001000000000b000800000000"
    "00000000000000"
)
GOLDEN_PLAIN = "0c128c400d294d08d948bfad6c6de5870b8019f6bfa4c5dbae196b43148a9eb0"
GOLDEN_HYBRID = "d9b06cf6df0ac76485f4ef00b6b2a4bd9dc6bf0799b34505396ccfe6a302f498"


def test_golden_encoding_and_digests() -> None:
    assert canonical(PLAIN).hex() == GOLDEN_CANONICAL
    assert digest(PLAIN).hex() == GOLDEN_PLAIN
    assert digest(HYBRID).hex() == GOLDEN_HYBRID
    assert seed(digest(PLAIN)) == int.from_bytes(bytes.fromhex(GOLDEN_PLAIN)[:8], "little")


CHANGES: list[tuple[str, NamespaceSpec]] = [
    ("tenant", replace(PLAIN, tenant="other")),
    ("model", replace(PLAIN, model="org/other")),
    ("revision", replace(PLAIN, revision="r2")),
    ("dtype", replace(PLAIN, dtype="float8_e4m3")),
    ("layout", replace(PLAIN, layout="hnd")),
    ("layout_version", replace(PLAIN, layout_version=2)),
    ("block_tokens", replace(PLAIN, block_tokens=16)),
    ("tp", replace(PLAIN, tp=2)),
    ("pp", replace(PLAIN, pp=2)),
    ("checkpoint_policy", replace(PLAIN, checkpoint_policy=CheckpointPolicy.FULL)),
    ("mutable", replace(PLAIN, mutable=True)),
    ("groups", replace(PLAIN, groups=(LINEAR, STATE))),
    ("groups.kv.bytes_per_block", replace(PLAIN, groups=(replace(LINEAR, bytes_per_block=1),))),
    ("groups.kv.access", replace(PLAIN, groups=(replace(LINEAR, access=Access.SPARSE),))),
    ("groups.kv.sharded", replace(PLAIN, groups=(replace(LINEAR, sharded=True),))),
    ("groups.kv.lossy_ok", replace(PLAIN, groups=(replace(LINEAR, lossy_ok=True),))),
    ("groups.kv.resident", replace(PLAIN, groups=(replace(LINEAR, resident=True),))),
]


@pytest.mark.parametrize(("field", "changed"), CHANGES)
def test_each_identity_field_changes_digest_and_keys_and_is_named_by_the_diff(
    field: str, changed: NamespaceSpec
) -> None:
    before, after = digest(PLAIN), digest(changed)
    assert before != after
    assert block_keys(root(before), [1, 2], 16) != block_keys(root(after), [1, 2], 16)
    lines = diff(PLAIN, changed)
    assert lines[0].startswith(f"{field}: ")
    assert len(lines) == 1 or field == "groups"


def test_accounting_fields_are_not_identity() -> None:
    changed = replace(
        PLAIN,
        flops_base=1e9,
        flops_slope=3.0,
        sink_tokens=0,
        recent_tokens=9,
        engine_page_tokens=16,
    )
    assert digest(changed) == digest(PLAIN)
    assert diff(PLAIN, changed) == []


def test_order_of_groups_is_identity_because_it_numbers_their_copies() -> None:
    one, other = spec_of(LINEAR, STATE), spec_of(STATE, LINEAR)
    assert digest(one) != digest(other)
    assert diff(one, other) == ["groups: kv state -> state kv"]


def test_text_cannot_move_between_fields() -> None:
    one = replace(PLAIN, dtype="ab", layout="c")
    assert digest(one) != digest(replace(PLAIN, dtype="a", layout="bc"))


_group = st.builds(
    GroupSpec,
    name=st.text("abc", min_size=1, max_size=2),
    kind=st.just(GroupKind.LINEAR),
    bytes_per_block=st.integers(1, 3),
    access=st.sampled_from(Access),
    sharded=st.booleans(),
)
_spec = st.builds(
    spec_of,
    model=st.text("ab", min_size=1, max_size=2),
    revision=st.text("ab", min_size=1, max_size=2),
    tenant=st.sampled_from(["default", "t"]),
    block_tokens=st.sampled_from([0, 16, 256]),
)
_specs = st.tuples(_spec, st.lists(_group, min_size=1, max_size=3, unique_by=lambda g: g.name)).map(
    lambda pair: replace(pair[0], groups=tuple(pair[1]))
)


@given(_specs, _specs)
def test_digests_are_equal_exactly_when_the_diff_is_empty(
    one: NamespaceSpec, other: NamespaceSpec
) -> None:
    assert (digest(one) == digest(other)) == (diff(one, other) == [])
    assert (digest(one) == digest(other)) == (validated(one) == validated(other))


# --- validation --------------------------------------------------------------------------------


def test_no_block_size_is_filled_in_and_identical_to_asking_for_it() -> None:
    free = spec_of(COMPRESSED_4, COMPRESSED_128, block_tokens=0)
    assert validated(free).block_tokens == 256 == default_block_tokens(free)
    assert digest(free) == digest(replace(free, block_tokens=256))
    assert validated(replace(free, engine_page_tokens=96)).block_tokens == 384


def test_16_tokens_are_legal_where_the_model_allows() -> None:
    assert validated(spec_of(LINEAR, block_tokens=16)).block_tokens == 16
    assert validated(spec_of(COMPRESSED_4, block_tokens=16)).block_tokens == 16


@pytest.mark.parametrize(
    ("block_tokens", "nearest"),
    [
        (16, "128"),
        (100, "128"),
        (200, "128 or 256"),
        (300, "256 or 384"),
        (65_535, "65408 or 65536"),
    ],
)
def test_a_misaligned_block_size_is_refused_with_the_nearest_valid_ones(
    block_tokens: int, nearest: str
) -> None:
    spec = spec_of(COMPRESSED_4, COMPRESSED_128, block_tokens=block_tokens)
    with pytest.raises(InvalidArgument) as refused:
        validated(spec)
    assert str(refused.value).endswith(
        f"block_tokens={block_tokens} multiple_of=128 nearest={nearest}"
    )


def _with_group(**changes: object) -> NamespaceSpec:
    group = replace(replace(LINEAR, name="g"), **changes)  # type: ignore[arg-type]  # REFUSED
    return spec_of(LINEAR, group)


REFUSED: list[tuple[NamespaceSpec, str]] = [
    (replace(PLAIN, model=""), "model must be"),
    (replace(PLAIN, model="a@b"), "must not contain '@'"),
    (replace(PLAIN, revision="a\n"), "revision must be"),
    (replace(PLAIN, dtype="x" * 257), "dtype must be 1 to 256 bytes"),
    (replace(PLAIN, layout="\ud800"), "layout must be"),
    (replace(PLAIN, tenant=""), "tenant must be"),
    (replace(PLAIN, layout_version=-1), "layout_version=-1"),
    (replace(PLAIN, block_tokens=-256), "block_tokens=-256"),
    (replace(PLAIN, block_tokens=1 << 17), "block_tokens=131072"),
    (replace(PLAIN, tp=0), "tp=0"),
    (replace(PLAIN, tp=64, pp=64), r"tp\*pp=4096"),
    (replace(PLAIN, engine_page_tokens=0), "engine_page_tokens=0"),
    (replace(PLAIN, engine_page_tokens=48), "multiple_of=48 nearest=240 or 288"),
    (replace(PLAIN, sink_tokens=-1), "sink_tokens=-1"),
    (replace(PLAIN, flops_base=float("nan")), "flops_base=nan"),
    (replace(PLAIN, flops_slope=-1.0), "flops_slope=-1.0"),
    (replace(PLAIN, groups=()), "groups=0"),
    (replace(PLAIN, groups=tuple(replace(LINEAR, name=str(i)) for i in range(33))), "groups=33"),
    (spec_of(LINEAR, LINEAR), "group names must differ name='kv' count=2"),
    (spec_of(STATE), "at least one linear or compressed"),
    (_with_group(name=" \t"), "group name must be"),
    (_with_group(bytes_per_block=0), "groups.g.bytes_per_block=0"),
    (_with_group(ratio=2), "a linear group has ratio 1 ratio=2"),
    (_with_group(window_tokens=4), "for window groups only"),
    (_with_group(per_block=True), "for window groups only"),
    (_with_group(retention_s=4), "retention_s is for window and state groups"),
    (_with_group(kind=GroupKind.COMPRESSED), "ratio of 2 or more"),
    (_with_group(kind=GroupKind.WINDOW), "window_tokens=0"),
    (_with_group(kind=GroupKind.WINDOW, window_tokens=9, ratio=4), "a window group has ratio 1"),
    (_with_group(kind=GroupKind.STATE, access=Access.SPARSE), "can be sparse"),
    (_with_group(kind=GroupKind.STATE, ratio=48), "multiple_of=48 nearest=240 or 288"),
    (
        spec_of(
            *(replace(COMPRESSED_4, name=str(m), ratio=m) for m in (251, 257, 509)), block_tokens=0
        ),
        "no common multiple",
    ),
    (spec_of(LINEAR, STATE, checkpoint_period_tokens=512), "for the periodic policy only"),
    (
        spec_of(LINEAR, checkpoint_policy=CheckpointPolicy.PERIODIC, checkpoint_period_tokens=512),
        "needs a window or state group",
    ),
    (
        spec_of(
            LINEAR,
            STATE,
            checkpoint_policy=CheckpointPolicy.PERIODIC,
            checkpoint_period_tokens=300,
        ),
        "checkpoint_period_tokens=300 block_tokens=256",
    ),
    (
        spec_of(LINEAR, STATE, checkpoint_policy=CheckpointPolicy.PERIODIC),
        "checkpoint_period_tokens=0",
    ),
]


@pytest.mark.parametrize(("spec", "message"), REFUSED)
def test_a_spec_that_makes_no_sense_is_refused_by_name(spec: NamespaceSpec, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        validated(spec)
    with pytest.raises(InvalidArgument, match=message):
        Namespaces().open(spec, supersede=True)


# --- registry ----------------------------------------------------------------------------------

R1 = PLAIN
R1_OTHER = replace(PLAIN, dtype="float8_e4m3")
R2 = replace(PLAIN, revision="r2")
R3 = replace(PLAIN, revision="r3")


def test_the_same_digest_reopened_is_idempotent() -> None:
    registry = Namespaces()
    first = registry.open(R1, supersede=False)
    assert first.created
    assert not first.revived
    assert first.retired == ()
    assert first.layout.digest == digest(R1)
    assert first.layout.seed == seed(digest(R1))
    for supersede in (False, True):
        again = registry.open(replace(R1, flops_base=5.0), supersede=supersede)
        assert not again.created
        assert not again.revived
        assert again.retired == ()
        assert again.layout is first.layout
    assert registry.list() == (first.layout,)


def test_a_known_alias_with_another_digest_is_refused_with_the_diff_and_nothing_changes() -> None:
    registry = Namespaces()
    registry.open(R1, supersede=False)
    before = registry.to_json()
    with pytest.raises(NamespaceMismatch) as refused:
        registry.open(replace(R1_OTHER, block_tokens=16), supersede=False)
    assert "alias='org/model@r1'" in str(refused.value)
    assert "dtype: bfloat16 -> float8_e4m3; block_tokens: 256 -> 16" in str(refused.value)
    assert registry.to_json() == before


def test_another_tenant_may_use_the_same_alias() -> None:
    registry = Namespaces()
    registry.open(R1, supersede=False)
    assert registry.open(replace(R1_OTHER, tenant="t"), supersede=False).created
    assert registry.resolve("t", "org/model").spec.dtype == "float8_e4m3"


def test_another_revision_lives_beside_the_first_and_leaves_the_bare_name() -> None:
    registry = Namespaces()
    first = registry.open(R1, supersede=False).layout
    second = registry.open(R2, supersede=False)
    assert second.created
    assert second.retired == ()
    assert registry.resolve("default", "org/model") is first
    assert registry.resolve("default", "org/model@r2") is second.layout


def test_supersede_moves_the_bare_name_and_retires_the_earlier_revision() -> None:
    registry = Namespaces()
    first = registry.open(R1, supersede=False).layout
    canary = registry.open(R2, supersede=False).layout
    third = registry.open(R3, supersede=True)
    assert third.created
    assert third.retired == (first,)
    assert registry.resolve("default", "org/model") is third.layout
    assert registry.resolve("default", "org/model@r1") is first
    assert registry.is_retired(first.digest)
    assert not registry.is_retired(canary.digest)
    assert registry.get(first.digest) is first
    assert registry.open(R1, supersede=False).revived is False
    assert registry.is_retired(first.digest)


def test_supersede_replaces_another_identity_of_the_same_alias() -> None:
    registry = Namespaces()
    first = registry.open(R1, supersede=False).layout
    other = registry.open(R1_OTHER, supersede=True)
    assert other.created
    assert other.retired == (first,)
    assert registry.resolve("default", alias(R1)) is other.layout
    assert registry.open(R1, supersede=False).layout is first
    assert registry.resolve("default", alias(R1)) is other.layout


def test_superseding_back_revives_the_earlier_revision() -> None:
    registry = Namespaces()
    first = registry.open(R1, supersede=False).layout
    second = registry.open(R2, supersede=True).layout
    back = registry.open(R1, supersede=True)
    assert back.layout is first
    assert back.revived
    assert not back.created
    assert back.retired == (second,)
    assert not registry.is_retired(first.digest)
    assert registry.open(R1, supersede=True).retired == ()


def test_a_retired_namespace_is_revived_by_opening_it_unless_its_name_is_taken() -> None:
    registry = Namespaces()
    first = registry.open(R1, supersede=False).layout
    assert registry.retire(first.digest) is first
    with pytest.raises(NotFound, match="name='org/model'"):
        registry.resolve("default", "org/model")
    with pytest.raises(NamespaceMismatch):
        registry.open(R1_OTHER, supersede=False)
    assert registry.open(R1, supersede=False).revived
    registry.retire(first.digest)
    registry.open(R2, supersede=False)
    assert not registry.open(R1, supersede=False).revived
    assert registry.resolve("default", "org/model").spec.revision == "r2"


def test_a_removed_namespace_is_gone_and_its_id_is_never_reused() -> None:
    registry = Namespaces()
    first = registry.open(R1, supersede=False).layout
    registry.remove(first.digest)
    for call in (registry.get, registry.remove, registry.retire, registry.is_retired):
        with pytest.raises(NotFound, match=first.digest.hex()):
            call(first.digest)
    assert registry.open(R1_OTHER, supersede=False).layout.id > first.id
    again = Namespaces.from_json(registry.to_json()).open(R2, supersede=False).layout
    assert again.id == first.id + 2


def test_removing_the_last_one_leaves_ids_and_an_empty_registry() -> None:
    registry = Namespaces()
    registry.remove(registry.open(R1, supersede=False).layout.digest)
    restored = Namespaces.from_json(registry.to_json())
    assert len(restored) == 0
    assert restored.open(R1, supersede=False).layout.id == 1


def test_the_number_of_namespaces_is_bounded() -> None:
    registry = Namespaces()
    for i in range(NAMESPACES_MAX):
        registry.open(replace(R1, revision=str(i)), supersede=False)
    with pytest.raises(NoSpace, match=f"max={NAMESPACES_MAX}"):
        registry.open(R2, supersede=True)
    assert registry.open(replace(R1, revision="5"), supersede=False).created is False


_steps = st.lists(
    st.tuples(
        st.sampled_from(["open", "supersede", "retire", "remove"]),
        st.sampled_from([R1, R1_OTHER, R2, R3, replace(R2, tenant="t"), HYBRID]),
    ),
    max_size=14,
)


def _applied(registry: Namespaces, step: str, spec: NamespaceSpec) -> object:
    try:
        match step:
            case "open":
                return registry.open(spec, supersede=False)
            case "supersede":
                return registry.open(spec, supersede=True)
            case "retire":
                return registry.retire(digest(spec))
            case _:
                return registry.remove(digest(spec))
    except (NamespaceMismatch, NotFound) as error:
        return (type(error), str(error))


@given(_steps)
def test_a_restored_registry_behaves_as_the_one_that_was_saved(
    steps: list[tuple[str, NamespaceSpec]],
) -> None:
    registry = Namespaces()
    for step, spec in steps:
        restored = Namespaces.from_json(registry.to_json())
        assert _applied(registry, step, spec) == _applied(restored, step, spec)
        assert registry.to_json() == restored.to_json()
        assert registry.list() == restored.list()


def _saved() -> dict[str, object]:
    registry = Namespaces()
    registry.open(HYBRID, supersede=False)
    saved: dict[str, object] = json.loads(registry.to_json())
    return saved


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("version",), 2),
        (("next_id",), 0),
        (("next_id",), None),
        (("names", 0), ["default", "org/model"]),
        (("names", 0), ["default", "other", digest(HYBRID).hex()]),
        (("names", 0), ["default", "org/model", "00"]),
        (("namespaces",), None),
        (("namespaces", 0, "id"), -1),
        (("namespaces", 0, "digest"), "00" * 32),
        (("namespaces", 0, "spec"), []),
        (("namespaces", 0, "spec", "dtype"), "float8_e4m3"),
        (("namespaces", 0, "spec", "dtype"), 5),
        (("namespaces", 0, "spec", "tp"), "1"),
        (("namespaces", 0, "spec", "tp"), 1.0),
        (("namespaces", 0, "spec", "tp"), 0),
        (("namespaces", 0, "spec", "unknown"), 1),
        (("namespaces", 0, "spec", "groups", 0, "kind"), "other"),
        (("namespaces", 0, "spec", "groups", 0, "ratio"), 8),
        (("namespaces", 0, "spec", "checkpoint_policy"), 1),
    ],
)
def test_a_damaged_registry_is_corrupt(path: tuple[str | int, ...], value: object) -> None:
    saved: object = _saved()
    inner = saved
    for step in path[:-1]:
        inner = inner[step]  # type: ignore[index]  # walks parsed JSON
    inner[path[-1]] = value  # type: ignore[index]
    with pytest.raises(Corrupt):
        Namespaces.from_json(json.dumps(saved))


@given(st.binary(max_size=40) | st.text('{}[]",:0e9 ', max_size=30))
def test_any_other_text_is_corrupt(text: str | bytes) -> None:
    with pytest.raises(Corrupt):
        Namespaces.from_json(text)


@pytest.mark.parametrize(
    "module",
    [
        kvstored.core.groups,
        kvstored.core.keys,
        kvstored.core.namespace,
        kvstored.core.validation,
    ],
)
def test_identity_imports_nothing_that_acts(module: object) -> None:
    path = Path(str(module.__file__))  # type: ignore[attr-defined]  # object: any module
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {name.name.split(".")[0] for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module.split(".")[0])
    allowed = {"kvstored", "numpy", "xxhash", "hashlib", "json", "math", "dataclasses"}
    assert names <= allowed | {"collections", "typing"}
