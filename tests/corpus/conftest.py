"""A small tokenizer, trained once, and property tests without a time limit for one example."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import settings
from transformers import PreTrainedTokenizerFast

from hvd_novel.corpus.tokenizer import train_tokenizer
from tests.corpus.texts import novel

settings.register_profile("corpus", deadline=None)
settings.load_profile("corpus")


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    return train_tokenizer([novel(3), "It was a dark and stormy night; the rain fell in torrents."], 500)


@pytest.fixture(scope="session")
def tokenizer_folder(tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.save_pretrained(folder)
    return folder
