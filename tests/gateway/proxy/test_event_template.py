"""What matches a template says its text and its ids, and nothing else."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cleave.gateway.proxy import event_template
from cleave.gateway.proxy.event_template import MAX_FORMS, find_template, learn_form

from tests.support.streams import Token, build_event, encode, token_lists

PLAIN = build_event([Token(7, " word")])
CHAT = build_event([Token(7, " word")], chat=True)
THOUGHT = build_event([Token(7, " word")], chat=True, key="reasoning")


@pytest.fixture(autouse=True)
def _no_forms() -> None:
    event_template._forms.clear()


@pytest.mark.parametrize("first", [PLAIN, CHAT, THOUGHT])
@given(values=token_lists)
def test_events_of_a_learned_form_are_read_as_a_parser_reads_them(first, values) -> None:
    learn_form(first)
    template = find_template(first)
    assert template is not None
    key = {PLAIN: "", CHAT: "content", THOUGHT: "reasoning"}[first]
    event = build_event(values, chat=bool(key), key=key)
    text = "".join(token.text for token in values)
    found = template.match(event)
    assert (found is not None) is bool(text)
    if found is not None:
        assert json.loads(b'"%b"' % found[0]) == text
        assert found[1].split(b",") == [b"%d" % token.id for token in values]
        shown = template.start + found[0] + template.shown_end
        assert shown == build_event(values, chat=bool(key), key=key, ids=False)


@given(st.binary(max_size=40), st.integers(0, len(CHAT)), st.integers(0, len(CHAT)))
def test_all_that_differs_in_an_event_that_matches_is_its_text_and_ids(
    change: bytes, start: int, end: int
) -> None:
    learn_form(CHAT)
    template = find_template(CHAT)
    assert template is not None
    event = CHAT[:start] + change + CHAT[max(start, end) :]
    found = template.match(event)
    if found is None:
        return
    text, ids = found
    assert event == CHAT.replace(b" word", text, 1).replace(b"[7]", b"[%b]" % ids)
    assert not set(ids) - set(b"0123456789,]")
    try:
        value = json.loads(event.removeprefix(b"data: "))
    except ValueError:
        return
    (choice,) = value["choices"]
    assert choice["delta"].keys() == {"content"}
    assert choice["finish_reason"] is None
    assert "error" not in value


@pytest.mark.parametrize(
    "event",
    [
        build_event([Token(7, "a")], finish="stop"),
        build_event([Token(7, "a")], index=1),
        build_event([Token(7, "a")], chat=True, index=1),
        build_event([Token(7, "a")], ids=False),
        build_event([Token(7, "")]),
        build_event([Token(7, "a")], prompt_token_ids=[1]),
        PLAIN.replace(b'"logprobs":null', b'"logprobs":{"tokens":["a"]}'),
        PLAIN.replace(b'"model":"m"', b'"model":"m","usage":{"completion_tokens":1}'),
        PLAIN.replace(b'"model":"m"', b'"model":"m","error":{"code":500}'),
        CHAT.replace(b'{"content"', b'{"role":"assistant","content"'),
        CHAT.replace(b'{"content"', b'{"reasoning":"x","content"'),
        CHAT.replace(b"]}\n\n", b'],"choices":[]}\n\n'),
        encode({"choices": [{"text": "a" * 2_000, "index": 0}]}),
        b'data: {"choices":[{"text":"a',
        b"data: [DONE]\n\n",
    ],
    ids=range(15),
)
def test_an_event_that_says_more_is_no_form(event: bytes) -> None:
    learn_form(event)
    assert find_template(event) is None


def test_few_forms_are_remembered() -> None:
    for number in range(3 * MAX_FORMS):
        learn_form(PLAIN.replace(b'"logprobs":null', b'"logprobs":null,"x%d":null' % number))
        assert 0 < len(event_template._forms) <= MAX_FORMS
