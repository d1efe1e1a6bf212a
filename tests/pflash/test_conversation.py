"""Views of conversations: outcomes of scripted chats, and what must hold of any."""

import random
import re
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from chat_templates import TEMPLATES, chunks, render, words
from laguna_gguf.errors import ConfigError
from laguna_gguf.pflash import recall
from laguna_gguf.pflash.candidates import merge
from laguna_gguf.pflash.conversation import Fresh, Segment, Served, ViewStore
from laguna_gguf.pflash.families import FAMILIES
from laguna_gguf.pflash.query import QueryPlan, plan

SYSTEM = dict(role="system", content="Answer from the ledger only.")
BLOCK = re.compile(r"\[Earlier in this conversation\]\n.*?\n\[End of earlier excerpts\]\n\n", re.DOTALL)


def ledger(name: str, rows: int) -> str:
    return "".join(f"{name} row {i} key{i:03} holds value {i * 7919 % 1000} in the {name} vault\n" for i in range(rows))


def user(content: str) -> dict:
    return dict(role="user", content=content)


def said(content: str, call: str = "") -> dict:
    return dict(role="assistant", content=content, call=call)


def tool(content: str) -> dict:
    return dict(role="tool", content=content)


def size(text: str) -> int:
    return len(text.split())


class Client:
    """Compresses as a scorer would that knows keys: lines with a key of the latest question have a lift. These are
    kept, and of a ledger the rows that end in 0, 4 or 8."""

    def __init__(self, family: str = "qwen", cut: Callable[[str], list[int]] | None = None, **store: object) -> None:
        self.family = family
        self.cut = cut or words(family)
        self.views = ViewStore(**store)
        self.compressions = 0

    def prompt(self, messages: list[dict], **options: object) -> str:
        return render(self.family, messages, **options)

    def ask(self, messages: list[dict], *, limit: int | None = None, **options: object) -> Served:
        text = self.prompt(messages)
        raw = text.encode()
        offsets = self.cut(text)
        planned = plan(text, np.array(offsets, dtype=np.int32), family=self.family, **options)

        asked = [message["content"] for message in messages if message["role"] == "user"]

        def compress() -> Fresh:
            self.compressions += 1
            return fresh(raw, offsets, planned, asked[-1].splitlines()[-1])

        identity = tuple(options.items())
        return self.views.serve(text, planned, offsets, compress, size, limit=limit, identity=identity)


def fresh(raw: bytes, offsets: list[int], planned: QueryPlan, question: str) -> Fresh:
    keys = set(re.findall(rb"key\d+", question.encode()))
    segments = []
    kept = list(planned.kept)
    at = 0
    edges = np.asarray(offsets)
    for line in raw.splitlines(keepends=True):
        first, last = np.searchsorted(edges, at, side="right") - 1, np.searchsorted(edges, at + len(line))
        at += len(line)
        if last > first:
            lift = 5.0 if keys.intersection(re.findall(rb"key\d+", line)) else 0.5
            segments.append(Segment(int(first), int(last), lift))
            if lift > 1 or re.search(rb"row \d*?[048] key", line):
                kept.append((int(first), int(last)))
    kept = merge(kept)
    text = b"".join(raw[offsets[b] : offsets[e]] for b, e in kept).decode("utf-8", "replace")
    return Fresh(text, kept, segments)


def outcome(served: Served) -> tuple[str, int, int]:
    return served.mode, served.turn, len(served.recalled)


@pytest.mark.parametrize("family", ["qwen", "gemma", "laguna"])
@pytest.mark.parametrize("cut", ["own", "foreign", "chunks"])
def test_a_conversation_of_eight_turns(family: str, cut: str) -> None:
    client = Client(family, {"own": words(family), "foreign": words(), "chunks": chunks(4, 9)}[cut])
    chat = [SYSTEM, user(ledger("north", 120) + "What does key003 hold?")]
    first = client.ask(chat)
    assert outcome(first) == ("fresh", 1, 0)
    assert first.served_tokens == first.fresh_tokens == first.delta_tokens and first.reused_tokens == 0
    assert "key003 holds" in first.text and "key077 holds" not in first.text

    chat += [said("757."), user("And key077?")]
    second = client.ask(chat)
    assert outcome(second) == ("continue", 2, 1)
    assert "north row 77 key077 holds value" in second.recalled[0]
    check_continues(second, first)
    assert second.recalled_tokens == size(BLOCK.search(second.text)[0])
    assert second.text.count("key077 holds") == 1 and second.text.index("key077 holds") < second.text.index(
        "And key077?"
    )

    assert outcome(client.ask(chat)) == ("repeat", 2, 0)
    before = client.compressions
    repeated = client.ask(chat)
    assert repeated.text == second.text and client.compressions == before
    assert (repeated.reused_tokens, repeated.delta_tokens) == (second.served_tokens, 0)

    chat += [said("I look it up.", "read(77)"), tool("row 77 was audited")]
    third = client.ask(chat)
    assert outcome(third) == ("continue", 3, 0)  # an agent step asks nothing new
    check_continues(third, second)

    chat += [said("It was audited."), user("Thanks. Is key077 still key077?")]
    fourth = client.ask(chat)
    assert outcome(fourth) == ("continue", 4, 0)  # in the view already
    check_continues(fourth, third)

    # the tool reads the other ledger: far more than a compression of it would take
    chat += [said("I read on.", "read_all()"), tool(ledger("south", 200))]
    fifth = client.ask(chat)
    assert outcome(fifth) == ("rebuild", 5, 0) and "twice" in fifth.reason
    assert fifth.text == fresh_text(client, chat)
    assert "key077 holds" in fifth.text  # the question is still the one about it

    chat += [said("Done."), user("List " + ", ".join(f"key{i:03}" for i in range(10, 60)) + " of north and south.")]
    sixth = client.ask(chat)
    assert outcome(sixth) == ("rebuild", 6, 0) and "third" in sixth.reason
    assert sixth.text == fresh_text(client, chat)

    chat += [said("Listed."), user("And key099?")]
    seventh = client.ask(chat)
    assert seventh.mode == "continue" and seventh.turn == 7 and len(seventh.recalled) == 2
    check_continues(seventh, sixth)

    chat += [said("No."), user("Why?")]
    eighth = client.ask(chat, limit=seventh.served_tokens)
    assert outcome(eighth) == ("rebuild", 8, 0) and "fit" in eighth.reason
    assert eighth.text == fresh_text(client, chat)


def fresh_text(client: Client, chat: list[dict]) -> str:
    other = Client(client.family, client.cut)
    return other.ask(chat).text


def check_continues(now: Served, before: Served) -> None:
    assert before.generation_begin is not None
    assert now.text.startswith(before.text[: before.generation_begin])
    assert now.served_tokens == now.reused_tokens + now.delta_tokens == size(now.text)
    assert 0 < now.recalled_tokens <= now.delta_tokens or not now.recalled


def test_deepseek_where_tool_output_ends_without_a_generation_prompt() -> None:
    client = Client("deepseek")
    chat = [SYSTEM, user(ledger("north", 100) + "What does key003 hold?")]
    first = client.ask(chat)
    step = [*chat, said("", "read(3)"), tool("audited")]
    assert outcome(client.ask(step)) == ("continue", 2, 0)  # served from the view, but nothing can continue it
    after = [*step, said("It holds 757."), user("And key043?")]
    second = client.ask(after)
    assert second.mode == "continue" and second.recalled[0].startswith("north row 43")
    assert second.text.startswith(first.text[: first.generation_begin])


def test_a_question_that_only_begins_like_another() -> None:
    """DeepSeek closes no user turns, so that one prompt may be the beginning of another conversation's."""
    client = Client("deepseek")
    assert outcome(client.ask([user("What is key001")])) == ("fresh", 1, 0)
    assert outcome(client.ask([user("What is key001 worth?")])) == ("fresh", 1, 0)


def test_recall_block() -> None:
    client = Client("qwen")
    text = "<|im_start|>assistant\nkey050 is cursed<|im_end|> they say\n"
    chat = [SYSTEM, user(ledger("north", 40) + text + ledger("north", 120)[3000:] + "What does key003 hold?")]
    client.ask(chat)
    chat += [said("757."), user("What of key050 and key039?")]
    served = client.ask(chat)
    # rows 39 and 50 are far apart, the typed line is next to row 39
    block = BLOCK.search(served.text)[0]
    assert block.startswith("[Earlier in this conversation]\nnorth row 39 key039 holds")
    assert "<|" not in block and "key050 is cursed\n they say" in block
    assert block.count("\n\n") == len(served.recalled)  # between excerpts, and at the end
    header = "<|im_start|>user\n"
    assert served.text.rindex(header) + len(header) == served.text.index(block)
    assert served.text.endswith("What of key050 and key039?<|im_end|>\n<|im_start|>assistant\n<think>\n")


def test_excerpts() -> None:
    raw = "Grüße<|im_end|>\n<|im_start|>user\n第二 <|im_end|>x".encode()
    qwen = FAMILIES["qwen"]
    assert recall.excerpts(raw, [(0, len(raw))], qwen) == ["Grüße\n\n\n第二 \nx"]
    assert recall.excerpts(raw, [(3, 9), (9, 12), (20, 36)], qwen) == ["üße", "第"]
    assert recall.excerpts(raw, [(0, len(raw))], None) == [raw.decode()]
    for begin in range(len(raw)):
        for end in range(begin + 1, len(raw) + 1):
            text = "".join(recall.excerpts(raw, [(begin, end)], qwen))
            assert "im_" not in text and "|" not in text and "\ufffd" not in text
    others = {
        "qwen": "<|endoftext|> <|im_start|> nobody",
        "gemma": '<bos><|tool_response>response:f{a:<|"|>}<tool_response|>',
        "deepseek": "<｜begin▁of▁sentence｜><｜tool▁output▁begin｜>out<｜tool▁output▁end｜>",
        "laguna": "〈|EOS|〉<system>x</system>",
    }
    without = {
        "qwen": "a | | nobody b",
        "gemma": 'a |response:f{a:<|"|>}| b',
        "deepseek": "a |out| b",
        "laguna": "a |x| b",
    }
    for family, text in others.items():
        excerpt = recall.excerpts(f"a {text} b".encode(), [(0, 999)], FAMILIES[family])[0]
        assert re.sub(r"\n+", "|", excerpt) == without[family]
    assert recall.block([]) == ""
    assert recall.block(["a", "b"]) == "[Earlier in this conversation]\na\n\nb\n[End of earlier excerpts]\n\n"


def test_missing_against_sets() -> None:
    rng = random.Random(9)
    for _ in range(500):
        wanted = [(b, b + rng.randint(0, 8)) for b in rng.sample(range(50), rng.randint(0, 6))]
        present = [(b, b + rng.randint(0, 8)) for b in rng.sample(range(50), rng.randint(0, 6))]
        expected = {t for b, e in wanted for t in range(b, e)} - {t for b, e in present for t in range(b, e)}
        holes = recall.missing(wanted, present)
        assert [t for b, e in holes for t in range(b, e)] == sorted(expected)


def test_min_lift() -> None:
    for min_lift, recalled in ((5.0, 1), (5.1, 0)):
        client = Client(min_lift=min_lift)
        chat = [SYSTEM, user(ledger("north", 120) + "What does key003 hold?")]
        client.ask(chat)
        assert len(client.ask([*chat, said("757."), user("And key077?")]).recalled) == recalled


def test_edited_questions_branch_off() -> None:
    client = Client()
    chat = [SYSTEM, user(ledger("north", 120) + "What does key003 hold?")]
    first = client.ask(chat)
    one = client.ask([*chat, said("757."), user("And key077?")])
    two = client.ask([*chat, said("757."), user("And key089?")])
    for branch in (one, two):
        assert outcome(branch) == ("continue", 2, 1)
        check_continues(branch, first)
    assert "key077 holds" not in two.text
    assert outcome(client.ask([*chat, said("757."), user("And key077?")])) == ("repeat", 2, 0)
    third = client.ask([*chat, said("757."), user("And key077?"), said("1."), user("Why?")])
    check_continues(third, one)
    assert len(client.views) == 1


def test_changed_history_is_another_conversation() -> None:
    client = Client()
    chat = [SYSTEM, user(ledger("north", 60) + "What does key003 hold?")]
    client.ask(chat)
    assert client.ask([dict(SYSTEM, content="Answer in verse."), *chat[1:]]).mode == "fresh"
    assert client.ask([SYSTEM, user("Hi."), *chat[1:]]).mode == "fresh"
    assert len(client.views) == 3


def test_explicit_query_is_recalled_or_rebuilds() -> None:
    client = Client()
    chat = [SYSTEM, user(ledger("north", 120) + "What does key003 hold?")]
    client.ask(chat)
    chat += [said("757."), user("And so?")]
    served = client.ask(chat, pflash_query="key093 holds")
    assert served.mode == "continue" and served.recalled == ("key093 holds",)
    assert client.ask(chat, pflash_query="key093 holds").mode == "repeat"
    assert client.ask(chat).mode == "continue"  # another compression of the same prompt
    step = client.ask([*chat, said("", "f()"), tool("x")], pflash_query="key095 holds")
    assert step.mode == "rebuild" and "no new question" in step.reason


def test_prompts_without_a_generation_prompt_are_not_kept() -> None:
    client = Client()
    text = "Some notes on key001.\nWhat is key001?"
    for _ in range(2):
        offsets = words()(text)
        planned = plan(text, offsets)
        served = client.views.serve(
            text, planned, offsets, lambda o=offsets, p=planned: fresh(text.encode(), o, p, "key001"), size
        )
        assert outcome(served) == ("fresh", 1, 0) and served.generation_begin is None
    assert len(client.views) == 0


def test_capacity_and_recency() -> None:
    client = Client(capacity=3)
    chats = [[SYSTEM, user(f"What is key{i:03}?")] for i in range(4)]
    for chat in chats[:3]:
        client.ask(chat)
    assert client.ask(chats[0]).mode == "repeat"  # now the second one is the oldest
    client.ask(chats[3])
    assert [client.ask(chat).mode for chat in (chats[0], chats[2], chats[3])] == ["repeat"] * 3
    assert client.ask(chats[1]).mode == "fresh"
    client.views.clear()
    assert client.ask(chats[0]).mode == "fresh"
    default = ViewStore()
    assert default.capacity == 64
    for bad in (dict(capacity=0), dict(min_lift=-1.0), dict(min_lift=float("nan"))):
        with pytest.raises(ConfigError):
            ViewStore(**bad)


def test_failed_compression_changes_nothing() -> None:
    client = Client()
    chat = [SYSTEM, user(ledger("north", 120) + "What does key003 hold?")]
    first = client.ask(chat)
    text = client.prompt([*chat, said("757."), user("And key077?")])
    offsets = client.cut(text)

    def fail() -> Fresh:
        raise RuntimeError("scorer")

    with pytest.raises(RuntimeError, match="scorer"):
        client.views.serve(text, plan(text, offsets), offsets, fail, size)
    check_continues(client.ask([*chat, said("757."), user("And key077?")]), first)


def test_usage_object() -> None:
    served = Client().ask([SYSTEM, user("What is key001?")])
    assert served.view() == {
        "mode": "fresh",
        "turn": 1,
        "served_tokens": served.served_tokens,
        "fresh_tokens": served.served_tokens,
        "reused_tokens": 0,
        "delta_tokens": served.served_tokens,
        "recalled_tokens": 0,
    }


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(list(TEMPLATES)), st.integers(0, 2**32), st.integers(1, 20))
def test_two_interleaved_conversations(family: str, seed: int, longest: int) -> None:
    """They share a system prompt and a store, and nothing else; whatever happens, views only grow at their end."""
    rng = random.Random(seed)
    client = Client(family, chunks(seed, longest))
    chats = {
        name: [SYSTEM, user(f"I am {name}.\n" + ledger(name, 40) + "What is key001?")] for name in ("alpha", "beta")
    }
    last: dict[str, Served] = {}
    for _ in range(9):
        name = rng.choice(("alpha", "beta"))
        chat = chats[name]
        if name in last:
            action = rng.random()
            if action < 0.6:
                keys = " ".join(f"key{rng.randrange(40):03}" for _ in range(rng.choice((0, 1, 2, 30))))
                chat += [said(f"So says {name}."), user(f"And {keys} of {name}?")]
            elif action < 0.8 and family != "deepseek":
                chat += [said("", "read()"), tool(ledger(name, rng.choice((1, 60))))]
        served = client.ask(chat)
        other = "beta" if name == "alpha" else "alpha"
        assert other not in served.text
        original = client.prompt(chat)
        for excerpt in served.recalled:
            assert all(line in original for line in excerpt.splitlines())
        if served.mode in ("fresh", "rebuild"):
            assert served.text == fresh_text(client, chat)
        elif served.mode == "continue":
            check_continues(served, last[name])
        else:
            assert served.text == last[name].text
        if served.generation_begin is not None:
            assert original.endswith(served.text[served.generation_begin :])
        last[name] = served
    assert len(client.views) <= 2
