"""Compiled loops over the documents of an epoch: shuffling, slicing into steps.

`lengths` are int32 [documents] tokens of all documents; `order` and `documents` are document numbers, int32. All are
deterministic: no result depends on threads, on the machine, or on a library's random generator.
"""

from __future__ import annotations

import numba
import numpy as np

_compiled = numba.njit(cache=True, nogil=True)
_CHUNK = 4096  # documents whose buckets are found at a time


@_compiled
def mixed(seed: int, index: int) -> np.uint64:
    """Random bits, uint64: element `index` of the SplitMix64 sequence of `seed` (Steele et al. 2014)."""
    z = np.uint64(seed) + np.uint64(index) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_compiled
def _random_key(document: int, low: int, high: int) -> np.uint32:
    """32 random bits, different for different documents: every step of the way can be undone.

    `low` and `high` are the halves of a seed that is random itself: close ones give related keys.
    """
    word = np.uint32(np.uint32(document) * np.uint32(np.uint32(2) * high + np.uint32(1)))
    word = np.uint32(word ^ low)
    for _ in range(2):  # casts, because Numba's products of 32-bit integers have 64
        word = np.uint32(np.uint32(word ^ (word >> 16)) * np.uint32(0x7FEB352D))
        word = np.uint32(np.uint32(word ^ (word >> 15)) * np.uint32(0x846CA68B))
        word = np.uint32(word ^ (word >> 16))
    return word


@_compiled
def _find_buckets(begin: int, low: int, high: int, shift: int, buckets: np.ndarray) -> None:
    """Write the buckets, the highest bits of their keys, of the documents from `begin` on to `buckets`, uint16."""
    for i in range(len(buckets)):
        buckets[i] = np.uint64(_random_key(begin + i, low, high)) >> np.uint64(shift)


@_compiled
def weigh_buckets(
    lengths: np.ndarray, most: int, low: int, high: int, shift: int, count: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(bucket of each document, uint16; tokens, as `weigh` counts them, and documents before each of `count` buckets
    and of all, int64 [count + 1] each).
    """
    sums = np.zeros((count + 1, 2), np.int64)  # side by side, as both of a bucket change together
    buckets = np.empty(len(lengths), np.uint16)
    for begin in range(0, len(lengths), _CHUNK):
        part, into = lengths[begin : begin + _CHUNK], buckets[begin : begin + _CHUNK]
        _find_buckets(begin, low, high, shift, into)
        for i in range(len(part)):
            sums[np.int64(into[i]) + 1, 0] += min(np.int64(part[i]), most)
            sums[np.int64(into[i]) + 1, 1] += 1
    return buckets, sums[:, 0].cumsum(), sums[:, 1].cumsum()


@_compiled
def buckets_of_step(tokens: np.ndarray, step: int, steps: int, total: int) -> tuple[int, int, int, int, int]:
    """(first, last, before, after, until): `step` trains what lies in buckets `first` to `last` and ends beyond token
    `after`, not beyond `until`; `before` tokens precede those buckets. `tokens` are those before each, see
    `weigh_buckets`.
    """
    after = end_of_step(step - 1, steps, total) if step else -1
    until = end_of_step(step, steps, total)
    first = int(np.searchsorted(tokens[1:], after, side="right"))
    last = min(int(np.searchsorted(tokens, until, side="right")) - 1, len(tokens) - 2)
    return first, last, tokens[first], after, until


@_compiled
def in_buckets(buckets: np.ndarray, first: int, last: int, count: int) -> np.ndarray:
    """The `count` documents whose buckets are `first` to `last`, int32, ascending."""
    found = np.empty(count + 1, np.int32)  # what does not count is overwritten
    at = 0
    for document in range(len(buckets)):
        found[at] = document
        at += (buckets[document] >= first) & (buckets[document] <= last)
    return found[:count]


@_compiled
def group(order: np.ndarray, buckets: np.ndarray, places: np.ndarray) -> None:
    """Write all documents to `order` by bucket; `places` are where each bucket begins, and are moved to their ends."""
    for document in range(len(order)):
        bucket = buckets[document]
        order[places[bucket]] = document
        places[bucket] += 1


@_compiled
def sort_buckets(order: np.ndarray, low: int, high: int, starts: np.ndarray) -> None:
    """Bring the documents of each bucket, which begin at `starts`, into the order of their keys."""
    for bucket in range(len(starts) - 1):
        part = order[starts[bucket] : starts[bucket + 1]]
        part[:] = part[np.argsort(_keys(part, low, high))]


@_compiled
def _keys(documents: np.ndarray, low: int, high: int) -> np.ndarray:
    keys = np.empty(len(documents), np.uint32)
    for i in range(len(documents)):
        keys[i] = _random_key(documents[i], low, high)
    return keys


@_compiled
def in_key_order(
    documents: np.ndarray, lengths: np.ndarray, most: int, low: int, high: int, before: int, after: int, until: int
) -> np.ndarray:
    """Those `documents`, by key, that end beyond token `after` and not beyond `until`; `before` tokens precede them."""
    ordered = documents[np.argsort(_keys(documents, low, high))]
    begin, end, tokens = 0, 0, np.int64(before)
    for document in ordered:
        tokens += min(np.int64(lengths[document]), most)
        begin += tokens <= after
        end += tokens <= until
    return ordered[begin:end]


@_compiled
def weigh(lengths: np.ndarray, most: int) -> tuple[int, int]:
    """(sum, maximum) of the lengths, each counted as at most `most`, int64."""
    total, largest = np.int64(0), np.int64(0)
    for length in lengths:
        weight = min(np.int64(length), most)
        total += weight
        largest = max(largest, weight)
    return total, largest


@_compiled
def end_of_step(step: int, steps: int, total: int) -> int:
    """First token that lies beyond `step` when `total` are cut into `steps` equal parts: no product overflows."""
    whole, rest = total // steps, total % steps
    return (step + 1) * whole + -(-((step + 1) * rest) // steps)


@_compiled
def step_bounds(order: np.ndarray, lengths: np.ndarray, most: int, steps: int, total: int) -> np.ndarray:
    """Where each of `steps` begins in `order`, int64 [steps + 1]: a document belongs to the step it ends in."""
    bounds = np.empty(steps + 1, np.int64)
    bounds[0] = 0
    step, tokens = 0, np.int64(0)
    limit = end_of_step(step, steps, total)
    for i in range(len(order)):
        tokens += min(np.int64(lengths[order[i]]), most)
        while tokens > limit:
            step += 1
            bounds[step] = i
            limit = end_of_step(step, steps, total)
    bounds[step + 1 :] = len(order)
    return bounds


@_compiled
def trained(documents: np.ndarray, lengths: np.ndarray, context: np.ndarray) -> tuple[int, int]:
    """(tokens of `documents`, those of them that are labels): all but the first ``context[i]`` and at least one."""
    tokens, labels = np.int64(0), np.int64(0)
    for i in range(len(documents)):
        length = np.int64(lengths[documents[i]])
        tokens += length
        labels += max(length - max(np.int64(context[i]), 1), 0)
    return tokens, labels


@_compiled
def progress(order: np.ndarray, lengths: np.ndarray, owners: np.ndarray, replicas: int) -> np.ndarray:
    """The part of its owner's tokens that comes up to and with each document of `order`, float64 in [0, 1]."""
    totals, done = np.zeros(replicas), np.zeros(replicas)
    for document in order:
        totals[owners[document]] += lengths[document]
    parts = np.empty(len(order))
    for i in range(len(order)):
        owner = owners[order[i]]
        done[owner] += lengths[order[i]]
        parts[i] = done[owner] / max(totals[owner], 1.0)
    return parts


@_compiled
def grouped(
    order: np.ndarray, lengths: np.ndarray, thresholds: np.ndarray, kinds: np.ndarray, weights: np.ndarray, seed: int
) -> tuple[np.ndarray, np.ndarray]:
    """`order` by length class, inside each drawn without replacement by weight: (documents, class starts [4]).

    Short is below `thresholds[0]`, long from `thresholds[1]` on. `weights[kinds[d]]` weighs document d; keys are
    those of Efraimidis & Spirakis (2006), sorted by 2048ths of an octave, equal ones as `order` has them.
    """
    buckets = 1 << 16
    counts = np.zeros(3 * buckets + 1, np.int64)
    for document in order:
        counts[_bucket(document, lengths, thresholds, weights[kinds[document]], seed) + 1] += 1
    places = counts.cumsum()
    starts = places[::buckets].copy()
    documents = np.empty(len(order), np.int32)
    for document in order:
        bucket = _bucket(document, lengths, thresholds, weights[kinds[document]], seed)
        documents[places[bucket]] = document
        places[bucket] += 1
    return documents, starts


@_compiled
def _bucket(document: int, lengths: np.ndarray, thresholds: np.ndarray, weight: float, seed: int) -> int:
    kind = np.int64(lengths[document] >= thresholds[0]) + np.int64(lengths[document] >= thresholds[1])
    key = (1 << 16) - 1
    if weight > 0:
        uniform = (np.float64(mixed(seed, document) >> np.uint64(11)) + 0.5) * 2.0**-53
        octave = np.log2(-np.log(uniform) / weight)
        key = min(max(np.int64((octave + 16) * 2048), 0), key)
    return (kind << 16) + key


@_compiled
def interleaved(
    order: np.ndarray,
    documents: np.ndarray,
    starts: np.ndarray,
    lengths: np.ndarray,
    most: int,
    steps: int,
    total: int,
    first_step: int,
    phase_starts: np.ndarray,
    mixes: np.ndarray,
) -> None:
    """Write `documents`, grouped in three classes, to `order` so that every step has the mix of its phase.

    `mixes[phase]` are shares of samples, [3, 3]; `phase_starts` the steps of the run that begin phases 1 and 2. Once
    a class that the phase asks for has run out, what is left is mixed evenly over the rest of the epoch.
    """
    left, credit, share = starts[1:] - starts[:-1], np.zeros(3), np.zeros(3)
    step, phase, tokens = 0, -1, np.int64(0)
    limit = end_of_step(step, steps, total)
    for i in range(len(order)):
        now = np.int64(first_step + step >= phase_starts[0]) + np.int64(first_step + step >= phase_starts[1])
        if now != phase:
            phase = now
            credit[:] = 0.0
        lasting = True
        for kind in range(3):
            lasting &= left[kind] > 0 or mixes[phase, kind] == 0.0
        best = -1
        for kind in range(3):
            share[kind] = mixes[phase, kind] if lasting else left[kind] / (len(order) - i)
            credit[kind] += share[kind]
            if left[kind] > 0 and share[kind] > 0 and (best < 0 or credit[kind] > credit[best]):
                best = kind
        credit[best] -= 1.0
        order[i] = documents[starts[best + 1] - left[best]]
        left[best] -= 1
        tokens += min(np.int64(lengths[order[i]]), most)
        while tokens > limit:
            step += 1
            limit = end_of_step(step, steps, total)
