from __future__ import annotations

import zipfile
from collections.abc import Mapping
from pathlib import Path

import pytest

from hvd_novel.corpus.readers import Record, read_records

CONTAINER = (
    '<container xmlns="urn:oasis:names:tc:opendocument:xmlns:container"><rootfiles>'
    '<rootfile full-path="OEBPS/book.opf"/></rootfiles></container>'
)
PACKAGE = """<?xml version="1.0"?>
<package xmlns="http://www.idpf.org/2007/opf" version="3.0">
<metadata xmlns:dc="http://purl.org/dc/elements/1.1/">
<dc:title>雨夜</dc:title><dc:creator>佚名</dc:creator></metadata>
<manifest>
<item id="c2" href="two%20b.xhtml" media-type="application/xhtml+xml"/>
<item id="nav" href="nav.xhtml" properties="nav" media-type="application/xhtml+xml"/>
<item id="c1" href="text/one.xhtml" media-type="application/xhtml+xml"/>
</manifest>
<spine><itemref idref="nav"/><itemref idref="c1"/><itemref idref="c2"/></spine>
</package>"""
PAGE = """<?xml version="1.0" encoding="utf-8"?>
<html xmlns="http://www.w3.org/1999/xhtml"><head><title>{title}</title><style>p {{ margin: 0 }}</style></head>
<body><!-- a comment --><h1>{title}</h1>
<p>他独自坐在<ruby>窗<rt>chuāng</rt></ruby>边，
   听着雨声。</p><div><p>“谁？”<br/>“我。” &amp; Tom
said so.</p></div></body></html>"""


def write_epub(path: Path, changes: Mapping[str, str | None] | None = None) -> Path:
    """An EPUB of two chapters; `changes` replace members or (None) leave them out."""
    members: dict[str, str | None] = {
        "mimetype": "application/epub+zip",
        "META-INF/container.xml": CONTAINER,
        "OEBPS/book.opf": PACKAGE,
        "OEBPS/nav.xhtml": PAGE.format(title="目录"),
        "OEBPS/text/one.xhtml": PAGE.format(title="第一章 甲"),
        "OEBPS/two b.xhtml": PAGE.format(title="第二章 乙"),
        **(changes or {}),
    }
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in members.items():
            if content is not None:
                archive.writestr(name, content)
    return path


def test_epub(tmp_path: Path) -> None:
    (record,) = read_records(write_epub(tmp_path / "a.epub"))
    assert isinstance(record, Record)
    assert (record.title, record.author) == ("雨夜", "佚名")
    lines = [line.strip() for line in record.text.split("\n") if line.strip()]
    body = ["他独自坐在窗边，听着雨声。", "“谁？”", "“我。” & Tom said so."]
    assert lines == ["第一章 甲", *body, "第二章 乙", *body]


@pytest.mark.parametrize(
    "changes",
    [
        {"META-INF/container.xml": None},
        {"META-INF/container.xml": "<container/>"},
        {"OEBPS/book.opf": PACKAGE[:300]},
        {"OEBPS/book.opf": PACKAGE.replace('idref="c1"', 'idref="c9"')},
        {"OEBPS/two b.xhtml": None},
    ],
)
def test_incomplete_epub(tmp_path: Path, changes: dict[str, str | None]) -> None:
    (problem,) = read_records(write_epub(tmp_path / "a.epub", changes))
    assert str(problem).startswith("corrupt epub")


def test_damaged_epub(tmp_path: Path) -> None:
    whole = write_epub(tmp_path / "a.epub").read_bytes()
    position = whole.index("第一章 甲".encode())
    for damaged in (whole[:-50], b"", b"not a zip file", whole[:position] + b"\x00" + whole[position + 1 :]):
        (tmp_path / "a.epub").write_bytes(damaged)
        (problem,) = read_records(tmp_path / "a.epub")
        assert str(problem).startswith("corrupt epub")
