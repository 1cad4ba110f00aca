/* Pieces whose bytes lie in several runs of memory on either side, copied with their sums. No Python here, no lock is needed. */
#ifndef KVSTORED_PIECES_H
#define KVSTORED_PIECES_H

#include "hashed_copy.h"

/* `at` is NULL on the side copied to where bytes are only summed, at their source. No run is empty. */
struct run {
    uint8_t *at;
    size_t bytes;
};

/* Both sides have the same bytes in sum: who makes a piece has checked it. */
struct piece {
    const struct run *to, *from;
    size_t bytes;
};

struct cursor {
    const struct run *run;
    size_t done;
};

static inline size_t left_of(const struct cursor *cursor)
{
    return cursor->run->bytes - cursor->done;
}

static inline uint8_t *place_of(const struct cursor *cursor)
{
    return cursor->run->at ? cursor->run->at + cursor->done : NULL;
}

static inline void advance(struct cursor *cursor, size_t bytes)
{
    cursor->done += bytes;
    if (cursor->done == cursor->run->bytes)
        *cursor = (struct cursor){cursor->run + 1, 0};
}

static inline size_t least(size_t a, size_t b)
{
    return a < b ? a : b;
}

static void gather(uint8_t *joint, struct cursor *from, size_t bytes)
{
    while (bytes) {
        size_t some = least(bytes, left_of(from));
        memcpy(joint, place_of(from), some);
        advance(from, some);
        joint += some;
        bytes -= some;
    }
}

static void scatter(struct cursor *to, const uint8_t *joint, size_t bytes)
{
    while (bytes) {
        size_t some = least(bytes, left_of(to));
        if (to->run->at)
            memcpy(place_of(to), joint, some);
        advance(to, some);
        joint += some;
        bytes -= some;
    }
}

/* Whole blocks that lie in one run on both sides. */
static void copy_blocks(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks, bool past_cache)
{
    if (!to) {
        kernel.sum(acc, NULL, from, blocks);
    } else if (blocks * BLOCK_BYTES < FUSED_BYTES_MIN) {
        memcpy(to, from, blocks * BLOCK_BYTES);
        kernel.sum(acc, NULL, to, blocks);
    } else {
        (past_cache ? kernel.stream : kernel.copy)(acc, to, from, blocks);
    }
}

/* The sum of what the runs copied to have now. A block that a border cuts goes by a joint of private memory, and is summed there. */
static uint64_t piece_summed(const struct piece *piece, bool past_cache)
{
    XXH_ALIGN(64) uint64_t acc[8];
    uint8_t joint[STRIPE_BYTES + BLOCK_BYTES], *middle = joint + STRIPE_BYTES;
    struct cursor to = {piece->to, 0}, from = {piece->from, 0};
    size_t left = piece->bytes;
    if (left && to.run->bytes == left && from.run->bytes == left && to.run->at)
        return copy_summed(to.run->at, from.run->at, left, past_cache);
    memcpy(acc, first_sums, sizeof acc);
    while (left > BLOCK_BYTES) {
        size_t blocks = least(least(left_of(&to), left_of(&from)), left - 1) / BLOCK_BYTES;
        size_t bytes = blocks ? blocks * BLOCK_BYTES : BLOCK_BYTES;
        if (blocks) {
            uint8_t *there = place_of(&to), *here = place_of(&from);
            copy_blocks(acc, there, here, blocks, past_cache);
            memcpy(joint, (there ? there : here) + bytes - STRIPE_BYTES, STRIPE_BYTES);
            advance(&to, bytes);
            advance(&from, bytes);
        } else {
            gather(middle, &from, bytes);
            kernel.sum(acc, NULL, middle, 1);
            scatter(&to, middle, bytes);
            memcpy(joint, middle + bytes - STRIPE_BYTES, STRIPE_BYTES);
        }
        left -= bytes;
    }
    gather(middle, &from, left);
    scatter(&to, middle, left);
    if (piece->bytes <= SHORT_BYTES)
        return XXH3_64bits(middle, left);
    return last_sum(acc, middle, left, piece->bytes);
}

static void piece_copied(const struct piece *piece, bool past_cache)
{
    struct cursor to = {piece->to, 0}, from = {piece->from, 0};
    size_t left = piece->bytes;
    while (left) {
        size_t some = least(left, least(left_of(&to), left_of(&from)));
        uint8_t *there = place_of(&to);
        if (there && past_cache)
            pour(there, place_of(&from), some);
        else if (there)
            memcpy(there, place_of(&from), some);
        advance(&to, some);
        advance(&from, some);
        left -= some;
    }
}

#endif
