"""The curriculum: the mix it promises, as long as there is enough, and every sample still once an epoch."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvd_novel.config import CurriculumConfig
from hvd_novel.corpus.genres import GENRES
from hvd_novel.corpus.segments import SEGMENT_TYPES
from hvd_novel.corpus.store import TokenStore
from hvd_novel.errors import UserError
from hvd_novel.sharding.curriculum import Curriculum, curriculum_problems, kinds_of
from hvd_novel.sharding.plan import Plan
from tests.sharding.test_plan import LENGTHS, assert_partition, epoch_of

SHORT, MEDIUM, LONG = 50, 150, 400
THRESHOLDS = (100, 300)


def make(
    lengths: np.ndarray, steps: int, kinds: np.ndarray | None = None, step_tokens: int = 4000, **options: object
) -> Plan:
    section = CurriculumConfig(enabled=True, **{"thresholds": THRESHOLDS, **options})
    curriculum = Curriculum(section, steps, np.zeros(len(lengths), np.uint8) if kinds is None else kinds)
    return Plan(lengths, np.ones(len(lengths), np.int32), seed=1, step_tokens=step_tokens, curriculum=curriculum)


def shares(lengths: np.ndarray, documents: np.ndarray) -> list[float]:
    found = Counter(np.searchsorted(THRESHOLDS, lengths[documents], side="right").tolist())
    return [found[kind] / len(documents) for kind in range(3)]


def test_each_step_has_the_mix_of_its_phase() -> None:
    """Enough of everything: an epoch much longer than the run."""
    lengths = np.random.default_rng(0).choice([SHORT, MEDIUM, LONG], 30_000).astype(np.int32)
    plan = make(lengths, steps=100)
    assert plan.steps_per_epoch > 1000
    wanted = {0: (0.8, 0.2, 0.0), 29: (0.8, 0.2, 0.0), 30: (0.0, 0.7, 0.3), 69: (0.0, 0.7, 0.3), 99: (0.0, 0.4, 0.6)}
    for step, mix in wanted.items():
        documents = plan.step(step, [1000]).documents
        # A step begins and ends anywhere in the pattern: one sample more or less.
        assert shares(lengths, documents) == pytest.approx(mix, abs=1.6 / len(documents)), step


def test_what_a_phase_leaves_over_is_mixed_evenly() -> None:
    """When short samples run out, the rest of the epoch is medium and long together, neither sorted nor lost."""
    generator = np.random.default_rng(1)
    lengths = generator.permutation(np.repeat([SHORT, MEDIUM, LONG], [1000, 3000, 1000])).astype(np.int32)
    plan = make(lengths, steps=10**6)
    steps = epoch_of(plan, [1000])
    assert_partition(lengths, steps)
    mixes = np.array([shares(lengths, step.documents) for step in steps])
    last_short = int(np.flatnonzero(mixes[:, 0])[-1])
    assert mixes[:last_short, 0] == pytest.approx(0.8, abs=0.05)
    rest = mixes[last_short + 1 :]
    assert len(rest) > 50
    assert rest[:, 1] == pytest.approx(2750 / 3750, abs=0.12)
    assert abs(rest[:20, 1].mean() - rest[-20:, 1].mean()) < 0.03


@given(LENGTHS, st.integers(1, 1000), st.integers(0, 3), st.data())
@settings(max_examples=60, deadline=None)
def test_every_token_is_trained_once_whatever_the_mix(
    lengths: np.ndarray, step_tokens: int, epoch: int, data: st.DataObject
) -> None:
    mix = st.tuples(*[st.sampled_from([0.0, 0.3, 1.0])] * 3).filter(any)
    plan = make(
        lengths,
        steps=data.draw(st.integers(1, 50)),
        step_tokens=step_tokens,
        kinds=np.arange(len(lengths), dtype=np.uint8) % (len(GENRES) * len(SEGMENT_TYPES)),
        early=data.draw(mix),
        middle=data.draw(mix),
        late=data.draw(mix),
        max_lengths=data.draw(st.tuples(*[st.sampled_from([None, 2, 70])] * 3)),
        genre_weights={"urban": 0.0, "fantasy": 3.0},
        segment_weights={"dialogue": 2.5},
    )
    steps = epoch_of(plan, [120, 100], epoch)
    assert_partition(lengths, steps)
    for index, step in enumerate(steps):
        limit = plan.curriculum.longest(epoch * plan.steps_per_epoch + index) or 100
        spans = [span for packs in step.packs for spans in packs for span in spans]
        assert all(span.stop - span.start <= limit for span in spans)


def test_longer_pieces_come_with_later_phases() -> None:
    lengths = np.full(400, 500, np.int32)
    plan = make(lengths, steps=30, max_lengths=(100, 250, None))
    longest = []
    for step in (0, 10, 25):
        longest.append(max(s.stop - s.start for p in plan.step(step, [2000]).packs[0] for s in p))
    assert longest == [100, 250, 500]


def test_heavier_samples_come_earlier_and_none_is_lost() -> None:
    """With weights 3 and 1, three of four of the first samples are heavy: Efraimidis and Spirakis' draw."""
    lengths = np.full(20_000, SHORT, np.int32)
    heavy = GENRES.index("fantasy") * len(SEGMENT_TYPES)
    light, never = GENRES.index("urban") * len(SEGMENT_TYPES), GENRES.index("horror") * len(SEGMENT_TYPES)
    kinds = np.random.default_rng(2).permutation(np.repeat([heavy, light, never], [9000, 9000, 2000])).astype(np.uint8)
    weights = {"fantasy": 3.0, "horror": 0.0}
    plan = make(lengths, steps=100, kinds=kinds, early=(1.0, 0.0, 0.0), genre_weights=weights)
    steps = epoch_of(plan, [1000])
    first = kinds[np.concatenate([step.documents for step in steps[:20]])]
    assert (first == heavy).mean() == pytest.approx(0.75, abs=0.03)
    last = kinds[np.concatenate([step.documents for step in steps[-24:]])]
    assert (last == never).all()
    assert_partition(lengths, steps)


def test_without_a_curriculum_nothing_changes() -> None:
    """`enabled: false` gives no curriculum at all; and one that asks for everything alike still gives other orders."""
    lengths = np.random.default_rng(3).choice([SHORT, MEDIUM, LONG], 500).astype(np.int32)
    off = Plan(lengths, np.ones(500, np.int32), seed=1, step_tokens=4000)
    assert off.state_dict()["curriculum"] is None
    on = make(lengths, steps=50)
    assert on.steps_per_epoch == off.steps_per_epoch
    assert on.step(0, [500]).packs != off.step(0, [500]).packs


def test_another_curriculum_is_refused() -> None:
    lengths = np.full(50, SHORT, np.int32)
    state = make(lengths, steps=50).state_dict()
    make(lengths, steps=50).load_state_dict(state)
    for other in (make(lengths, steps=60), make(lengths, steps=50, late=(0.1, 0.4, 0.5))):
        with pytest.raises(UserError, match="another curriculum"):
            other.load_state_dict(state)


def test_kinds_are_genre_and_segment_type(store: Path) -> None:
    split = TokenStore.open(store).split("train")
    kinds = kinds_of(split)
    assert len(set(kinds.tolist())) > 3
    for sample, kind in enumerate(kinds.tolist()):
        genre, segment = divmod(kind, len(SEGMENT_TYPES))
        assert (GENRES[genre], SEGMENT_TYPES[segment]) == (split.genre(sample), split.segment_type(sample))


def test_names_that_do_not_exist_are_mistakes() -> None:
    problems = curriculum_problems({"genre_weights": {"fantsy": 2.0, "urban": 1.0}, "segment_weights": {"plots": 1.0}})
    assert [key for key, _ in problems] == ["segment_weights", "genre_weights"]
    assert "did you mean 'plot'" in problems[0][1]
    assert "did you mean 'fantasy'" in problems[1][1]
    assert curriculum_problems(None) == curriculum_problems({"genre_weights": 3}) == []


@pytest.mark.parametrize(
    ("key", "value"),
    [("boundaries", (0.7, 0.3)), ("thresholds", (10, 5)), ("early", (0.0, 0.0, 0.0)), ("max_lengths", (1, 2, 3))],
)
def test_settings_without_sense_are_refused(key: str, value: tuple[float, ...]) -> None:
    with pytest.raises(ValueError, match=key):
        CurriculumConfig(**{key: value})
