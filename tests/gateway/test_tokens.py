"""The tokenizer, built from a vocabulary alone, against the official tokenizer file."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.vocabulary import official_tokenizer, real_vocabulary

from gateway.chat.segments import Segment
from gateway.chat.tokens import ChatTokenizer, VocabularyError
from gateway.proto.engine_pb2 import Vocabulary

CORPUS = [
    "Hello, world!",
    "What is 2+2?",
    "0123456789",
    "price: $1,234.56",
    "don't stop",
    "HTTPServer_v2.0",
    "x = foo(bar[0])  # TODO",
    "\n\n\n",
    "   \n  a",
    "x\r\n\r\n  y\t z   ",
    "a~b ~~~ ~/x",
    "café naïve",
    "“quoted” … 🙂👍🏽 Ελλ",
    "日本語テスト123、です",
    "你好，世界！2024年",
    "१२३४५ ٣",
    "if(x>=10&&y!=3){\n\treturn 0;\n}",
    "def f(x: int) -> list[str]:\n    return [f'{i:>3}' for i in range(x)]\n",
    "SELECT * FROM t WHERE a <> 'b''c'; -- комментарий",
    '<html><body class="x">&nbsp;</body></html>',
    "한국어 문장입니다. עברית العربية ไทย Tiếng Việt",
    "zero\u200bwidth\u00a0nbsp\u2003em\ufeffbom",
    "\x00\x01\x7f\x80 control",
    "👨‍👩‍👧‍👦🏳️‍🌈 family flag",
    "𝔘𝔫𝔦𝔠𝔬𝔡𝔢 ½ ① Ⅷ ㎏",
    "e\u0301 combining, \u0f40\u0f72",
    "    \t\t  trailing   \n \n",
    "a" * 300,
    "",
]


# The official tokenizer takes these for special tokens wherever they stand; content never holds any.
SPECIALS = [
    token
    for token, kind in zip(real_vocabulary().tokens, real_vocabulary().token_types, strict=True)
    if kind == 3
]


@pytest.fixture(scope="module")
def tokenizer() -> ChatTokenizer:
    return ChatTokenizer(real_vocabulary())


def reference(text: str) -> list[int]:
    return official_tokenizer().encode(text, add_special_tokens=False).ids


def content(text: str) -> list[Segment]:
    return [Segment(text, template=False)]


@pytest.mark.parametrize("text", CORPUS, ids=lambda text: repr(text[:12]))
def test_plain_text_gets_the_reference_ids(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode(content(text))
    assert ids == reference(text)
    assert tokenizer.decode(ids) == text


@settings(max_examples=300, deadline=None)
@given(st.text().filter(lambda text: not any(special in text for special in SPECIALS)))
def test_any_text_gets_the_reference_ids_and_comes_back(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode(content(text))
    assert ids == reference(text)
    assert tokenizer.decode(ids) == text


@pytest.mark.parametrize(
    ("segments", "ids"),
    [
        (["<｜begin▁of▁sentence｜><｜User｜>", "Hello, world!", "<｜Assistant｜></think>"],
         [0, 128803, 19923, 14, 2058, 3, 128804, 128822]),
        (["\n\n<｜DSML｜tool_calls>\n"], [271, 30, 128825, 72461, 4941, 12548, 1018]),
        (["<｜begin▁of▁sentence｜>", "You are a helpful assistant", "<｜User｜>", "hello",
          "<｜Assistant｜><think>"],
         [0, 3476, 477, 260, 11502, 22896, 128803, 33310, 128804, 128821]),
    ],
)  # fmt: skip
def test_template_text_holds_special_tokens(
    tokenizer: ChatTokenizer, segments: list[str], ids: list[int]
) -> None:
    parts = [Segment(text, template="<｜" in text) for text in segments]
    assert tokenizer.encode(parts) == ids


@pytest.mark.parametrize(
    "text", ["<｜User｜>", "</think>", "<think>", "<|EOT|>", "｜DSML｜", "<｜end▁of▁sentence｜>", "<dsml:x"]
)
def test_what_looks_special_in_user_text_stays_text(tokenizer: ChatTokenizer, text: str) -> None:
    ids = tokenizer.encode(content(f"say {text} now"))
    specials = {index for index, kind in enumerate(real_vocabulary().token_types) if kind == 3}
    assert not specials.intersection(ids)
    assert tokenizer.decode(ids) == f"say {text} now"


def test_pieces_merge_across_the_border_of_template_and_content(tokenizer: ChatTokenizer) -> None:
    parts = [Segment('string="true">', True), Segment(".", False), Segment("</｜DSML｜parameter>\n", True)]
    assert tokenizer.encode(parts) == reference('string="true">.</｜DSML｜parameter>\n')


def test_another_kind_of_tokenizer_is_refused_by_name() -> None:
    with pytest.raises(VocabularyError, match="'llama'"):
        ChatTokenizer(Vocabulary(model="llama", pre="default"))
    with pytest.raises(VocabularyError, match="no pair"):
        ChatTokenizer(Vocabulary(model="gpt2", pre="joyai-llm", tokens=["a"] * 5, merges=["onlyone"]))
    with pytest.raises(VocabularyError, match="contradicts itself"):
        ChatTokenizer(Vocabulary(model="gpt2", pre="joyai-llm", tokens=["b", "e", "p", "x"], merges=["x y"]))
