"""The keys of one path as a client holds them."""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from kvstored.core.frames import is_coded
from kvstored.core.keys import Tokens, block_keys, content_keys, root
from kvstored.core.types import NamespaceSpec
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_keys

ExtraKeys = Iterable[str | bytes] | None
"""Cache salt, LoRA id, image hashes; text stands for its UTF-8, None for nothing."""


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of consecutive blocks of one path, or, `unchained`, of blocks that have nothing to do with each other.

    `parent`: key of the block before the first; empty for a root or where it is not known. `last_valid_tokens`: of a partial last
    block, 0 where it is full. `extra_keys`: mixed in by the daemon, for opaque keys only; token keys hold them already. `first_block`: depth
    of the first key, None where it is not known. `content_keys`: one of 16 bytes a key, equal for blocks with the same tokens at the same position
    whatever is before them, so that they can be stored as what they differ by; none where that is not known.
    """

    keys: tuple[bytes, ...]
    parent: bytes = b""
    last_valid_tokens: int = 0
    extra_keys: tuple[bytes, ...] = ()
    unchained: bool = False
    first_block: int | None = None
    content_keys: tuple[bytes, ...] = field(default=(), compare=False)

    @classmethod
    def opaque(
        cls,
        keys: Sequence[bytes],
        *,
        parent: bytes = b"",
        last_valid_tokens: int = 0,
        extra_keys: ExtraKeys = (),
        unchained: bool = False,
        content_keys: Sequence[bytes] = (),
    ) -> "Keys":
        """Keys that the engine made itself: 8 to 64 bytes each, all of one length."""
        _check_are_bytes(keys)
        if content_keys and len(content_keys) != len(keys):
            raise InvalidArgument(
                f"one content key a key content_keys={len(content_keys)} keys={len(keys)}"
            )
        is_root = not parent and not unchained
        first_block = 0 if is_root else None
        return cls(
            tuple(keys),
            parent,
            last_valid_tokens,
            extra_keys_of(extra_keys),
            unchained,
            first_block,
            tuple(content_keys),
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys)

    def __getitem__(self, part: slice) -> "Keys":
        """A run of these keys, which knows the block before it."""
        _check_is_slice(part)
        start, stop, step = part.indices(len(self.keys))
        if (start, stop, step) == (0, len(self.keys), 1):
            return self
        if step != 1:
            raise InvalidArgument(f"a part of a path has no gaps step={step}")
        parent = self.parent if start == 0 else self.keys[start - 1]
        return replace(
            self,
            keys=self.keys[start:stop],
            parent=b"" if self.unchained else parent,
            last_valid_tokens=self.last_valid_tokens if stop == len(self.keys) else 0,
            first_block=None if self.first_block is None else self.first_block + start,
            content_keys=self.content_keys[start:stop],
        )

    def message(self) -> pb.Keys:
        told = pb.Keys()
        self.tell(told)
        return told

    def tell(self, told: pb.Keys) -> None:
        """Fills in a message without anything."""
        told.packed, told.key_bytes = pack_keys(self.keys)
        told.parent = self.parent
        told.unchained = self.unchained
        if self.extra_keys:
            told.extra_keys.extend(self.extra_keys)


def token_keys(
    digest: bytes, spec: NamespaceSpec, tokens: Tokens, extra_keys: ExtraKeys = ()
) -> Keys:
    """Keys of all blocks of a sequence from its first token, and what they contain where that is of use."""
    root_key, block_tokens = root(digest, extra_keys_of(extra_keys)), spec.block_tokens
    contents = content_keys(root_key, tokens, block_tokens) if is_coded(spec) else ()
    return Keys(
        tuple(block_keys(root_key, tokens, block_tokens)),
        last_valid_tokens=len(tokens) % block_tokens,
        first_block=0,
        content_keys=tuple(contents),
    )


def checked(keys: object) -> Keys:
    """What a call was given as keys, if it is that."""
    if not isinstance(keys, Keys):
        raise InvalidArgument(
            "keys are made by namespace.keys(tokens) or Keys.opaque([key, ...]), "
            f"not given as {type(keys).__name__}"
        )
    return keys


def extra_keys_of(given: object) -> tuple[bytes, ...]:
    """Refuses one text or one bytes in the place of a sequence: its characters would be taken for the keys."""
    if given is None:
        return ()
    if isinstance(given, str | bytes | bytearray | memoryview) or not isinstance(given, Iterable):
        shown = f"{type(given).__name__}; write extra_keys=[...]"
        raise InvalidArgument(f"extra_keys is a sequence of str or bytes, not {shown}")
    return tuple(_extra_key(each) for each in given)


def _extra_key(given: object) -> bytes:
    if isinstance(given, str):
        return given.encode()
    if not isinstance(given, bytes):
        raise InvalidArgument(f"an extra key is str or bytes, not {type(given).__name__}")
    return given


def _check_are_bytes(keys: object) -> None:
    if not isinstance(keys, Sequence) or not all(isinstance(key, bytes) for key in keys):
        raise InvalidArgument("opaque keys are a sequence of bytes: Keys.opaque([key, ...])")


def _check_is_slice(part: object) -> None:
    if not isinstance(part, slice):
        raise InvalidArgument(
            "a part of a path is a slice, keys[0:1]; one key's bytes are keys.keys[0]"
        )
