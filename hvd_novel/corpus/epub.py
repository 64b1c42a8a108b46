"""The text of an EPUB: the documents of its spine, in reading order."""

from __future__ import annotations

import posixpath
import re
import zipfile
import zlib
from dataclasses import dataclass
from typing import BinaryIO
from urllib.parse import unquote
from xml.etree import ElementTree

from bs4 import BeautifulSoup, NavigableString

from hvd_novel.corpus.encoding import decode

_CONTAINER = "META-INF/container.xml"
_BLOCKS = ["address", "article", "aside", "blockquote", "br", "dd", "div", "dl", "dt", "figcaption", "figure"]
_BLOCKS += ["footer", "h1", "h2", "h3", "h4", "h5", "h6", "header", "hr", "li", "main", "ol", "p", "pre", "section"]
_BLOCKS += ["table", "tr", "ul"]
_NOT_TEXT = ["head", "script", "style", "rt", "rp"]  # rt and rp: readings beside the characters
_WIDE = "[\u2e80-\u9fff\uf900-\ufaff\uff00-\uffef]"
_DAMAGE = (zipfile.BadZipFile, zlib.error, ElementTree.ParseError, KeyError, EOFError, RuntimeError, ValueError)
_XML_DECLARATION = re.compile(r"\s*<\?xml.*?\?>", re.DOTALL)
_WRAP = re.compile(rf"(?<={_WIDE})[ \t\r]*\n\s*(?={_WIDE})")  # a line broken in the source only


class EpubError(Exception):
    """The file is not a readable EPUB; the message says why."""


@dataclass(frozen=True)
class Epub:
    """A book; `dropped_bytes` counts what could not be decoded."""

    text: str
    title: str | None
    author: str | None
    dropped_bytes: int


def read_epub(file: BinaryIO) -> Epub:
    """The text of an EPUB and its metadata.

    Every block element is a line of its own, documents are parted by a blank line; the table of contents (EPUB 3
    `nav`) is left out. Raises EpubError for a damaged or encrypted file and UndecodableError as `decode` does.
    """
    try:
        with zipfile.ZipFile(file) as archive:
            package_path = _package_path(archive)
            package = ElementTree.fromstring(archive.read(package_path))
            pages = [decode(archive.read(name)) for name in _spine(package, posixpath.dirname(package_path))]
    except _DAMAGE as error:
        raise EpubError(f"{type(error).__name__}: {error}") from None
    return Epub(
        text="\n\n".join(_page_text(page.text) for page in pages),
        title=package.findtext("{*}metadata/{*}title"),
        author=package.findtext("{*}metadata/{*}creator"),
        dropped_bytes=sum(page.dropped_bytes for page in pages),
    )


def _package_path(archive: zipfile.ZipFile) -> str:
    container = ElementTree.fromstring(archive.read(_CONTAINER))
    rootfile = container.find(".//{*}rootfile")
    if rootfile is None:
        raise KeyError(f"{_CONTAINER} names no package document")
    return rootfile.attrib["full-path"]


def _spine(package: ElementTree.Element, folder: str) -> list[str]:
    items = {item.attrib["id"]: item for item in package.iterfind("{*}manifest/{*}item")}
    pages = [items[reference.attrib["idref"]] for reference in package.iterfind("{*}spine/{*}itemref")]
    return [
        posixpath.normpath(posixpath.join(folder, unquote(page.attrib["href"])))
        for page in pages
        if "nav" not in page.get("properties", "").split()
    ]


def _page_text(page: str) -> str:
    soup = BeautifulSoup(_XML_DECLARATION.sub("", page, count=1), "html.parser")
    for tag in soup(_NOT_TEXT):
        tag.decompose()
    for string in soup.find_all(string=True):
        if type(string) is NavigableString:  # not a comment or a declaration
            string.replace_with(re.sub(r"[ \t\r\n]+", " ", _WRAP.sub("", string)))
    for tag in soup(_BLOCKS):
        tag.insert_before("\n")
        tag.insert_after("\n")
    return soup.get_text()
