from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hvd_novel.corpus.samples import (
    Sample,
    SampleLengths,
    Unit,
    Window,
    find_units,
    find_windows,
    main_segment_type,
    make_sample,
    unit_windows,
)
from hvd_novel.corpus.stream import StreamEncoder, TokenStream, _complete
from hvd_novel.corpus.tokenizer import load_tokenizer
from hvd_novel.errors import UserError
from tests.corpus.texts import SIMPLIFIED


@st.composite
def sample_lengths(draw: st.DrawFn) -> SampleLengths:
    min_len, overlap = draw(st.integers(1, 40)), draw(st.integers(0, 120))
    return SampleLengths(2 * min_len + overlap + 1 + draw(st.integers(0, 60)), min_len, overlap)


def stream_of(chapter_tokens: list[int]) -> TokenStream:
    """A stream of numbered tokens, two characters each, but none for the separators."""
    characters = [0]
    for tokens in chapter_tokens:
        characters += [characters[-1] + 2 * token for token in range(1, tokens)]
        characters.append(characters[-1])
    return TokenStream(np.arange(sum(chapter_tokens), dtype=np.int32), np.array(characters, np.int64), chapter_tokens)


def samples_of(stream: TokenStream, lengths: SampleLengths, text: str) -> list[Sample]:
    units = find_units(stream.chapter_tokens, lengths.min_len)
    return [sample_of(window, stream, text) for unit in units for window in unit_windows(unit, lengths)]


def sample_of(window: Window, stream: TokenStream, text: str) -> Sample:
    ids = stream.ids[window.start - window.overlap : window.end]
    first, last = stream.characters[[window.start, window.end]]
    return make_sample(window, ids, -1, main_segment_type(text[first:last]), int(last - first))


CHAPTERS = st.lists(st.integers(1, 400), min_size=1, max_size=12)


@given(CHAPTERS, sample_lengths())
def test_every_token_is_new_in_exactly_one_sample(chapter_tokens: list[int], lengths: SampleLengths) -> None:
    stream = stream_of(chapter_tokens)
    samples = samples_of(stream, lengths, "甲" * int(stream.characters[-1]))
    new = np.concatenate([sample.input_ids[sample.context :] for sample in samples])
    assert np.array_equal(new, stream.ids)
    for sample in samples:
        assert np.array_equal(sample.input_ids[sample.context :], stream.ids[sample.token_start : sample.token_end])
    assert sum(sample.characters for sample in samples) == stream.characters[-1]


@given(CHAPTERS, sample_lengths())
def test_a_sample_is_genre_context_and_new_tokens(chapter_tokens: list[int], lengths: SampleLengths) -> None:
    stream = stream_of(chapter_tokens)
    units = {unit.chapter: unit for unit in find_units(chapter_tokens, lengths.min_len)}
    for sample in samples_of(stream, lengths, ""):
        unit = units[sample.chapter]
        assert unit.start <= sample.token_start < sample.token_end <= unit.end
        assert sample.context == 1 + min(lengths.overlap, sample.token_start - unit.start)
        assert sample.input_ids[0] == -1
        context = sample.context - 1
        assert np.array_equal(
            sample.input_ids[1 : sample.context], stream.ids[sample.token_start - context : sample.token_start]
        )
        assert sample.input_ids.dtype == np.int32
        assert len(sample.input_ids) <= lengths.max_len
        assert sample.token_end - sample.token_start >= min(lengths.min_len, len(stream.ids))


@given(CHAPTERS, st.integers(1, 500))
def test_units_join_neighbours_until_long_enough(chapter_tokens: list[int], min_len: int) -> None:
    units = find_units(chapter_tokens, min_len)
    bounds = [0, *np.cumsum(chapter_tokens).tolist()]
    assert units[0].start == 0
    assert units[-1].end == bounds[-1]
    assert all(before.end == after.start for before, after in pairwise(units))
    assert all(unit.start == bounds[unit.chapter] and unit.end in bounds for unit in units)
    assert all(unit.end - unit.start >= min_len for unit in units) or len(units) == 1
    if min(chapter_tokens) >= min_len:
        assert len(units) == len(chapter_tokens)


def test_joining_to_the_next_and_the_last_to_the_one_before() -> None:
    assert find_units([3, 10, 10, 2], 5) == [Unit(0, 0, 13), Unit(2, 13, 25)]
    assert find_units([1, 1, 1], 5) == [Unit(0, 0, 3)]
    assert find_units([], 5) == []


@given(st.integers(0, 1500), sample_lengths())
def test_windows_partition_a_unit(length: int, lengths: SampleLengths) -> None:
    windows = find_windows(length, lengths)
    assert [token for start, end in windows for token in range(start, end)] == list(range(length))
    for start, end in windows:
        assert 1 + min(lengths.overlap, start) + (end - start) <= lengths.max_len
        assert end - start >= min(lengths.min_len, length)


def test_the_last_two_windows_share_when_the_last_would_be_short() -> None:
    lengths = SampleLengths(max_len=101, min_len=20, overlap=10)
    assert find_windows(100, lengths) == [(0, 100)]
    assert find_windows(104, lengths) == [(0, 52), (52, 104)]
    assert find_windows(120, lengths) == [(0, 100), (100, 120)]
    assert find_windows(195, lengths) == [(0, 100), (100, 148), (148, 195)]
    assert find_windows(0, lengths) == []


@pytest.mark.parametrize(
    ("max_len", "min_len", "overlap"), [(20, 5, 10), (100, 0, 0), (100, 10, -1), (-1, 1, 0), (4096, 128, 4000)]
)
def test_impossible_lengths(max_len: int, min_len: int, overlap: int) -> None:
    with pytest.raises(UserError, match=rf"--max-len {max_len}, --min-len {min_len} and --overlap {overlap}"):
        SampleLengths(max_len, min_len, overlap)


def test_smallest_lengths() -> None:
    assert find_windows(5, SampleLengths(3, 1, 0)) == [(0, 2), (2, 4), (4, 5)]


TEXTS = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from("他的雨 \n𠀀😀")), max_size=60)


@given(st.lists(TEXTS, min_size=1, max_size=4), sample_lengths())
def test_characters_add_up_to_the_text(
    tokenizer: PreTrainedTokenizerFast, chapters: list[str], lengths: SampleLengths
) -> None:
    text = "".join(chapters)
    stream = StreamEncoder(tokenizer).encode(chapters)
    assert sum(sample.characters for sample in samples_of(stream, lengths, text)) == len(text)
    assert len(stream.characters) == len(stream.ids) + 1
    assert (np.diff(stream.characters) >= 0).all()


@given(st.text(st.sampled_from("a他𠀀😀é \n"), min_size=1, max_size=40))
def test_a_character_belongs_to_the_token_that_completes_it(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    stream = StreamEncoder(tokenizer).encode([text])
    for tokens in range(len(stream.ids)):
        complete = tokenizer.decode(stream.ids[:tokens]).rstrip("\ufffd")
        assert stream.characters[tokens] == len(complete)


def test_the_stream_of_a_novel(tokenizer: PreTrainedTokenizerFast) -> None:
    chapters = ["第一章\n甲。\n", "第二章\n乙。\n", "第三章\n丙。"]
    stream = StreamEncoder(tokenizer).encode(chapters)
    ends = np.cumsum(stream.chapter_tokens)
    separator = tokenizer.convert_tokens_to_ids("<|chapter_sep|>")
    assert stream.ids[ends - 1].tolist() == [separator, separator, tokenizer.eos_token_id]
    assert tokenizer.decode(stream.ids, skip_special_tokens=True) == "".join(chapters)
    assert stream.characters[ends].tolist() == np.cumsum([len(chapter) for chapter in chapters]).tolist()
    assert stream.ids.dtype == np.int32


def test_characters_add_up_for_a_tokenizer_that_loses_text(tmp_path: Path) -> None:
    words = Tokenizer(models.WordLevel({"[UNK]": 0, "rain": 1, "cafe": 2}, unk_token="[UNK]"))
    words.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents(), normalizers.Lowercase()])
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(tmp_path)
    chapters = ["  Rain, café\n\n", " \n", "雨 rain  "]
    stream = StreamEncoder(load_tokenizer(tmp_path)).encode(chapters)
    assert stream.chapter_tokens == [4, 1, 3]
    assert stream.characters.tolist() == [0, 6, 8, 14, 14, 16, 18, 24, 24]


def test_offsets_that_go_back_do_not_upset_the_account() -> None:
    encoding: Any = SimpleNamespace(ids=[5, 6, 7, 8], offsets=[(0, 1), (3, 4), (0, 0), (4, 5)])
    assert _complete(encoding, 6).tolist() == [0, 0, 4, 6, 6]


def test_a_sample_is_classified_by_the_text_of_its_new_tokens() -> None:
    texts = ["“你来了？我等你很久了。”\n" * 9, "他拔刀追赶，把门撞倒，跑了。\n" * 9]
    stream = stream_of([len(text) // 2 + 1 for text in texts])
    samples = samples_of(stream, SampleLengths(1000, 1, 0), "".join(texts))
    assert [sample.segment_type for sample in samples] == ["dialogue", "plot"]


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("“你来了？”\n“我来了，路上下雨，所以晚了。”\n他走了。", "dialogue"),
        ("他走了。\n\n" + SIMPLIFIED.split("“")[0], "plot"),
        ("", "plot"),
    ],
)
def test_a_long_sample_has_the_type_of_most_of_its_characters(text: str, kind: str) -> None:
    assert main_segment_type(text) == kind
