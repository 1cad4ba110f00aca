"""How `kvstored match --advise` shows what loading takes."""

from dataclasses import asdict

from kvstored import units
from kvstored.core.types import Advice, TierId


def advice_json(advice: Advice) -> dict[str, object]:
    names = [tier.name.lower() for tier in TierId]
    by_tier = {
        "load_bytes": dict(zip(names, advice.load_bytes, strict=True)),
        "load_s": dict(zip(names, advice.load_s, strict=True)),
    }
    return {**asdict(advice), **by_tier}


def advice_facts(advice: Advice, *, has_deadline: bool) -> dict[str, object]:
    """For a table of two columns."""
    loads = [
        f"{tier.name.lower()} {_milliseconds(advice.load_s[tier])} for {units.format_about(advice.load_bytes[tier])}"
        for tier in TierId
        if advice.load_bytes[tier]
    ]
    shown: dict[str, object] = {"load": ", ".join(loads) or "nothing"}
    shown["load_in_all"] = (
        f"{_milliseconds(advice.total_load_s)}, queue {_milliseconds(advice.queue_s)}"
    )
    if advice.prefill_source:
        shown["prefill"] = f"{_milliseconds(advice.prefill_s)} ({advice.prefill_source})"
        shown["best_split"] = (
            f"load {advice.split_blocks} blocks, compute the rest: {_milliseconds(advice.split_s)}"
        )
        shown["best_overlap"] = (
            f"compute {advice.overlap_blocks} blocks while the rest loads: {_milliseconds(advice.overlap_s)}"
        )
    else:
        shown["prefill"] = "not known: no engine told, and --prefill-tokens-per-s was not given"
    if has_deadline:
        shown["by_the_deadline"] = (
            f"{advice.deadline_blocks} blocks, {advice.deadline_tokens} tokens"
        )
    return shown


def _milliseconds(seconds: float) -> str:
    return f"{seconds * 1000:.2f} ms"
