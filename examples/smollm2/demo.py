"""Several questions over one long document, each asked of an engine without kvstored and of one with it."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from examples.smollm2.daemon import Daemon
from examples.smollm2.engine import BLOCK_TOKENS, Answer, Engine, namespace_spec
from examples.smollm2.model import Model
from examples.smollm2.tokens import chat
from kvstored.client import Client

ANSWER_TOKENS = 12
RULES = (
    "You answer questions about a document. Answer in one short sentence, from the text of the document alone. "
    "If the document does not say it, say that it does not. Do not repeat the question, do not explain how you "
    "found the answer, and do not give advice. Quote names and numbers exactly as they are written. "
    "Write plain English without lists, headings or links. "
)

OnBlock = Callable[[str, int], object]
"""Is told which engine computes, and how many tokens of its prompt are there."""


@dataclass(frozen=True, slots=True)
class Round:
    title: str
    day: str
    """The end of the system prompt."""
    question: str
    before: Callable[[Daemon], float] | None = None
    """What happens to the daemon first; answers how long it was away."""


ROUNDS = (
    Round("first question", "Monday", "What is a Contribution?"),
    Round("second question", "Monday", "When does a patent licence end?"),
    Round("third question", "Monday", "What does the licence say about trademarks?"),
    Round("system prompt changed", "Tuesday", "What is a Contribution?"),
    Round("another question", "Tuesday", "Is there a warranty?"),
    Round("daemon killed (-9)", "Monday", "Who is liable for damages?", Daemon.kill),
    Round("keeper killed too", "Tuesday", "Who is a Licensor?", Daemon.kill_all),
)


@dataclass(frozen=True, slots=True)
class Outcome:
    title: str
    question: str
    text: str
    prompt_tokens: int
    tokens_by_tier: dict[str, int]
    loaded_bytes: int
    saved_flops: float
    without_s: float
    with_s: float
    is_same_text: bool
    is_same_kv: bool
    away_s: float | None

    @property
    def ratio(self) -> float:
        return self.without_s / self.with_s


def rounds(model: Model, document: str, daemon: Daemon, on_block: OnBlock) -> Iterator[Outcome]:
    with Client(daemon.address, timeout_s=10) as client:
        alone, helped = Engine(model), Engine(model, client)
        for each in ROUNDS:
            prompt = chat(f"{RULES}Today is {each.day}.", f"{document}\n\n{each.question}")
            away_s = each.before(daemon) if each.before else None
            without = alone.generate(
                prompt, ANSWER_TOKENS, lambda tokens: on_block("without", tokens)
            )
            answer = helped.generate(
                prompt, ANSWER_TOKENS, lambda tokens: on_block("with kvstored", tokens)
            )
            yield _outcome(each, without, answer, model, away_s)


def _outcome(
    each: Round, without: Answer, answer: Answer, model: Model, away_s: float | None
) -> Outcome:
    spec, tokens = namespace_spec(model), answer.loaded.tokens
    return Outcome(
        title=each.title,
        question=each.question,
        text=answer.text,
        prompt_tokens=answer.prompt_tokens,
        tokens_by_tier=answer.loaded.by_tier,
        loaded_bytes=tokens // BLOCK_TOKENS * spec.groups[0].bytes_per_block,
        saved_flops=tokens * (spec.flops_base + spec.flops_slope * tokens / 2),
        without_s=without.ttft_s,
        with_s=answer.ttft_s,
        is_same_text=answer.ids == without.ids,
        is_same_kv=answer.kv.tobytes() == without.kv.tobytes(),
        away_s=away_s,
    )
