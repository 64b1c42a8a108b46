"""Best-fit-decreasing packing, compiled and deterministic."""

from __future__ import annotations

import numba
import numpy as np

_compiled = numba.njit(cache=True, nogil=True)


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
