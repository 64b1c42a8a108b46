"""Compressors by name."""

from __future__ import annotations

from importlib.metadata import EntryPoint

import pytest

import compressors
from compressors import registry


def test_unknown_names_list_the_valid_ones():
    with pytest.raises(ValueError, match=r"unknown compressor 'zip'; available: bf16, fp16, .*none, .*topk"):
        compressors.get("zip")


def test_unknown_options_are_named():
    with pytest.raises(ValueError, match=r"compressor 'topk': .*densty"):
        compressors.get("topk", densty=0.1)


def test_other_packages_add_compressors(monkeypatch):
    point = EntryPoint("signs", "compressors.codecs.onebit:OneBit", registry.PLUGINS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point] if group == registry.PLUGINS else [])
    assert "signs" in compressors.available()
    assert isinstance(compressors.get("signs"), compressors.OneBit)


@pytest.mark.parametrize("name", compressors.available())
def test_options_can_be_compared_and_shown(name):
    compressor = compressors.get(name)
    assert compressor.settings()["compressor"] == type(compressor).__name__
    assert type(compressor).__name__ in repr(compressor)


def test_policies_need_a_pattern_and_a_name():
    with pytest.raises(ValueError, match="'match'"):
        compressors.get("topk", policies=[{"name": "none"}])
    with pytest.raises(ValueError, match="unknown compressor 'zip'"):
        compressors.get("topk", policies=[{"match": "*", "name": "zip"}])
    chosen = compressors.get("topk", policies=[{"match": "*norm*", "name": "none"}])
    assert isinstance(chosen.for_parameter("a.norm.weight"), compressors.NoCompression)
    assert isinstance(chosen.for_parameter("a.weight"), compressors.TopK)


def test_compressors_inside_of_others_are_given_by_name():
    chosen = compressors.get("hierarchical", inner={"name": "none"}, outer={"name": "topk", "density": 0.1})
    assert isinstance(chosen.inner, compressors.NoCompression)
    assert isinstance(chosen.outer, compressors.TopK)
    assert chosen.settings()["outer"]["density"] == 0.1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"inner": {"name": "onebit"}}, "inner must be none, fp16 or bf16"),
        ({"outer": {"name": "rows"}}, "outer cannot be SparseRows"),
        ({"outer": {"name": "hierarchical"}}, "outer cannot be Hierarchical"),
        ({"outer": {"name": "topk", "policies": [{"match": "*", "name": "none"}]}}, "outer cannot be Policies"),
        ({"nodes": [[0, 1], [2]]}, "same number of ranks"),
    ],
)
def test_hierarchies_that_cannot_be_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        compressors.get("hierarchical", **options)
