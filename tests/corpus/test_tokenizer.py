from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from hvd_novel.corpus.genres import GENRES, recognise
from hvd_novel.corpus.stream import StreamEncoder
from hvd_novel.corpus.tokenizer import (
    CHAPTER_SEP,
    END_OF_TEXT,
    PAD,
    SMALLEST_VOCABULARY,
    SPECIAL_TOKENS,
    genre_token,
    load_tokenizer,
    tokenizer_hash,
    train_tokenizer,
)
from hvd_novel.errors import UserError
from tests.corpus.texts import SIMPLIFIED, TRADITIONAL, novel

VALID_TEXT = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from(" \n中𠀀😀<|>é")))


@given(VALID_TEXT)
def test_any_text_is_read_back(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    stream = StreamEncoder(tokenizer).encode([text])
    assert tokenizer.decode(stream.ids[:-1]) == text


@pytest.mark.parametrize(
    "text", [*SPECIAL_TOKENS, f"他说{END_OF_TEXT}。{CHAPTER_SEP}<|genre_urban|>", "𠀀𪚥👩\u200d🚀"]
)
def test_text_that_spells_a_special_token_stays_text(tokenizer: PreTrainedTokenizerFast, text: str) -> None:
    ids = StreamEncoder(tokenizer).encode([text]).ids
    assert not set(ids[:-1].tolist()) & set(tokenizer.all_special_ids)
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == text
    assert tokenizer.decode(ids, skip_special_tokens=True) == text


def test_a_corpus_full_of_special_tokens_does_not_teach_them() -> None:
    tokenizer = train_tokenizer([f"甲{END_OF_TEXT}乙{PAD}" * 100], 400)
    ids = StreamEncoder(tokenizer).encode([f"甲{END_OF_TEXT}乙"]).ids
    assert list(ids).count(tokenizer.eos_token_id) == 1
    assert tokenizer.decode(ids[:-1]) == f"甲{END_OF_TEXT}乙"


def test_special_tokens_of_a_trained_tokenizer(tokenizer: PreTrainedTokenizerFast) -> None:
    assert (tokenizer.eos_token, tokenizer.bos_token, tokenizer.pad_token) == (END_OF_TEXT, END_OF_TEXT, PAD)
    assert set(tokenizer.all_special_tokens) == set(SPECIAL_TOKENS)
    assert sorted(tokenizer.convert_tokens_to_ids(list(SPECIAL_TOKENS))) == list(range(len(SPECIAL_TOKENS)))
    assert len(tokenizer) == 500


def test_training_repeats_itself_in_another_process(tmp_path: Path) -> None:
    train_tokenizer([novel(5), TRADITIONAL], 450).save_pretrained(tmp_path / "a")
    script = (
        "import sys; from hvd_novel.corpus.tokenizer import train_tokenizer; "
        "from tests.corpus.texts import TRADITIONAL, novel; "
        "train_tokenizer([novel(5), TRADITIONAL], 450).save_pretrained(sys.argv[1])"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", script, str(tmp_path / "b")], check=True, cwd=root)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_a_vocabulary_too_small_for_all_bytes() -> None:
    with pytest.raises(UserError, match=f"--vocab-size 256 is too small; give at least {SMALLEST_VOCABULARY}"):
        train_tokenizer(["x"], 256)
    assert len(train_tokenizer([], SMALLEST_VOCABULARY)) == SMALLEST_VOCABULARY


def other_tokenizer(folder: Path, **special: Any) -> Path:
    """A tokenizer of another making: GPT-2 style, with a template and offsets that leave out the spaces."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    bpe.train_from_iterator(
        ["The rain fell in torrents. " * 5, SIMPLIFIED],
        trainers.BpeTrainer(
            vocab_size=320,
            special_tokens=["<s>", "</s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)]),
        ]
    )
    bpe.enable_truncation(16)
    PreTrainedTokenizerFast(tokenizer_object=bpe, **special).save_pretrained(folder)
    return folder


def test_special_tokens_are_added_to_another_tokenizer(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path / "other", eos_token="</s>", extra_special_tokens=["<s>"])
    before = AutoTokenizer.from_pretrained(folder)
    tokenizer = load_tokenizer(folder)
    assert tokenizer.eos_token == "</s>"  # its own stays in use
    assert (tokenizer.bos_token, tokenizer.pad_token) == (END_OF_TEXT, PAD)
    assert {"<s>", "</s>", CHAPTER_SEP, *map(genre_token, GENRES)} <= set(tokenizer.all_special_tokens)
    assert before.get_vocab().items() <= tokenizer.get_vocab().items()
    assert len(tokenizer) == len(before) + len(SPECIAL_TOKENS)


def test_another_tokenizer_encodes_whole_texts_without_its_template(tmp_path: Path) -> None:
    folder = other_tokenizer(tmp_path / "other", bos_token="<s>", eos_token="</s>")
    tokenizer = load_tokenizer(folder)
    text = "The rain fell in torrents.  <s> " + SIMPLIFIED
    stream = StreamEncoder(tokenizer).encode([text])
    assert tokenizer.decode(stream.ids[:-1]) == text
    assert tokenizer.bos_token_id not in stream.ids
    for tokens in range(len(stream.ids)):
        assert stream.characters[tokens] == len(tokenizer.decode(stream.ids[:tokens]).rstrip("\ufffd"))
    assert stream.characters[-1] == len(text)


def test_loading_our_own_tokenizer_adds_nothing(tokenizer: PreTrainedTokenizerFast, tokenizer_folder: Path) -> None:
    assert load_tokenizer(tokenizer_folder).get_vocab() == tokenizer.get_vocab()


def test_hash_is_stable_over_saving_and_sees_changes(tokenizer_folder: Path, tmp_path: Path) -> None:
    expected = tokenizer_hash(tokenizer_folder)
    loaded = AutoTokenizer.from_pretrained(tokenizer_folder)
    loaded(["甲", "乙丙丁"], padding=True, truncation=True, max_length=8)  # leaves traces in what is saved
    loaded.save_pretrained(tmp_path / "again")
    AutoTokenizer.from_pretrained(tmp_path / "again").save_pretrained(tmp_path / "thrice")
    assert tokenizer_hash(tmp_path / "again") == tokenizer_hash(tmp_path / "thrice") == expected
    loaded.add_tokens(["新词"])
    loaded.save_pretrained(tmp_path / "more")
    assert tokenizer_hash(tmp_path / "more") != expected
    config = json.loads((tmp_path / "again" / "tokenizer_config.json").read_text())
    config["pad_token"] = CHAPTER_SEP
    (tmp_path / "again" / "tokenizer_config.json").write_text(json.dumps(config))
    assert tokenizer_hash(tmp_path / "again") != expected


def test_folders_that_are_no_tokenizers(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "tokenizer.json").write_text('{"model": 1}')
    (tmp_path / "file").write_text("x")
    for name in ("empty", "broken"):
        with pytest.raises(UserError, match=rf"--tokenizer .*{name} does not hold a Hugging Face tokenizer"):
            load_tokenizer(tmp_path / name)
    for name in ("file", "absent"):
        with pytest.raises(UserError, match=rf"--tokenizer .*{name} is not a folder"):
            load_tokenizer(tmp_path / name)


@pytest.mark.parametrize(
    ("name", "genre"),
    [
        ("玄幻", "fantasy"),
        ("奇幻小说", "fantasy"),
        ("言情", "romance"),
        ("都市", "urban"),
        ("科幻", "scifi"),
        ("仙侠", "xianxia"),
        ("武俠", "wuxia"),
        ("历史", "historical"),
        ("悬疑", "mystery"),
        (" Sci-Fi ", "scifi"),
        ("science fiction", "scifi"),
        ("ROMANCE", "romance"),
        ("其他", "unknown"),
        ("unknown", "unknown"),
        ("cookbook", None),
        ("", None),
    ],
)
def test_genre_names(name: str, genre: str | None) -> None:
    assert recognise(name) == genre


@pytest.mark.parametrize("genre", GENRES)
def test_every_genre_knows_its_own_name(genre: str) -> None:
    assert recognise(genre.upper()) == genre
