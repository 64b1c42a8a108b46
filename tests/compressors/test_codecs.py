"""Properties of every codec, alone. A compressor gets them by being registered."""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings

import compressors
from compressors.codec import Frame, Pattern

VARIANTS = {
    **{
        name: compressors.get(name)
        for name in compressors.available()
        if isinstance(compressors.get(name), compressors.Codec)
    },
    "int8 nearest": compressors.ErrorFeedback(compressors.QSGD()),
    "randomk unbiased": compressors.RandomK(0.2, error_feedback=False),
    "topk float16": compressors.TopK(0.05, values="float16"),
    "topk exact": compressors.TopK(0.3, selection="exact"),
    "topk warming up": compressors.TopK(0.001, dense_steps=1, ramp_steps=9),
}
SIZES = [0, 1, 7, 8, 9, 31, 32, 33, 1000]
every_codec = pytest.mark.parametrize("codec", VARIANTS.values(), ids=VARIANTS)
feedback_codecs = pytest.mark.parametrize(
    "codec",
    [codec for codec in VARIANTS.values() if codec.error_feedback],
    ids=[name for name, codec in VARIANTS.items() if codec.error_feedback],
)
quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow], derandomize=True)


@st.composite
def cases(draw):
    """Values, with their frame: several tensors, many magnitudes, zeros, ties."""
    sizes = tuple(draw(st.lists(st.sampled_from([size for size in SIZES if size]), min_size=1, max_size=4)))
    ranks = draw(st.integers(1, 5))
    frame = Frame(sizes, draw(st.integers(0, 20)), ranks, draw(st.integers(0, ranks - 1)), draw(st.integers(0, 3)))
    generator = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    values = generator.standard_normal(frame.numel) * 10.0 ** draw(st.integers(-12, 4))
    kind = draw(st.sampled_from(["normal", "zeros", "mostly zero", "ties", "heavy tail"]))
    if kind == "zeros":
        values[:] = 0
    elif kind == "mostly zero":
        values[generator.random(frame.numel) < 0.97] = 0
    elif kind == "ties":
        values = np.sign(values)
    elif kind == "heavy tail":
        values = np.clip(values**5, -1e4, 1e4)
    return torch.from_numpy(values.astype(np.float32)), frame


@every_codec
@given(cases())
@quick
def test_payload_is_flat_of_the_announced_length_and_decodes_to_the_frame(codec, case):
    values, frame = case
    before = values.clone()
    payload = codec.encode(values, frame)
    assert payload.dim() == 1
    assert payload.is_contiguous()
    assert payload.nbytes == codec.nbytes(frame)
    if codec.pattern(frame) in (Pattern.ALL_GATHER, Pattern.TWO_PHASE):
        assert payload.dtype == torch.uint8
    assert torch.equal(values, before), "encode() changed its input"
    decoded = codec.decode(payload, frame)
    assert decoded.shape == values.shape
    assert decoded.dtype == torch.float32
    assert decoded.isfinite().all()


@every_codec
@given(cases())
@quick
def test_the_same_values_give_the_same_bits(codec, case):
    values, frame = case
    assert torch.equal(codec.encode(values, frame), codec.encode(values.clone(), frame))


@every_codec
@given(cases())
@quick
def test_room_that_is_lent_changes_no_bit(codec, case):
    """Slices' payloads lie one after the other, at odd places, and what was there before does not matter."""
    values, frame = case
    slices = frame.slices()
    sizes = [codec.nbytes(piece) for piece in slices]
    rooms = torch.full((sum(sizes),), 255, dtype=torch.uint8).split(sizes)
    for part, piece, room in zip(values.split([piece.numel for piece in slices]), slices, rooms, strict=True):
        expected = codec.encode(part, piece)
        found = codec.encode_in(part, piece, room)
        assert found.dtype == expected.dtype
        assert torch.equal(found, expected)


@every_codec
@given(cases())
@quick
def test_payloads_can_be_read_at_any_offset(codec, case):
    values, frame = case
    payload = codec.encode(values, frame)
    if payload.dtype != torch.uint8:
        return
    shifted = torch.cat([payload.new_zeros(3), payload])[3:]
    assert torch.equal(codec.decode(shifted, frame), codec.decode(payload, frame))


@every_codec
@pytest.mark.parametrize("size", SIZES)
def test_zeros_stay_zeros(codec, size):
    frame = Frame((size,) if size else (), 5, 3)
    decoded = codec.decode(codec.encode(torch.zeros(size), frame), frame)
    assert torch.equal(decoded, torch.zeros(size))


@feedback_codecs
@given(cases())
@quick
def test_what_is_left_is_what_the_payload_misses(codec, case):
    values, frame = case
    left = values.clone()
    payload = codec.encode_error(left, frame)
    assert torch.equal(payload, codec.encode(values, frame))
    assert torch.equal(left, values - codec.decode(payload, frame))


@every_codec
@given(cases())
@quick
def test_decode_add_adds_what_decode_gives(codec, case):
    values, frame = case
    payload = codec.encode(values, frame)
    total = torch.linspace(-1, 1, frame.numel)
    expected = total + codec.decode(payload, frame)
    codec.decode_add(payload, frame, total)
    assert torch.equal(total, expected)


@feedback_codecs
@given(cases())
@quick
def test_slices_and_what_is_left_make_up_the_values(codec, case):
    values, frame = case
    left = values.clone()
    slices = frame.slices()
    parts = codec.encode_slices(left, frame, [])
    assert [piece.numel for piece in slices] == [
        codec.decode(part, piece).numel() for part, piece in zip(parts, slices, strict=True)
    ]
    decoded = torch.cat([codec.decode(part, piece) for part, piece in zip(parts, slices, strict=True)])
    torch.testing.assert_close(decoded + left, values, rtol=2e-6, atol=2e-6 * float(values.abs().max()))


@feedback_codecs
@given(cases())
@quick
def test_coding_brings_values_nearer_to_zero(codec, case):
    """Contraction, by which error feedback converges: |x - decode(x)|^2 <= (1 - d) |x|^2 with d > 0."""
    values, frame = case
    left = values.clone()
    codec.encode_error(left, frame)
    square = float(values.double().square().sum())
    assert float(left.double().square().sum()) <= square
    random = isinstance(codec, compressors.RandomK)  # contracts on average, and for sure only where nothing is zero
    if square > 0 and (not random or bool((values != 0).all())):
        assert float(left.double().square().sum()) < square


@feedback_codecs
def test_residuals_stay_bounded_and_nothing_is_lost(codec):
    frame = Frame((100, 300), 50, 1)
    residual, received, sent = torch.zeros(400), torch.zeros(400).double(), torch.zeros(400).double()
    generator = torch.Generator().manual_seed(1)
    norms = []
    for _ in range(300):
        gradient = torch.randn(400, generator=generator)
        sent += gradient
        residual += gradient
        received += codec.decode(codec.encode_error(residual, frame), frame)
        norms.append(float(residual.norm()))
    torch.testing.assert_close(received + residual, sent, rtol=0, atol=1e-4)
    assert max(norms[200:]) < 1.5 * max(norms[:200])


@pytest.mark.parametrize(
    ("codec", "variance"),
    [(compressors.QSGD(levels=3), 0.25), (compressors.RandomK(0.25, error_feedback=False), None)],
    ids=["int8", "randomk"],
)
def test_unbiased_codecs_are_unbiased(codec, variance):
    values = torch.randn(64, generator=torch.Generator().manual_seed(0)).double()
    draws = 10_000
    mean = torch.zeros(64).double()
    for step in range(draws):
        frame = Frame((64,), step, 2)
        mean += codec.decode(codec.encode(values.float(), frame), frame) / draws
    if variance is None:
        deviation = values.abs() * 3**0.5  # n/k = 4: variance (n/k - 1) x^2
    else:
        deviation = torch.full((64,), float(values.abs().max()) / 3 * variance**0.5)
    assert bool(((mean - values).abs() < 5 * deviation / draws**0.5 + 1e-6).all())


def test_random_k_draws_new_entries_each_step_the_same_on_all_ranks():
    codec = compressors.RandomK(0.1)
    values = torch.ones(100)

    def kept(step, rank, stream=0):
        frame = Frame((100,), step, 4, rank, stream)
        return codec.decode(codec.encode(values, frame), frame).nonzero().flatten().tolist()

    assert kept(0, 0) == kept(0, 3)
    assert kept(0, 0) != kept(1, 0)
    assert kept(0, 0) != kept(0, 0, stream=1)


def test_int8_error_is_below_a_level():
    frame = Frame((1000, 7), 3, 2)
    values = torch.randn(1007, generator=torch.Generator().manual_seed(0))
    for codec, levels in ((compressors.QSGD(), 1.0), (compressors.ErrorFeedback(compressors.QSGD()), 0.5)):
        error = (codec.decode(codec.encode(values, frame), frame) - values).abs().max()
        assert float(error) <= levels * float(values.abs().max()) / 127 * 1.001


def test_error_feedback_is_for_codecs():
    assert compressors.ErrorFeedback(compressors.BF16()).error_feedback
    assert not compressors.BF16().error_feedback
    with pytest.raises(ValueError, match="not a codec"):
        compressors.ErrorFeedback(compressors.PowerSGD())


def test_unrounded_top_k_moves_values_bit_for_bit():
    frame = Frame((1000,), 0, 1)
    values = torch.randn(1000, generator=torch.Generator().manual_seed(0))
    left = values.clone()
    decoded = compressors.TopK(0.1).decode(compressors.TopK(0.1).encode_error(left, frame), frame)
    assert int((decoded != 0).sum()) == 100
    assert torch.equal(torch.where(decoded != 0, decoded, left), values)
    assert float(left[decoded == 0].abs().max()) <= float(decoded[decoded != 0].abs().min())


def test_top_k_takes_the_first_of_equal_magnitudes():
    frame = Frame((10,), 0, 1)
    values = torch.tensor([1.0, -2.0, 2.0, 1.0, 2.0, -2.0, 0.0, 2.0, 1.0, 1.0])
    decoded = compressors.TopK(0.3).decode(compressors.TopK(0.3).encode(values, frame), frame)
    assert decoded.nonzero().flatten().tolist() == [1, 2, 4]


def test_top_k_warm_up_falls_geometrically_to_the_density():
    codec = compressors.TopK(0.01, dense_steps=2, ramp_steps=3)
    densities = [codec.density_at(step) for step in range(8)]
    assert densities[:2] == [1.0, 1.0]
    assert densities[2:5] == pytest.approx([0.01**0.25, 0.1, 0.01**0.75])
    assert densities[5:] == [0.01] * 3


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 64])
@pytest.mark.parametrize("density", [0.001, 0.01, 0.1, 0.3, 0.49, 0.51, 0.9])
def test_top_k_takes_the_pattern_that_sends_least(ranks, density):
    codec, frame = compressors.TopK(density), Frame((10**5,), 0, ranks)
    payload = codec.nbytes(frame)
    sends = {
        Pattern.DENSE: 2 * (ranks - 1) / ranks * 4 * frame.numel,
        Pattern.ALL_GATHER: (ranks - 1) * payload,
        Pattern.TWO_PHASE: 2 * (ranks - 1) / ranks * payload,
    }
    assert sends[codec.pattern(frame)] == min(sends.values())


def test_one_bit_packs_eight_signs_to_a_byte_like_numpy():
    values = torch.tensor([1.0, -1.0, 0.0, -0.0, -3.0, 2.0, -1.0, 1.0, -1.0, 5.0])
    frame = Frame((4, 6), 0, 1)
    payload = compressors.OneBit().encode(values, frame)
    assert payload.numel() == 4 * 2 + 2
    assert payload[8:].tolist() == np.packbits(values.numpy() >= 0).tolist()
    assert payload[:8].view(torch.float32).tolist() == pytest.approx([0.5, 13 / 6])


def test_one_bit_scale_knows_no_padding():
    for size in (1, 7, 9, 768):
        frame = Frame((size,), 0, 4)
        decoded = [
            compressors.OneBit().decode(part, piece)
            for part, piece in zip(
                compressors.OneBit().encode_slices(torch.full((size,), 3.0), frame, []), frame.slices(), strict=True
            )
        ]
        assert torch.equal(torch.cat(decoded), torch.full((size,), 3.0))


def test_float16_values_reach_beyond_float16():
    frame = Frame((4,), 0, 1)
    codec = compressors.TopK(1.0, values="float16")
    for scale in (1e-30, 1e-9, 1.0, 1e30):
        values = torch.tensor([1.0, -0.5, 0.25, 0.7]) * scale
        torch.testing.assert_close(codec.decode(codec.encode(values, frame), frame), values, rtol=1e-3, atol=0)


def test_frames_cut_at_tensor_boundaries():
    frame = Frame((5, 1, 10), 0, 3)
    assert [piece.sizes for piece in frame.slices()] == [(5,), (1, 4), (6,)]
    assert [piece.sizes for piece in Frame((1,), 0, 3).slices()] == [(), (), (1,)]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"density": 0}, "density"),
        ({"density": 1.5}, "density"),
        ({"values": "int8"}, "values"),
        ({"exchange": "ring"}, "exchange"),
        ({"selection": "fast"}, "selection"),
        ({"ramp_steps": -1}, "negative"),
    ],
)
def test_top_k_refuses_nonsense(options, message):
    with pytest.raises(ValueError, match=message):
        compressors.TopK(**options)
