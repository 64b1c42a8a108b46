"""The ledger against what is known to cross the wire."""

from __future__ import annotations

import horovod.torch as hvd

import compressors

from .common import exchange, make_parameters, wrap

NUMEL = 512 * 512
VETO = 4


def _account(compression):
    parameters = make_parameters({"weight": (512, 512)})
    optimizer = wrap(parameters, compression)
    for step in range(2):
        exchange(optimizer, parameters, step)
    return optimizer.ledger


def _ring(nbytes: int) -> int:
    return -(-2 * (hvd.size() - 1) * nbytes // hvd.size())


def check_bytes():
    ranks, slices = hvd.size(), [NUMEL * (r + 1) // hvd.size() - NUMEL * r // hvd.size() for r in range(hvd.size())]
    others = sum(size for rank, size in enumerate(slices) if rank != hvd.rank())
    assert _account(None).bytes_sent == _ring(4 * NUMEL)
    if ranks == 1:
        return
    veto = _ring(VETO)
    assert _account(compressors.FP16()).bytes_sent == _ring(2 * NUMEL) + veto
    assert _account(compressors.BF16()).bytes_sent == 2 * others + 2 * NUMEL * (ranks - 1) // ranks + veto
    packed = [4 + -(-size // 8) for size in slices]
    leaving = sum(size for rank, size in enumerate(packed) if rank != hvd.rank())
    assert _account(compressors.OneBit()).bytes_sent == leaving + sum(packed) * (ranks - 1) // ranks + veto
    kept = -(-NUMEL // 100)
    gathered = _account(compressors.TopK(0.01, exchange="all_gather"))
    assert gathered.bytes_sent == 8 * kept * (ranks - 1) + veto


def check_two_phase_top_k_is_bounded_at_any_number_of_ranks():
    for values, width in (("float32", 8), ("float16", 6)):
        ledger = _account(compressors.TopK(0.01, exchange="two_phase", values=values))
        kept = -(-NUMEL // 100)
        headers = 2 * 4 * hvd.size()
        assert ledger.bytes_sent <= 2 * width * kept + headers + hvd.size() * width + VETO * 2


def check_ratios():
    if hvd.size() == 1:
        return
    for compression, least in (
        (compressors.OneBit(), 28),
        (compressors.TopK(0.01, values="float16"), 28),
        (compressors.BF16(), 1.99),
    ):
        ledger = _account(compression)
        assert ledger.bytes_dense == _ring(4 * NUMEL)
        assert ledger.ratio >= least, f"{compression}: {ledger.ratio}"
        assert ledger.total.bytes_sent == 2 * ledger.bytes_sent or isinstance(compression, compressors.TopK)
        assert set(ledger.seconds) == {"encode", "exchange", "decode"}
        assert all(0 < seconds < 60 for seconds in ledger.total.seconds.values())


def check_auto_takes_what_sends_less():
    if hvd.size() == 1:
        return
    sent = {
        choice: _account(compressors.TopK(0.01, exchange=choice)).total.bytes_sent
        for choice in ("auto", "all_gather", "two_phase")
    }
    assert sent["auto"] <= 1.02 * min(sent["all_gather"], sent["two_phase"])
