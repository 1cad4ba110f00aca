"""The keys of one path as a client holds them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb
from kvstored.wire.packing import pack_keys


@dataclass(frozen=True, slots=True)
class Keys:
    """Keys of consecutive blocks of one path, or, `unchained`, of blocks that have nothing to do with each other.

    `parent`: key of the block before the first; empty for a root or where it is not known. `last_valid_tokens`: of a partial last
    block, 0 where it is full. `extra_keys`: mixed in by the daemon, for opaque keys only; token keys hold them already. `first_block`: depth
    of the first key, None where it is not known.
    """

    keys: tuple[bytes, ...]
    parent: bytes = b""
    last_valid_tokens: int = 0
    extra_keys: tuple[bytes, ...] = ()
    unchained: bool = False
    first_block: int | None = None

    @classmethod
    def opaque(
        cls,
        keys: Sequence[bytes],
        *,
        parent: bytes = b"",
        last_valid_tokens: int = 0,
        extra_keys: Sequence[bytes] = (),
        unchained: bool = False,
    ) -> "Keys":
        """Keys that the engine made itself: 8 to 64 bytes each, all of one length."""
        is_root = not parent and not unchained
        first_block = 0 if is_root else None
        return cls(
            tuple(keys), parent, last_valid_tokens, tuple(extra_keys), unchained, first_block
        )

    def __len__(self) -> int:
        return len(self.keys)

    def __iter__(self) -> Iterator[bytes]:
        return iter(self.keys)

    def __getitem__(self, part: slice) -> "Keys":
        """A run of these keys, which knows the block before it."""
        start, stop, step = part.indices(len(self.keys))
        if step != 1:
            raise InvalidArgument(f"a part of a path has no gaps step={step}")
        parent = self.parent if start == 0 else self.keys[start - 1]
        return replace(
            self,
            keys=self.keys[start:stop],
            parent=b"" if self.unchained else parent,
            last_valid_tokens=self.last_valid_tokens if stop == len(self.keys) else 0,
            first_block=None if self.first_block is None else self.first_block + start,
        )

    def message(self) -> pb.Keys:
        packed, key_bytes = pack_keys(self.keys)
        return pb.Keys(
            packed=packed,
            key_bytes=key_bytes,
            parent=self.parent,
            extra_keys=self.extra_keys,
            unchained=self.unchained,
        )
