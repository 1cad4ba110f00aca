"""Sizes of the presets are those of the published table (bytes a 256-token block, bytes a reusable
point).
"""

import pytest

from kvstored.core.groups import checkpoint_tokens, expected_bytes, put_masks, required_mask
from kvstored.core.namespace import diff, digest
from kvstored.core.types import Access, NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.model.presets import PRESETS, Deployment, preset

DEPLOYMENT = Deployment(revision="r1")


def _required_bytes(spec: NamespaceSpec) -> int:
    return sum(group.bytes_per_block for group in spec.groups if group.is_required)


def _optional_bytes(spec: NamespaceSpec, valid_tokens: int) -> int:
    return sum(
        expected_bytes(group, valid_tokens, spec.block_tokens)
        for group in spec.groups
        if not group.is_required
    )


@pytest.mark.parametrize(
    ("name", "block_bytes", "token_bytes"),
    [
        ("llama-3.1-8b", 33_554_432, 131_072),
        ("deepseek-v3.2", 12_305_408, 48_068),
        ("deepseek-v4-flash", 899_648, 3_514.25),
        ("gpt-oss-120b", 9_437_184, 36_864),
        ("qwen3-next-80b", 6_291_456, 24_576),
    ],
)
def test_a_256_token_block_has_the_bytes_of_the_table(
    name: str, block_bytes: int, token_bytes: float
) -> None:
    spec = preset(name, DEPLOYMENT)
    assert _required_bytes(spec) == block_bytes == token_bytes * 256


@pytest.mark.parametrize(
    ("name", "point_bytes"),
    [("deepseek-v4-flash", 4_934_656), ("qwen3-next-80b", 77_266_944), ("llama-3.1-8b", 0)],
)
def test_a_reusable_point_has_the_bytes_of_the_table(name: str, point_bytes: int) -> None:
    assert _optional_bytes(preset(name, DEPLOYMENT), 256) == point_bytes


def test_the_window_of_gpt_oss_is_128_rows_of_the_table() -> None:
    window = preset("gpt-oss-120b", DEPLOYMENT).groups[1]
    assert expected_bytes(window, window.window_tokens, 256) == 4_718_592


def test_v4_flash_adds_the_open_hca_chunk_only_at_unaligned_points() -> None:
    spec = preset("deepseek-v4-flash", DEPLOYMENT)
    assert _optional_bytes(spec, 128) == 4_934_656
    assert _optional_bytes(spec, 100) == 4_934_656 + 20 * 524_288


def test_v4_flash_places_csa_rows_apart_and_keeps_hca_resident() -> None:
    spec = preset("deepseek-v4-flash", DEPLOYMENT)
    assert [group.name for group in spec.groups if group.access is Access.SPARSE] == ["csa"]
    assert [group.name for group in spec.groups if group.resident] == ["hca"]
    shares = {group.name: group.bytes_per_block / 899_648 for group in spec.groups[:3]}
    assert {name: round(share, 3) for name, share in shares.items()} == {
        "csa": 0.872,
        "indexer": 0.102,
        "hca": 0.026,
    }


@pytest.mark.parametrize("name", PRESETS)
@pytest.mark.parametrize("last_valid_tokens", [0, 1, 100, 128, 255])
def test_what_a_put_stores_is_a_checkpoint_at_its_end(name: str, last_valid_tokens: int) -> None:
    spec = preset(name, DEPLOYMENT)
    have = put_masks(spec, 0, 5, last_valid_tokens, ends_prompt=True)
    end_tokens = 4 * 256 + (last_valid_tokens or 256)
    assert checkpoint_tokens(spec, 5, last_valid_tokens, have) == end_tokens
    assert all(int(mask) & required_mask(spec) == required_mask(spec) for mask in have[:-1])


@pytest.mark.parametrize("name", ["llama-3.1-8b", "gpt-oss-120b", "qwen3-next-80b"])
def test_shards_share_the_bytes_of_one_rank(name: str) -> None:
    one = preset(name, DEPLOYMENT)
    two = preset(name, Deployment(revision="r1", tp=2))
    assert all(group.sharded for group in two.groups)
    assert [2 * group.bytes_per_block for group in two.groups] == [
        group.bytes_per_block for group in one.groups
    ]
    assert digest(one) != digest(two)


def test_replicated_groups_are_stored_once_whatever_tp_is() -> None:
    for name in ("deepseek-v3.2", "deepseek-v4-flash"):
        one, eight = preset(name, DEPLOYMENT), preset(name, Deployment(revision="r1", tp=8))
        assert diff(one, eight) == ["tp: 1 -> 8"]
        assert not any(group.sharded for group in eight.groups)


def test_heads_that_tp_cannot_cut_and_unknown_models_are_refused() -> None:
    with pytest.raises(InvalidArgument, match="tp=4 kv_heads=2"):
        preset("qwen3-next-80b", Deployment(revision="r1", tp=4))
    with pytest.raises(InvalidArgument, match=r"name='gpt-2' known=llama-3\.1-8b, deepseek"):
        preset("gpt-2", DEPLOYMENT)


def test_a_block_size_that_ratio_128_does_not_divide_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="nearest=128"):
        preset("deepseek-v4-flash", Deployment(revision="r1", block_tokens=64))


@pytest.mark.parametrize(
    ("name", "base", "slope"),
    [
        ("llama-3.1-8b", 16.06e9, 524_288),
        ("deepseek-v3.2", 74e9, 999_424),
        ("deepseek-v4-flash", 26e9, 86_016 + 20_480),
        ("gpt-oss-120b", 10.2e9, 294_912),
        ("qwen3-next-80b", 6e9, 196_608),
    ],
)
def test_prefill_flops_are_twice_the_active_parameters_and_grow_with_position(
    name: str, base: float, slope: float
) -> None:
    spec = preset(name, DEPLOYMENT)
    assert spec.flops_base == pytest.approx(base)
    assert spec.flops_slope == slope
