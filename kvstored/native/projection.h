/* A projection as kvstored/tiers/entries.py lays it out, looked up; that module is the definition, and is compared with the numbers below
 * when this is loaded. What an entry says is copied to private memory first, and believed only if its own sum agrees.
 */
#ifndef KVSTORED_PROJECTION_H
#define KVSTORED_PROJECTION_H

#include "hashed_copy.h"

enum {
    WAYS = 8,
    TAG_BYTES = 8,
    ENTRY_WORDS = 16,
    ENTRY_BYTES = 8 * ENTRY_WORDS,
    UNIT_BYTES = 4096,
    /* words of an entry */
    SEQUENCE = 0,
    CHECKSUM = 1,
    GENERATION = 2,
    DIGEST_WORD = 3,
    KEY_WORD = 5,
    PLACE = 13,
    SIZES = 14,
    SUM = 15,
    DIGEST_BYTES = 16,
    KEY_BYTES_MAX = 64,
    SEGMENT_SHIFT = 32,
    LENGTH_SHIFT = 8,
};

/* Mapped memory whose size holds all of its slots, as the caller has checked. */
struct projection {
    const uint8_t *tags, *entries;
    uint64_t bucket_mask;
};

/* What was found of one key; `bytes` 0: nothing, no block is empty. The columns of kvstored/client/projected.py. */
struct found {
    uint64_t slot, sequence, checksum, generation, segment, offset, bytes, start;
};

static inline const uint64_t *entry_of(const struct projection *projection, uint64_t slot)
{
    return (const uint64_t *)(const void *)(projection->entries + slot * ENTRY_BYTES);
}

/* The writer makes a sequence odd, changes the entry, and makes it even again. */
static inline uint64_t sequence_of(const struct projection *projection, uint64_t slot)
{
    return __atomic_load_n(entry_of(projection, slot) + SEQUENCE, __ATOMIC_ACQUIRE);
}

/* Nothing that was read before this is read anew after it. */
static inline void read_all(void)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

/* The first way with the tag, or -1. */
static int64_t slot_of(const struct projection *projection, XXH128_hash_t fingerprint)
{
    uint64_t bucket = fingerprint.high64 & projection->bucket_mask;
    const uint64_t *tags =
        (const uint64_t *)(const void *)(projection->tags + bucket * WAYS * TAG_BYTES);
    for (uint64_t way = 0; way < WAYS; way++)
        if (__atomic_load_n(tags + way, __ATOMIC_RELAXED) == fingerprint.low64)
            return (int64_t)(bucket * WAYS + way);
    return -1;
}

static void prefetch_bucket(const struct projection *projection, XXH128_hash_t fingerprint)
{
    uint64_t bucket = fingerprint.high64 & projection->bucket_mask;
    __builtin_prefetch(projection->tags + bucket * WAYS * TAG_BYTES);
}

static void prefetch_entry(const struct projection *projection, int64_t slot)
{
    const uint64_t *entry = entry_of(projection, (uint64_t)slot);
    __builtin_prefetch(entry);
    __builtin_prefetch(entry + ENTRY_WORDS / 2);
}

enum looked { ABSENT, THERE, ODD };

/* ODD: the entry was being written, or is torn. */
static enum looked look_at(const struct projection *projection, int64_t slot, const uint8_t *digest,
                           const uint8_t *key, size_t key_bytes, struct found *found)
{
    memset(found, 0, sizeof *found);
    if (slot < 0)
        return ABSENT;
    uint64_t entry[ENTRY_WORDS];
    const uint64_t *shared = entry_of(projection, (uint64_t)slot);
    entry[SEQUENCE] = sequence_of(projection, (uint64_t)slot);
    for (size_t i = 1; i < ENTRY_WORDS; i++)
        entry[i] = __atomic_load_n(shared + i, __ATOMIC_RELAXED);
    if (entry[SEQUENCE] & 1 || entry[SUM] != XXH3_64bits(entry + 1, ENTRY_BYTES - 16))
        return ODD;
    size_t named_bytes = entry[SIZES] & ((1u << LENGTH_SHIFT) - 1);
    if (named_bytes != key_bytes || key_bytes > KEY_BYTES_MAX ||
        memcmp(entry + DIGEST_WORD, digest, DIGEST_BYTES) ||
        memcmp(entry + KEY_WORD, key, key_bytes))
        return ABSENT;
    *found = (struct found){
        .slot = (uint64_t)slot,
        .sequence = entry[SEQUENCE],
        .checksum = entry[CHECKSUM],
        .generation = entry[GENERATION],
        .segment = entry[PLACE] >> SEGMENT_SHIFT,
        .offset = (entry[PLACE] & UINT32_MAX) * UNIT_BYTES,
        .bytes = entry[SIZES] >> LENGTH_SHIFT,
    };
    return THERE;
}

#endif
