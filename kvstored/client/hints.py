"""What a caller knows of a request, as a message."""

from kvstored.core.hints import NO_HINT, Hint
from kvstored.pb import kvstored_pb2 as pb


def hint_message(hint: Hint) -> pb.Hint | None:
    if hint is NO_HINT or hint == NO_HINT:
        return None
    return pb.Hint(
        follow_up=pb.FollowUp.Name(hint.follow_up),
        output_tokens=hint.output_tokens,
        session=hint.session,
        category=hint.category,
        priority=hint.priority,
        retention_s=round(hint.retention_s),
    )
