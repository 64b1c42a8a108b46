from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from hvd_novel.corpus.sources import find_sources
from hvd_novel.errors import UserError


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    monkeypatch.chdir(tmp_path)

    def make_files(*names: str) -> None:
        for name in names:
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text("x")

    return make_files


def sources(*paths: str, leave_out: str = "out") -> list[tuple[str, str | None]]:
    return [(source.name, source.genre) for source in find_sources([Path(path) for path in paths], Path(leave_out))]


def test_folders_are_read_recursively_in_order_without_hidden_files(make: Callable[..., None]) -> None:
    make("books/b.txt", "books/a/z.txt", "books/a/.hidden.txt", "books/.git/c.txt", "books/B.txt", "books/c.jpg")
    expected = [("books/B.txt", None), ("books/a/z.txt", None), ("books/b.txt", None), ("books/c.jpg", None)]
    assert sources("books") == expected
    assert sources("./books/") == expected
    assert sources(str(Path("books").resolve())) == expected  # no trace of the machine
    assert sources(".") == expected


def test_a_folder_named_after_a_genre(make: Callable[..., None]) -> None:
    make("books/玄幻/a.txt", "books/Sci-Fi/sub/b.txt", "books/都市/言情/c.txt", "books/plain/d.txt", "books/e.txt")
    assert dict(sources("books")) == {
        "books/玄幻/a.txt": "fantasy",
        "books/Sci-Fi/sub/b.txt": "scifi",
        "books/都市/言情/c.txt": "romance",
        "books/plain/d.txt": None,
        "books/e.txt": None,
    }
    assert sources("books/玄幻") == [("玄幻/a.txt", "fantasy")]
    assert sources("books/玄幻/a.txt") == [("a.txt", "fantasy")]


def test_each_file_once_and_never_the_store(make: Callable[..., None], tmp_path: Path) -> None:
    make("books/a.txt", "books/store/report.json")
    (tmp_path / "books" / "loop").symlink_to(tmp_path / "books")
    assert sources("books/a.txt", "books", "books/a.txt", leave_out="books/store") == [("a.txt", None)]


def test_paths_that_are_not_there(make: Callable[..., None]) -> None:
    make("books/a.txt", "empty/.hidden")
    with pytest.raises(UserError, match="absent does not exist; check the path"):
        sources("books", "absent")
    with pytest.raises(UserError, match="there are no files in empty"):
        sources("empty")
