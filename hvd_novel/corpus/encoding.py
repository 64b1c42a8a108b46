"""Which encoding the bytes of a novel are in.

A byte order mark decides, then the pattern of NUL bytes (UTF-16 without a mark), then validity as UTF-8. What is
left is mostly GB18030, Big5 or UTF-16, which decode each other's bytes without an error: there the reading with the
most everyday characters and characters frequent by its own standard wins, GB18030 if it is close. Single accented
letters and quotation marks among ASCII are Windows-1252. charset-normalizer judges what none of them explains, unless
there is too little to judge: then it stays UTF-8, whose bad bytes are dropped or make the text undecodable.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import charset_normalizer

MOST_BAD = 0.01
"""The largest share of undecodable bytes (or of control characters) in a usable text."""

UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_NAMES = {"cp950": "big5"}  # the Big5 that Windows writes
_UTF16 = ("utf-16-le", "utf-16-be")
_CHINESE = ("gb18030", "cp950", "big5hkscs")
_SAMPLE_BYTES = 1 << 18  # even, so that a sample of UTF-16 ends between two units
_PLAUSIBLE = 0.15  # of everyday characters: real Chinese prose has 0.5 to 0.8, a wrong reading of it under 0.05
_PLAUSIBLE_SHORT = 0.5  # of everyday and frequent characters, in a text too short for the former
_SHORT = 32  # characters that are not ASCII
_HEAD_START = 2  # of GB18030, in points: one everyday character is not enough for another encoding
_LEAST_BYTES = 64  # that are not ASCII, for charset-normalizer

_SIMPLIFIED = (
    "的一是不了在人有我他这中大来上个国到说们为子和你地出道也时年得就那要下以生会自着去之过家学对可她里后小么心"
    "多天而能好都然没日于起还发成事只作当想看文无开手十用主行方又如前所本见经头面公同三已老从动两长知民样现分将"
    "外但身些与高意进把法此实回二理美点月明其种声全工己话儿者向情部正名定女问力机给等几很业最间新什打便位因重被"
    "走电四第门相次东政海口使教西再平真听世气信北少关并内加化由却代军产入先山五太水万市眼体别处总才场师书比住员"
    "九笑性通目华报立马命张活难神数件安表原车白应路期叫死常提感金何更反合放做系计或司利受光王果亲界及今京务制解"
    "各任至清物台象记边共风战干接它许八特觉望直服毛林题建南度统色字请交爱让认算论百吃义科怎元社术结六功指思非流"
    "每青管夫连远资队跟带花快条院变联言权往展该领传近留红治决周保达办运武半候七必城父强步完革深区即求品士转量空"
    "甚众技轻程告江语英基派满式李息写呢识极令黄德收脸钱党倒未持取设始版双历越史商千片容研像找友孩站广改议形委早"
    "房音火际则首单据导影失拿网香似斯专石若兵弟谁校读志飞观争究包组造落视济喜离虽坏"
)
_TRADITIONAL = (
    "這來個國說們為時會著過學對裡裏後麼沒於還發當無開見經頭從動兩長樣現將與進實點種聲話問機給幾業間電門東聽氣關"
    "並內卻軍產萬體別處總場師書員華報馬張難數車應係計親務記邊風戰幹許覺題統請愛讓認論義術結連遠資隊帶條變聯權領"
    "傳紅決達辦運強區轉眾輕語滿寫識極黃臉錢黨設雙歷廣議際則單據導網專誰讀飛觀爭組視濟離雖壞歲獨師樂聞嗎妳吧嘛喔"
)
_PUNCTUATION = "，。？！：；、“”‘’《》「」『』（）—…　"
_COMMON = frozenset(_SIMPLIFIED + _TRADITIONAL + _PUNCTUATION)

_PRIVATE = re.compile("[\ue000-\uf8ff]")
_BEYOND_TWO_BYTES = re.compile("[\u0800-\ud7ff\ue000-\U0010ffff]")  # of UTF-8
_WESTERN = "àáâãäåæçèéêëìíîïñòóôõöøùúûüßœÀÁÂÄÅÆÇÈÉÊÑÓÖØÚÜŒ‘’“”„–—…«»¡¿£€°©®§·½\xa0".encode("cp1252")
_HIGH_RUN = re.compile(b"[\x80-\xff]+")
_BIG5_PAIR = re.compile(b"[\xa0-\xc6][@-~]")  # looks like a sign or a capital, and an ASCII letter
_CONTROL = re.compile("[\x00-\x08\x0e-\x1f\x7f]")
_BAD = "\udc80"  # stands for an undecodable byte; strict decoding never yields a lone surrogate
_MARK = "hvd_novel.mark"


class UndecodableError(Exception):
    """The bytes are no text in any encoding known here; the message says why."""


@dataclass(frozen=True)
class Decoded:
    """A text, the name of its encoding, and the number of undecodable bytes left out of it."""

    text: str
    encoding: str
    dropped_bytes: int


def decode(data: bytes) -> Decoded:
    """Read `data` in the encoding it is most plausibly in; a byte order mark is not part of the text.

    Raises UndecodableError if more than MOST_BAD of the bytes are left over, or the result looks binary.
    """
    for mark, encoding in _BOMS:
        if data.startswith(mark):
            return decode_as(encoding, data[len(mark) :])
    return decode_as(_detect(data), data)


def decode_as(encoding: str, data: bytes) -> Decoded:
    """Read `data` in `encoding`; raises UndecodableError as `decode` does."""
    marked = data.decode(encoding, _MARK)
    bad = marked.count(_BAD)
    if bad > MOST_BAD * len(data):
        raise UndecodableError(f"undecodable: {bad} of {len(data)} bytes are not {encoding}")
    text = marked.replace(_BAD, "")
    if len(_CONTROL.findall(text)) > MOST_BAD * len(text):
        raise UndecodableError("undecodable: the content looks binary")
    return Decoded(text, _NAMES.get(encoding, encoding), bad)


def detect_lines(sample: bytes) -> str:
    """The encoding of a file of lines in which ASCII is ASCII, from a sample of them; UTF-8 if none fits."""
    try:
        sample.decode("utf-8")
    except UnicodeDecodeError:
        try:
            return _detect_by_content(sample, _CHINESE)
        except UndecodableError:
            pass
    return "utf-8"


def _mark(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    return _BAD * (error.end - error.start), error.end


codecs.register_error(_MARK, _mark)


def _detect(data: bytes) -> str:
    by_nuls = _utf16_by_nuls(data[:_SAMPLE_BYTES])
    if by_nuls is not None:
        return by_nuls
    try:
        data.decode("utf-8")
    except UnicodeDecodeError as error:
        start = max(0, error.start - _SAMPLE_BYTES // 2) & ~1
        return _detect_by_content(data[start : start + _SAMPLE_BYTES], _CHINESE + _UTF16)
    return "utf-8"


def _detect_by_content(sample: bytes, candidates: Sequence[str]) -> str:
    if _is_damaged_utf8(sample):
        return "utf-8"
    if _is_western(sample):
        return "cp1252"
    best = _most_plausible(sample, candidates)
    if best is not None:
        return best
    if _not_ascii(sample) < _LEAST_BYTES:
        return "utf-8"
    match = charset_normalizer.from_bytes(sample).best()
    if match is None:
        raise UndecodableError("undecodable: no known encoding fits")
    return str(match.encoding)


def _most_plausible(sample: bytes, candidates: Sequence[str]) -> str | None:
    readings = [_Reading.of(sample, encoding) for encoding in candidates]
    plausible = [reading for reading in readings if reading.is_plausible]
    return max(plausible, key=lambda reading: reading.points).encoding if plausible else None  # the first of equals


def _utf16_by_nuls(data: bytes) -> str | None:
    """The UTF-16 byte order that the NULs in `data` speak for; None if they show no pattern."""
    low_end, high_end = data[1::2].count(0), data[0::2].count(0)
    few, many = sorted((low_end, high_end))
    if many <= 20 * few or many * 10 < len(data) // 2:
        return None
    order = "utf-16-le" if low_end > high_end else "utf-16-be"
    if many * 2 >= len(data) // 2:
        return order
    return _most_plausible(data, _UTF16) or order  # 一 is U+4E00: a NUL on the other side


def _not_ascii(data: bytes) -> int:
    return len(data.translate(None, bytes(range(128))))


def _is_damaged_utf8(data: bytes) -> bool:
    """Whether most of what is not ASCII is UTF-8.

    Other encodings seldom form its sequences of three bytes by chance; those of two occur in GB18030.
    """
    text = data.decode("utf-8", _MARK)
    bad = text.count(_BAD)
    return bad < 3 * len(_BEYOND_TWO_BYTES.findall(text)) or 4 * bad < _not_ascii(data)


def _is_western(data: bytes) -> bool:
    """Whether `data` is mostly ASCII, and the rest mostly single accented letters and marks of Windows-1252."""
    runs = _HIGH_RUN.findall(data)
    high = b"".join(runs)
    alone = sum(len(run) == 1 for run in runs)
    known = len(high) - len(high.translate(None, _WESTERN)) - len(_BIG5_PAIR.findall(data))
    return 3 * len(high) <= len(data) and 2 * alone >= len(runs) and known >= 0.8 * len(high)


@dataclass(frozen=True)
class _Reading:
    """What speaks for reading bytes in an encoding: counts of the characters that are not ASCII."""

    encoding: str
    foreign: int
    everyday: int
    frequent: int  # and not everyday
    impossible: int

    @classmethod
    def of(cls, data: bytes, encoding: str) -> _Reading:
        counts = Counter(character for character in data.decode(encoding, _MARK) if not character.isascii())
        everyday = sum(counts[character] for character in _COMMON)
        frequent = sum(counts[character] for character in _frequent(encoding))
        impossible = sum(count for character, count in counts.items() if _PRIVATE.match(character))
        return cls(encoding, counts.total(), everyday, frequent, impossible + counts[_BAD])

    @property
    def points(self) -> int:
        head_start = _HEAD_START if self.encoding == "gb18030" else 0
        return 2 * self.everyday + self.frequent - self.impossible + head_start

    @property
    def is_plausible(self) -> bool:
        if self.foreign >= _SHORT or self.encoding in _UTF16:
            return self.everyday >= _PLAUSIBLE * self.foreign
        return self.everyday + self.frequent - self.impossible >= _PLAUSIBLE_SHORT * self.foreign


@cache
def _frequent(encoding: str) -> frozenset[str]:
    """What is not everyday but comes first in `encoding` for being frequent, and its full-width signs."""
    if encoding in _UTF16:
        return _frequent("gb18030") | _frequent("cp950")
    codes = _codes(0xA1, 0xC6, 0x40)
    if encoding == "gb18030":
        codes = _codes(0xA1, 0xA3, 0xA1) + _codes(0xB0, 0xD7, 0xA1)
    return frozenset("".join(code.decode(encoding, "ignore") for code in codes)) - _COMMON


def _codes(first_lead: int, last_lead: int, first_trail: int) -> list[bytes]:
    return [bytes([lead, trail]) for lead in range(first_lead, last_lead + 1) for trail in range(first_trail, 0xFF)]
