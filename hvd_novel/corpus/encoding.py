"""Which encoding the bytes of a novel are in.

A byte order mark decides, then the pattern of NUL bytes (UTF-16 without a mark), then validity as UTF-8. What is
left is mostly GB18030, Big5 or UTF-16, which decode each other's bytes without an error: there the reading that
consists most of everyday Chinese characters wins. charset-normalizer judges what none of them explains.
"""

from __future__ import annotations

import codecs
import re
from collections import Counter
from dataclasses import dataclass

import charset_normalizer

MOST_BAD = 0.01
"""The largest share of undecodable bytes (or of control characters) in a usable text."""

UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)

_BOMS = ((codecs.BOM_UTF8, "utf-8"), (codecs.BOM_UTF16_LE, "utf-16-le"), (codecs.BOM_UTF16_BE, "utf-16-be"))
_NAMES = {"cp950": "big5"}  # the Big5 that Windows writes
_CHINESE = ("gb18030", "cp950", "big5hkscs", "utf-16-le", "utf-16-be")
_SAMPLE_BYTES = 1 << 18  # even, so that a sample of UTF-16 ends between two units
_PLAUSIBLE = 0.15  # real Chinese prose scores 0.5 to 0.8, a wrong reading of it under 0.05

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
            return _decode_as(encoding, data[len(mark) :])
    return _decode_as(_detect(data), data)


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
        return _detect_by_content(data[start : start + _SAMPLE_BYTES])
    return "utf-8"


def _detect_by_content(sample: bytes) -> str:
    if _is_damaged_utf8(sample):
        return "utf-8"
    scores = {encoding: _plausibility(sample, encoding) for encoding in _CHINESE}
    best = max(scores, key=lambda encoding: scores[encoding])  # the first of equals
    if scores[best] >= _PLAUSIBLE:
        return best
    match = charset_normalizer.from_bytes(sample).best()
    if match is None:
        raise UndecodableError("undecodable: no known encoding fits")
    return str(match.encoding)


def _utf16_by_nuls(data: bytes) -> str | None:
    """The UTF-16 byte order whose high bytes are the NULs in `data`; None if they show no such pattern."""
    low_end, high_end = data[1::2].count(0), data[0::2].count(0)
    few, many = sorted((low_end, high_end))
    if many <= 20 * few or many * 10 < len(data) // 2:
        return None
    return "utf-16-le" if low_end > high_end else "utf-16-be"


def _is_damaged_utf8(data: bytes) -> bool:
    """Whether most of what is not ASCII is UTF-8: other encodings seldom form its sequences by chance."""
    bad = data.decode("utf-8", _MARK).count(_BAD)
    not_ascii = len(data.translate(None, bytes(range(128))))
    return bad * 2 < not_ascii


def _plausibility(data: bytes, encoding: str) -> float:
    """The share of everyday Chinese characters among all that is not ASCII, bad bytes included."""
    counts = Counter(data.decode(encoding, _MARK))
    foreign = sum(count for character, count in counts.items() if not character.isascii())
    return sum(counts[character] for character in _COMMON) / max(1, foreign)


def _decode_as(encoding: str, data: bytes) -> Decoded:
    marked = data.decode(encoding, _MARK)
    bad = marked.count(_BAD)
    if bad > MOST_BAD * len(data):
        raise UndecodableError(f"undecodable: {bad} of {len(data)} bytes are not {encoding}")
    text = marked.replace(_BAD, "")
    if len(_CONTROL.findall(text)) > MOST_BAD * len(text):
        raise UndecodableError("undecodable: the content looks binary")
    return Decoded(text, _NAMES.get(encoding, encoding), bad)
