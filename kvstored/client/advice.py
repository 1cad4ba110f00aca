"""Load or recompute, as messages have it."""

from math import ceil

from kvstored.core.advice import LoadQuestion
from kvstored.core.types import Advice
from kvstored.errors import InvalidArgument
from kvstored.pb import kvstored_pb2 as pb


def ask_for(request: pb.MatchRequest, question: LoadQuestion) -> None:
    """Let this Match answer it too."""
    if not 0 <= question.deadline_s < 4_000_000:
        raise InvalidArgument(f"a time is out of range seconds={question.deadline_s}")
    request.advise = True
    request.deadline_ms = ceil(question.deadline_s * 1000)
    request.prefill_tokens_per_s = question.prefill_tokens_per_s
    request.prefill_flops_per_s = question.prefill_flops_per_s


def advice_of(message: pb.Advice) -> Advice:
    sizes, times = [*message.load_bytes, 0, 0, 0, 0], [*message.load_s, 0.0, 0.0, 0.0, 0.0]
    return Advice(
        load_bytes=(sizes[0], sizes[1], sizes[2], sizes[3]),
        load_s=(times[0], times[1], times[2], times[3]),
        queue_s=message.queue_s,
        total_load_s=message.total_load_s,
        prefill_s=message.prefill_s,
        prefill_source=message.prefill_source,
        split_blocks=message.split_blocks,
        split_tokens=message.split_tokens,
        split_s=message.split_s,
        overlap_blocks=message.overlap_blocks,
        overlap_s=message.overlap_s,
        deadline_blocks=message.deadline_blocks,
        deadline_tokens=message.deadline_tokens,
    )
