"""Multi-turn conversations of random tokens: each turn sends the whole history plus a question."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from bench.harness.models import VOCAB
from bench.harness.server import CachedTokens, Reply, Server


@dataclass
class Turn:
    """What one turn sent and got, and where its cached history came from."""

    prompt: list[int]
    reply: Reply
    history_tokens: int
    """How many of the prompt's tokens earlier turns had prefilled or generated."""

    @property
    def cached(self) -> CachedTokens:
        return self.reply.cached


@dataclass
class Conversation:
    """A fixed list of questions; the history grows by each question and its reply."""

    questions: list[list[int]]
    history: list[int] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def outputs(self) -> list[list[int]]:
        return [turn.reply.output_ids for turn in self.turns]

    def next_prompt(self) -> list[int]:
        return self.history + self.questions[len(self.turns)]

    def add(self, prompt: list[int], reply: Reply) -> None:
        self.turns.append(Turn(prompt, reply, len(self.history)))
        self.history = prompt + reply.output_ids


def random_tokens(count: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(count)]


def make_conversations(
    count: int, turns: int, *, tokens: int = 200, prefix: Sequence[int] = (), seed: int = 0
) -> list[Conversation]:
    """`count` conversations of `turns` questions of `tokens` tokens; all begin with `prefix`."""
    conversations = []
    for c in range(count):
        questions = [random_tokens(tokens, seed * 10_000 + c * 100 + t) for t in range(turns)]
        questions[0] = [*prefix, *questions[0]]
        conversations.append(Conversation(questions))
    return conversations


def turns_of(conversations: Sequence[Conversation]) -> list[Turn]:
    return [turn for conversation in conversations for turn in conversation.turns]


def converse(
    server: Server,
    conversations: Sequence[Conversation],
    *,
    turns: int | None = None,
    reply_tokens: int = 16,
    flush: bool = True,
    concurrent: bool = False,
) -> Sequence[Conversation]:
    """Run every remaining turn, all conversations abreast, flushing L1 and L2 after each round.

    With `flush` each turn after the first must come back from L3; without it, from wherever the
    server still has it. With `turns` each conversation stops when it has had so many.
    """
    while waiting := [c for c in conversations if len(c.turns) < len(c.questions[:turns])]:
        _one_round(server, waiting, reply_tokens, concurrent=concurrent)
        if flush:
            server.flush_cache()
    return conversations


def converse_at_random(
    server: Server, conversations: Sequence[Conversation], *, at_once: int, flushed: float
) -> None:
    """Run every remaining turn, of up to `at_once` drawn conversations at a time.

    Args:
        flushed: Share of the rounds after which L1 and L2 are flushed.
    """
    dice = random.Random(1)
    while waiting := [c for c in conversations if len(c.turns) < len(c.questions)]:
        chosen = dice.sample(waiting, min(len(waiting), dice.randint(1, at_once)))
        _one_round(server, chosen, 4, concurrent=True)
        if dice.random() < flushed:
            server.flush_cache()


def _one_round(
    server: Server, conversations: Sequence[Conversation], reply_tokens: int, *, concurrent: bool
) -> None:
    prompts = [c.next_prompt() for c in conversations]
    if concurrent:
        replies = server.generate_many(prompts, reply_tokens)
    else:
        replies = [server.generate(prompt, reply_tokens) for prompt in prompts]
    for conversation, prompt, reply in zip(conversations, prompts, replies, strict=True):
        conversation.add(prompt, reply)


def ask(
    server: Server, prompts: Sequence[Sequence[int]], **options: bool
) -> Sequence[Conversation]:
    """A conversation of one turn for each prompt; `flush` and `concurrent` as in `converse`."""
    return converse(server, [Conversation([list(prompt)]) for prompt in prompts], **options)
