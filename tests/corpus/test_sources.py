from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

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


def test_a_path_given_twice_and_a_file_also_in_a_folder(make: Callable[..., None], tmp_path: Path) -> None:
    make("books/a.txt", "books/sub/b.txt")
    (tmp_path / "other.txt").symlink_to("books/a.txt")
    both = [("books/a.txt", None), ("books/sub/b.txt", None)]
    assert sources("books", "books", "./books", "books/sub/../a.txt", "books/sub", "other.txt") == both
    assert sources("books/sub", "books") == [("sub/b.txt", None), ("books/a.txt", None)]


def test_a_link_to_itself_stands_for_a_file(make: Callable[..., None], tmp_path: Path) -> None:
    make("books/a.txt")
    (tmp_path / "books" / "self.txt").symlink_to("self.txt")
    (tmp_path / "books" / "ring").symlink_to("gnir")
    (tmp_path / "books" / "gnir").symlink_to("ring")
    expected = ["books/a.txt", "books/gnir", "books/ring", "books/self.txt"]
    assert [name for name, _ in sources("books", "books")] == expected
    with pytest.raises(UserError, match=r"self.txt is a symbolic link to nothing; check the path"):
        sources("books/self.txt")


@pytest.mark.parametrize("method", ["iterdir", "is_dir"])  # a folder that cannot be listed, or not entered
def test_an_unreadable_folder(make: Callable[..., None], monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    make("books/a.txt", "books/closed/b.txt", "books/d.txt")
    original = getattr(Path, method)

    def refuse(path: Path) -> Any:
        if path.name == "closed":
            raise PermissionError(13, "Permission denied")
        return original(path)

    monkeypatch.setattr(Path, method, refuse)
    found = [(source.name, source.unreadable) for source in find_sources([Path("books")], Path("out"))]
    assert found == [("books/a.txt", ""), ("books/closed", "Permission denied"), ("books/d.txt", "")]
    with pytest.raises(UserError, match="closed cannot be read: Permission denied; check its permissions"):
        sources("books/closed")


def test_paths_that_are_not_there(make: Callable[..., None]) -> None:
    make("books/a.txt", "empty/.hidden")
    with pytest.raises(UserError, match="absent does not exist; check the path"):
        sources("books", "absent")
    with pytest.raises(UserError, match="there are no files in empty"):
        sources("empty")
