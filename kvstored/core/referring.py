"""Write-back of blocks with a content key: who may refer to whom, and what became of it. The references themselves are kept in `frames`."""

from collections.abc import Sequence
from dataclasses import replace

from kvstored.core.books import Books
from kvstored.core.calls import (
    NO_FINGERPRINT,
    Base,
    CopyTask,
    Freed,
    PieceMove,
    Reason,
    Reserve,
    StoredPiece,
)
from kvstored.core.columns import READY
from kvstored.core.frame_classes import warm_base
from kvstored.core.frames import NOBODY, Content, is_coded
from kvstored.core.space import units_in
from kvstored.core.types import NamespaceId, Part, Place, TierId


def tell_contents(books: Books, call: Reserve) -> None:
    """What the blocks of a put contain; of those that are too small to be coded nothing is kept."""
    contents = call.contents
    if contents is None or TierId.NVME not in books.space.books:
        return
    if not is_coded(books.layouts[call.ns].spec):
        return
    rows = books.index.find(call.keys.fingerprints)
    told = (rows >= 0) & (contents != 0)
    books.blocks.content[rows[told]] = contents[told]


def is_behind(books: Books, copy: int) -> bool:
    """Whether a block of the same content is just being written: this copy can refer to it afterwards."""
    content = _content_of(books, int(books.copies.block[copy]), int(books.copies.part[copy]))
    return content is not None and books.space.frames.is_coming(content)


def referring(books: Books, task: CopyTask) -> CopyTask:
    """The task of a write-back, told what its pieces may refer to. What they refer to is kept from now on."""
    content = _content_of(books, int(books.copies.block[task.target_copy]), task.part)
    if task.target is not TierId.NVME or content is None:
        return task
    frames = books.space.frames
    anchor = frames.anchor(content)
    if anchor == NOBODY:
        frames.expect(content, task.target_copy)
        return replace(task, content=content[0])
    moves = tuple(_based(books, move, anchor) for move in task.moves)
    return replace(task, content=content[0], moves=moves)


def keep_references(books: Books, task: CopyTask, stored: Sequence[StoredPiece]) -> None:
    """The pieces are written: references that were not used end."""
    if not task.content:
        return
    for move, kept in zip(task.moves, stored, strict=True):
        if move.base is not None and not kept.refers:
            _release(books, move.target)
    copy, is_alone = task.target_copy, not any(kept.refers for kept in stored)
    is_there = books.copies.block[copy] >= 0
    content = task.content, int(task.part)
    books.space.frames.settle(content, copy, is_alone=is_alone and bool(is_there))
    if is_there and not is_alone:
        warm_base(books, copy)


def note_lossy(books: Books, task: CopyTask, stored: Sequence[StoredPiece]) -> None:
    """A copy is not exact if a piece of it was stored so, or if it was made of one that is not."""
    lossy, copy = books.space.frames.lossy, task.target_copy
    is_lossy = task.source_copy in lossy or any(kept.lossy for kept in stored)
    if is_lossy and books.copies.block[copy] >= 0:
        lossy.add(copy)


def is_lossy(books: Books, block: int) -> bool:
    """Whether what is read of a block is not what was put."""
    lossy = books.space.frames.lossy
    if not lossy:
        return False
    return any(books.fastest_copy(block, part) in lossy for part in books.needed_parts(block))


def not_written(books: Books, task: CopyTask) -> None:
    """The task failed; its references end with its copy."""
    if task.content:
        content = task.content, int(task.part)
        books.space.frames.settle(content, task.target_copy, is_alone=False)


def found_again(books: Books, copy: int) -> None:
    """A copy on NVMe that a scan found whole: it stands for its content if it refers to nothing."""
    content = _content_of(books, int(books.copies.block[copy]), int(books.copies.part[copy]))
    frames = books.space.frames
    if content is None or books.copies.state[copy] != READY:
        return
    if not any(frames.refers(books.place(piece)) for piece in books.pieces_of(copy)):
        frames.settle(content, copy, is_alone=True)


def _content_of(books: Books, block: int, part: int) -> Content | None:
    """Of a block on its own; None where it has none, and for window and state copies, which the whole path shapes."""
    content = books.blocks.content.item(block)
    return (content, int(part)) if content and part != Part.CHECKPOINT else None


def _based(books: Books, move: PieceMove, anchor: int) -> PieceMove:
    piece = books.piece_in(anchor, move.group, move.shard)
    if piece < 0 or int(books.pieces.length[piece]) != move.length:
        return move
    place = books.place(piece)
    books.space.frames.refer(move.target, place, anchor)
    return replace(move, base=Base(books.fingerprint(int(books.copies.block[anchor])), place))


def _release(books: Books, place: Place) -> None:
    needless = books.space.frames.release(place)
    if needless is not None:
        token = books.space.give(TierId.NVME, (needless,))
        books.effects.append(
            Freed(
                TierId.NVME,
                NamespaceId(-1),
                NO_FINGERPRINT,
                (),
                Reason.SUPERSEDED,
                token,
                units_in(needless),
            )
        )
    books.consider_loosened()
