"""Where the chapters of a cleaned novel begin.

A heading is a short line of its own, in one of these forms:

* 第…回/章/节/卷/部/集/篇/话 with a Chinese, Arabic or full-width number, and 卷…; traditional forms too;
* 楔子, 序, 序章, 引子, 前言, 尾声, 后记, 番外 and the like;
* Chapter, Part, Book or Volume with an Arabic or Roman number or a number in words; Prologue, Epilogue.

What follows the number is a title if it stands apart (a space, a colon, a bracket) and does not end like a sentence,
or, where it follows without a gap, if it has no punctuation at all: 第四回中既将薛家母子在荣府内寄居等事略已表明，…
is a sentence. A heading that repeats the one before it belongs to the same chapter, and so does a heading with no
text between it and the next (a volume, a table of contents). Text before the first heading belongs to the first
chapter.
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass
from itertools import pairwise

_LONGEST = 60  # characters of a heading line
_LONGEST_LATIN = 100

_NUMBER = "[0-9０-９〇零○一二三四五六七八九十百千万两兩壹贰貳叁參肆伍陆陸柒捌玖拾佰仟廿卅]+"
_WORDS = (
    "one|two|three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|"
    "eighteen|nineteen|(?:twenty|thirty|forty|fifty|sixty|seventy|eighty|ninety)(?:-\\w+)?|the\\s+\\w+"
)
_DECORATION = r"[#*=☆★◆●■【〖\[\s]*(?:正文\s*)?"

_NUMBERED = re.compile(rf"{_DECORATION}(第\s*{_NUMBER}\s*[回章节節卷部集篇话話])")
_EXTRA = re.compile(rf"{_DECORATION}(番外[篇卷章之]?(?:{_NUMBER})?)")
_NAMED = re.compile(
    rf"{_DECORATION}((?:楔子|引子|引言|前言|序[章言幕曲]?|自序|代序|尾[声聲]|[终終]章|[后後][记記]|卷之?{_NUMBER})"
    rf"(?:{_NUMBER})?)"
)
_LATIN = re.compile(
    rf"{_DECORATION}((?:chapter|part|book|volume)\s+(?:\d+|[ivxlcdm]+|{_WORDS})\b|prologue\b|epilogue\b)", re.IGNORECASE
)
# Words that merely begin like a heading: 第二回合 (round two), 第一部分, 第三集团军, 第一节课 ...
_COMPOUND = re.compile("回[合头頭]|部[分队隊门門下件]|集[团團合体體]|[节節][课課车車目奏]|卷[轴軸宗]|篇[文幅]")
_APART = ' ：:、.．·—–―-~～|(（《「『〈[“"】〗]'
_SENTENCE = re.compile('[，。！？；：、…,!?;:”’」』"]')
_CLOSED = re.compile(r"[(（【]?(?:完|[终終]|完[结結]|[结結]束|未完|待[续續]|未完待[续續])\W*")


@dataclass(frozen=True)
class Heading:
    """`label` is the numbered or named part, `line` the whole; both without spaces and punctuation."""

    label: str
    line: str

    def repeats(self, other: Heading | None) -> bool:
        """True if both head the same chapter: the same line, or the same label with one title missing."""
        if other is None or self.label != other.label:
            return False
        return self.line == other.line or self.label in (self.line, other.line)


def split_chapters(text: str) -> list[str]:
    """Split a cleaned text before its chapter headings; ``"".join(split_chapters(text)) == text``.

    A chapter keeps its heading line and the newlines at its end. An empty text has no chapter, one without
    headings is one chapter.
    """
    if not text:
        return []
    starts = [0]
    last: Heading | None = None
    offset, has_body = 0, False
    for line in text.split("\n"):
        heading = find_heading(line)
        if heading is None:
            has_body = has_body or bool(line)
        elif not heading.repeats(last):
            if last is not None and has_body:
                starts.append(offset)
            last, has_body = heading, False
        offset += len(line) + 1
    return [text[start:end] for start, end in pairwise([*starts, len(text)])]


def find_heading(line: str) -> Heading | None:
    """The heading that `line` (stripped) is, or None."""
    if len(line) > _LONGEST_LATIN:
        return None
    if match := _LATIN.match(line):
        return _heading(match) if _is_latin_title(line[match.end() :]) else None
    if len(line) > _LONGEST:
        return None
    for form, may_be_glued in ((_NUMBERED, True), (_EXTRA, True), (_NAMED, False)):
        if match := form.match(line):
            return _heading(match) if _is_title(match, may_be_glued) else None
    return None


def _heading(match: re.Match[str]) -> Heading:
    return Heading(_letters(match[1]), _letters(match.string))


def _letters(text: str) -> str:
    return re.sub(r"\W", "", unicodedata.normalize("NFKC", text)).casefold()


def _is_title(match: re.Match[str], may_be_glued: bool) -> bool:
    """Whether what follows the label of a Chinese heading is a title, or nothing."""
    rest = match.string[match.end() :]
    if not rest:
        return True
    if _CLOSED.fullmatch(rest.strip()):  # 第一章 完 closes a chapter
        return False
    if rest[0] in _APART:
        return not re.search("[。；;]|[，,.．、]$|^、\\s*第", rest)
    return may_be_glued and not _SENTENCE.search(rest) and not _COMPOUND.match(match.string, match.end() - 1)


def _is_latin_title(rest: str) -> bool:
    """Whether what follows `Chapter N` is a title: set off by punctuation, or not in lower case."""
    if rest.strip(" .:") == "":
        return True
    title = rest.lstrip()
    if title.endswith((".", ",", ";")):
        return False
    return title[0] in ".:-–—)|" or (rest != title and not title[0].islower())
