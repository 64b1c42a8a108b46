"""Compiled loops over documents: shuffling, slicing into steps, cutting, dealing, packing.

`lengths` are int32 [documents] tokens of all documents; `order` and `documents` are document numbers, int32. All are
deterministic: no result depends on threads, on the machine, or on a library's random generator.
"""

from __future__ import annotations

import heapq

import numba
import numpy as np

_compiled = numba.njit(cache=True, nogil=True)


@_compiled
def mixed(seed: int, index: int) -> np.uint64:
    """Random bits, uint64: element `index` of the SplitMix64 sequence of `seed` (Steele et al. 2014)."""
    z = np.uint64(seed) + np.uint64(index) * np.uint64(0x9E3779B97F4A7C15)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


@_compiled
def shuffled(order: np.ndarray, seed: int) -> None:
    """Write a random permutation of all documents to `order` (Fisher and Yates)."""
    for i in range(len(order)):
        order[i] = i
    for i in range(len(order) - 1, 0, -1):
        j = np.int64(mixed(seed, i) % np.uint64(i + 1))
        order[i], order[j] = order[j], order[i]


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
def _end_of_step(step: int, steps: int, total: int) -> int:
    """First token that lies beyond `step` when `total` are cut into `steps` equal parts: no product overflows."""
    whole, rest = total // steps, total % steps
    return (step + 1) * whole + -(-((step + 1) * rest) // steps)


@_compiled
def step_bounds(order: np.ndarray, lengths: np.ndarray, most: int, steps: int, total: int) -> np.ndarray:
    """Where each of `steps` begins in `order`, int64 [steps + 1]: a document belongs to the step it ends in."""
    bounds = np.empty(steps + 1, np.int64)
    bounds[0] = 0
    step, tokens = 0, np.int64(0)
    limit = _end_of_step(step, steps, total)
    for i in range(len(order)):
        tokens += min(np.int64(lengths[order[i]]), most)
        while tokens > limit:
            step += 1
            bounds[step] = i
            limit = _end_of_step(step, steps, total)
    bounds[step + 1 :] = len(order)
    return bounds


@_compiled
def cut(documents: np.ndarray, lengths: np.ndarray, chunk: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Cut documents into spans of `chunk` tokens and a shorter rest: (index in `documents`, start, stop), int32 each.

    Documents without tokens have no span.
    """
    count = 0
    for document in documents:
        count += -(-lengths[document] // chunk)
    which, start, stop = np.empty(count, np.int32), np.empty(count, np.int32), np.empty(count, np.int32)
    at = 0
    for i in range(len(documents)):
        length = lengths[documents[i]]
        for first in range(0, length, chunk):
            which[at], start[at], stop[at] = i, first, min(first + chunk, length)
            at += 1
    return which, start, stop


@_compiled
def longest_processing_time(weights: np.ndarray, replicas: int) -> np.ndarray:
    """Deal items, heaviest first, each to the least loaded replica (Graham 1969); returns int32 [items]."""
    owners = np.empty(len(weights), np.int32)
    loads = [(0.0, replica) for replica in range(replicas)]
    for i in range(len(weights)):
        load, replica = loads[0]
        owners[i] = replica
        heapq.heapreplace(loads, (load + weights[i], replica))
    return owners


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
def best_fit_decreasing(sizes: np.ndarray, starts: np.ndarray, capacities: np.ndarray) -> np.ndarray:
    """Pack items, largest first, each into the fullest pack with room for it; returns the pack of each, int32.

    Those of replica r are `sizes[starts[r]:starts[r + 1]]`, descending and at most `capacities[r]`; its packs are
    numbered from 0. Rooms are found by bits: an item costs about the same however many packs are open.
    """
    widest = capacities.max()
    packs, below = np.empty(len(sizes), np.int32), np.empty(len(sizes), np.int32)
    room_of = np.empty(len(sizes), np.int32)
    newest = np.full(widest + 1, -1, np.int32)  # of the packs with this much room left; the others lie `below` it
    rooms = np.zeros(widest // 64 + 1, np.uint64)  # a bit for each room that some pack has left
    words = np.zeros(len(rooms) // 64 + 1, np.uint64)  # a bit for each word of `rooms` that is not 0
    for replica in range(len(capacities)):
        count = 0
        for i in range(starts[replica], starts[replica + 1]):
            room = _next_room(rooms, words, sizes[i])
            if room < 0:
                room, pack = capacities[replica], count
                count += 1
            else:
                pack = newest[room]
                newest[room] = below[pack]
                if newest[room] < 0:
                    rooms[room // 64] ^= _bit(room)
                    if rooms[room // 64] == 0:
                        words[room // 4096] ^= _bit(room // 64)
            packs[i] = pack
            room -= sizes[i]
            rooms[room // 64] |= _bit(room)
            words[room // 4096] |= _bit(room // 64)
            below[pack], newest[room], room_of[pack] = newest[room], pack, room
        for pack in range(count):
            newest[room_of[pack]] = -1
            rooms[room_of[pack] // 64] = 0
        words[:] = 0
    return packs


@_compiled
def packed(
    owners: np.ndarray, sizes: np.ndarray, capacities: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Pack the items of each owner, see `best_fit_decreasing`; `sizes` descend.

    Returns the items pack by pack, int64, the pack of each within its owner, int32 [items], where each pack begins
    among them, int64 [packs + 1], and with which pack each owner, int64 [owners + 1].
    """
    grouped, starts = _sorted_by(owners, len(capacities))
    pack = best_fit_decreasing(sizes[grouped], starts, capacities)
    first_pack = np.zeros(len(capacities) + 1, np.int64)
    for owner in range(len(capacities)):
        most = -1
        for i in range(starts[owner], starts[owner + 1]):
            most = max(most, pack[i])
            pack[i] += first_pack[owner]
        first_pack[owner + 1] = first_pack[owner] + most + 1
    order, pack_starts = _sorted_by(pack, first_pack[-1])
    items = grouped[order]
    within = np.empty(len(items), np.int32)
    for i in range(len(items)):
        within[i] = pack[order[i]] - first_pack[owners[items[i]]]
    return items, within, pack_starts, first_pack


@_compiled
def _sorted_by(keys: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """A stable order of items by `keys` in [0, count), and where each key begins in it, int64."""
    starts = np.zeros(count + 1, np.int64)
    for key in keys:
        starts[key + 1] += 1
    starts = starts.cumsum()
    places = starts.copy()
    order = np.empty(len(keys), np.int64)
    for i in range(len(keys)):
        order[places[keys[i]]] = i
        places[keys[i]] += 1
    return order, starts


@_compiled
def _bit(index: int) -> np.uint64:
    return np.uint64(1) << np.uint64(index % 64)


@_compiled
def _next_room(rooms: np.ndarray, words: np.ndarray, size: int) -> int:
    """The smallest room >= `size` that a pack has left, or -1."""
    found = rooms[size // 64] & ~(_bit(size) - np.uint64(1))
    if found:
        return size // 64 * 64 + _lowest(found)
    word = size // 64 + 1
    if word >= len(rooms):
        return -1
    group = word // 64
    found = words[group] & ~(_bit(word) - np.uint64(1))
    while not found:
        group += 1
        if group == len(words):
            return -1
        found = words[group]
    word = group * 64 + _lowest(found)
    return word * 64 + _lowest(rooms[word])


@_compiled
def _lowest(bits: np.uint64) -> int:
    """The number of the lowest bit set; there is one."""
    number = 0
    for width in (32, 16, 8, 4, 2, 1):
        if not bits & ((np.uint64(1) << np.uint64(width)) - np.uint64(1)):
            bits >>= np.uint64(width)
            number += width
    return number


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
    limit = _end_of_step(step, steps, total)
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
            limit = _end_of_step(step, steps, total)
