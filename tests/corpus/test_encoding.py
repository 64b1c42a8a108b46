from __future__ import annotations

import random

import pytest

from hvd_novel.corpus.encoding import UndecodableError, decode
from tests.corpus.texts import SIMPLIFIED, TRADITIONAL

ENGLISH = "It was a dark and stormy night; the rain fell in torrents, and nobody was abroad.\n" * 5
CASES = [
    ("utf-8", "utf-8", SIMPLIFIED),
    ("utf-8-sig", "utf-8", SIMPLIFIED),
    ("utf-16", "utf-16-le", SIMPLIFIED),  # with a byte order mark
    ("utf-16-le", "utf-16-le", SIMPLIFIED),
    ("utf-16-be", "utf-16-be", SIMPLIFIED),
    ("utf-16-le", "utf-16-le", TRADITIONAL),
    ("utf-16-le", "utf-16-le", ENGLISH),
    ("utf-16-be", "utf-16-be", ENGLISH),
    ("gb18030", "gb18030", SIMPLIFIED),
    ("gb18030", "gb18030", SIMPLIFIED + "䶮𠀀😀"),  # four-byte codes
    ("gbk", "gb18030", TRADITIONAL),
    ("big5", "big5", TRADITIONAL),
    ("big5hkscs", "big5hkscs", TRADITIONAL + "佢哋喺度食嘢，嗰個人話冇問題。" * 3),
    ("ascii", "utf-8", ENGLISH),
]


@pytest.mark.parametrize("line_end", ["\n", "\r\n"], ids=["lf", "crlf"])
@pytest.mark.parametrize("repeat", [1, 50])
@pytest.mark.parametrize(("codec", "expected", "text"), CASES, ids=[f"{c[0]}-{i}" for i, c in enumerate(CASES)])
def test_encodings_are_recognised_and_read_exactly(
    codec: str, expected: str, text: str, repeat: int, line_end: str
) -> None:
    text = line_end.join([text] * repeat) + line_end
    decoded = decode(text.encode(codec))
    assert decoded.text == text
    assert (decoded.encoding, decoded.dropped_bytes) == (expected, 0)


def test_utf16_big_endian_with_byte_order_mark() -> None:
    assert decode(b"\xfe\xff" + SIMPLIFIED.encode("utf-16-be")).text == SIMPLIFIED


@pytest.mark.parametrize("codec", ["utf-16-le", "utf-16-be"])
def test_cyrillic_utf16_whose_bytes_are_all_ascii(codec: str) -> None:
    text = "Я помню чудное мгновенье: передо мной явилась ты,\n" * 5
    assert decode(text.encode(codec)).text == text


@pytest.mark.parametrize(
    ("codec", "text"),
    [
        ("cp1252", "“I don’t know,” she said, and the café was closed for the whole of the summer.\n" * 20),
        ("shift_jis", "吾輩は猫である。名前はまだ無い。どこで生れたかとんと見当がつかぬ。\n" * 20),
        ("cp1251", "Я помню чудное мгновенье: передо мной явилась ты, как мимолётное виденье.\n" * 20),
    ],
)
def test_other_encodings_are_left_to_charset_normalizer(codec: str, text: str) -> None:
    assert decode(text.encode(codec)).text == text


@pytest.mark.parametrize(
    ("codec", "tail"), [("gb18030", SIMPLIFIED), ("big5", TRADITIONAL), ("cp1252", "the café – “closed” – was dark. ")]
)
def test_what_is_not_ascii_may_come_late(codec: str, tail: str) -> None:
    text = ENGLISH * 1000 + tail * 20
    assert decode(text.encode(codec)).text == text


@pytest.mark.parametrize("codec", ["utf-8", "gb18030", "cp950"])
def test_a_few_bad_bytes_are_dropped_and_counted(codec: str) -> None:
    text = TRADITIONAL * 10
    data = text.encode(codec)
    cut = len((TRADITIONAL * 4).encode(codec))
    bad = data[:cut] + b"\xff" * 7 + data[cut:] + b"\xff\xff"
    decoded = decode(bad)
    assert decoded.text == text
    assert decoded.dropped_bytes == 9


def test_a_file_cut_inside_a_character() -> None:
    text = SIMPLIFIED * 5
    for codec in ("utf-8", "gb18030", "utf-16"):
        decoded = decode(text.encode(codec)[:-1])
        assert decoded.text == text[:-1]
        assert decoded.dropped_bytes in (1, 2)


@pytest.mark.parametrize("codec", ["utf-8", "gb18030"])
def test_the_limit_is_one_byte_in_a_hundred(codec: str) -> None:
    good = (SIMPLIFIED * 10).encode(codec)
    most = len(good) // 99
    assert decode(good + b"\xff" * most).dropped_bytes == most
    with pytest.raises(UndecodableError, match=rf"{most + 30} of {len(good) + most + 30} bytes are not {codec}"):
        decode(good + b"\xff" * (most + 30))


def test_scattered_damage_does_not_turn_utf8_into_another_encoding() -> None:
    generator = random.Random(0)
    data = bytearray((SIMPLIFIED * 20).encode())
    for position in generator.sample(range(len(data)), len(data) // 500):
        data[position] = 0xFF
    decoded = decode(bytes(data))
    assert decoded.encoding == "utf-8"
    assert 0 < decoded.dropped_bytes < len(data) // 100
    for position in generator.sample(range(len(data)), len(data) // 10):
        data[position] = 0xFF
    with pytest.raises(UndecodableError, match="are not utf-8"):
        decode(bytes(data))


@pytest.mark.parametrize("text", ["修仙", "天下大势，分久必合。", "第一章 风起", "凡人修仙传", "你好", "名侦探"])
@pytest.mark.parametrize("codec", ["gb18030", "cp950"])
def test_short_texts(codec: str, text: str) -> None:
    data = text.encode(codec, "ignore")
    decoded = decode(data)
    assert decoded.text == data.decode(codec)
    assert decoded.encoding == {"cp950": "big5"}.get(codec, codec)


@pytest.mark.parametrize(("codec", "text"), [("gb18030", SIMPLIFIED), ("cp950", TRADITIONAL)])
@pytest.mark.parametrize("length", [4, 5, 7, 12])
def test_pieces_of_prose_are_never_read_wrongly(codec: str, text: str, length: int) -> None:
    pieces = [text[start : start + length] for start in range(len(text) - length)]
    read = 0
    for piece in pieces:
        try:
            assert decode(piece.encode(codec)).text == piece
        except UndecodableError:  # little but quotation marks
            continue
        read += 1
    assert read >= 0.95 * len(pieces)


def test_little_utf16_with_the_character_that_has_a_nul_byte() -> None:
    for codec in ("utf-16-le", "utf-16-be"):
        assert decode("他们女儿明儿一早就到".encode(codec)).text == "他们女儿明儿一早就到"


@pytest.mark.parametrize(
    "text",
    [
        "café noir",
        "A naïve cliché.",
        "Größe über alles",
        "À l’été, une créée forêt. " * 20,
        "£5 note…",
    ],
)
def test_a_few_accents_among_ascii_are_western(text: str) -> None:
    decoded = decode(text.encode("cp1252"))
    assert (decoded.text, decoded.encoding) == (text, "cp1252")


@pytest.mark.parametrize("data", [b"ok\xff\xfe ok", b"\x80\xff\x81", "Привет".encode("cp1251"), b"\xff"])
def test_too_little_to_judge_is_not_guessed(data: bytes) -> None:
    with pytest.raises(UndecodableError, match="are not utf-8"):
        decode(data)
    assert decode(data + b"x" * 700).text.endswith("x" * 700)


def test_binary_content_is_refused() -> None:
    noise = random.Random(0).randbytes(20_000)
    for data in (noise, bytes(range(128)) * 100, b"\x00" * 1000, bytes(b | 0x80 for b in noise)):
        with pytest.raises(UndecodableError, match="undecodable"):
            decode(data)


def test_nothing_and_a_bare_byte_order_mark() -> None:
    assert decode(b"").text == ""
    assert decode(b"\xef\xbb\xbf").text == ""
    assert decode(b"\xff\xfe").text == ""
