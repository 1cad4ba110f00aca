/* Copies together with their XXH3-64, in one pass over memory where the CPU has AVX2.
 *
 * A sum is made of blocks of 1 KiB and a rest of 1 to 1,024 bytes, which is summed in another way. A block is loaded once: what is stored
 * and what is summed are the same registers, so the sum is that of the private copy even while somebody writes to the source, and the
 * copy need not be in the cache afterwards. Without AVX2 it is copied in small steps, and each is summed where it was copied to.
 */
#ifndef KVSTORED_HASHED_COPY_H
#define KVSTORED_HASHED_COPY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#if defined(__BYTE_ORDER__) && __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "formats are little-endian, and read here as they lie in memory"
#endif

#define XXH_INLINE_ALL
#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#define AVX2 __attribute__((target("avx2")))
#define XXH_DISPATCH_AVX2 1
#define XXH_TARGET_AVX2 AVX2
#endif
#include "third_party/xxhash.h"

#define STRIPE_BYTES ((size_t)XXH_STRIPE_LEN)
#define STRIPES ((XXH_SECRET_DEFAULT_SIZE - STRIPE_BYTES) / XXH_SECRET_CONSUME_RATE)
#define BLOCK_BYTES (STRIPES * STRIPE_BYTES)
#define SECRET XXH3_kSecret
#define LAST_SECRET (SECRET + XXH_SECRET_DEFAULT_SIZE - STRIPE_BYTES)
/* Up to here a sum is made otherwise. */
#define SHORT_BYTES ((size_t)XXH3_MIDSIZE_MAX)
/* Smaller ones are copied by the C library, which begins faster, and summed in the L1 cache. */
#define FUSED_BYTES_MIN ((size_t)16 << 10)
#define STEP_BYTES ((size_t)8 << 10)

/* Sums whole blocks at `from`, which `copy` and `stream` copy to `to` as well; `stream` past the caches, to a multiple of 16. */
typedef void blocks_function(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks);

static struct {
    blocks_function *sum, *copy, *stream;
} kernel;

static void sum_plain(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks)
{
    (void)to;
    for (size_t n = 0; n < blocks; n++) {
        XXH3_accumulate(acc, from + n * BLOCK_BYTES, SECRET, STRIPES);
        XXH3_scrambleAcc(acc, LAST_SECRET);
    }
}

static void copy_plain(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks)
{
    for (size_t at = 0, bytes = blocks * BLOCK_BYTES; at < bytes; at += STEP_BYTES) {
        size_t step = bytes - at < STEP_BYTES ? bytes - at : STEP_BYTES;
        memcpy(to + at, from + at, step);
        sum_plain(acc, NULL, to + at, step / BLOCK_BYTES);
    }
}

#ifdef AVX2

enum store { NOWHERE, CACHED, PAST_CACHE, PAST_CACHE_16 };

AVX2 static inline __m256i summed(__m256i acc, __m256i bytes, const uint8_t *secret)
{
    __m256i key = _mm256_xor_si256(bytes, _mm256_loadu_si256((const __m256i *)secret));
    __m256i product = _mm256_mul_epu32(key, _mm256_srli_epi64(key, 32));
    __m256i swapped = _mm256_shuffle_epi32(bytes, _MM_SHUFFLE(1, 0, 3, 2));
    return _mm256_add_epi64(acc, _mm256_add_epi64(product, swapped));
}

AVX2 static inline void store_to(uint8_t *to, __m256i a, __m256i b, enum store store)
{
    if (store == CACHED) {
        _mm256_storeu_si256((__m256i *)to, a);
        _mm256_storeu_si256((__m256i *)(to + 32), b);
    } else if (store == PAST_CACHE) {
        _mm256_stream_si256((__m256i *)to, a);
        _mm256_stream_si256((__m256i *)(to + 32), b);
    } else {
        __m128i *quarters = (__m128i *)to;
        _mm_stream_si128(quarters, _mm256_castsi256_si128(a));
        _mm_stream_si128(quarters + 1, _mm256_extracti128_si256(a, 1));
        _mm_stream_si128(quarters + 2, _mm256_castsi256_si128(b));
        _mm_stream_si128(quarters + 3, _mm256_extracti128_si256(b, 1));
    }
}

AVX2 __attribute__((always_inline)) static inline void
blocks_avx2(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks, enum store store)
{
    __m256i sums[2];
    memcpy(sums, acc, sizeof sums);
    for (size_t n = 0; n < blocks; n++) {
        for (size_t i = 0; i < STRIPES; i++) {
            size_t at = n * BLOCK_BYTES + i * STRIPE_BYTES;
            __m256i a = _mm256_loadu_si256((const __m256i *)(from + at));
            __m256i b = _mm256_loadu_si256((const __m256i *)(from + at + 32));
            /* The compiler must not load them again: by then the source may be another. */
            __asm__ volatile("" : "+x"(a), "+x"(b));
            if (store != NOWHERE)
                store_to(to + at, a, b, store);
            sums[0] = summed(sums[0], a, SECRET + i * XXH_SECRET_CONSUME_RATE);
            sums[1] = summed(sums[1], b, SECRET + i * XXH_SECRET_CONSUME_RATE + 32);
        }
        XXH3_scrambleAcc_avx2(sums, LAST_SECRET);
    }
    memcpy(acc, sums, sizeof sums);
}

AVX2 static void sum_avx2(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks)
{
    blocks_avx2(acc, to, from, blocks, NOWHERE);
}

AVX2 static void copy_avx2(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks)
{
    blocks_avx2(acc, to, from, blocks, CACHED);
}

/* A large numpy array begins 16 bytes behind a page, as all that malloc maps. */
AVX2 static void stream_avx2(uint64_t *acc, uint8_t *to, const uint8_t *from, size_t blocks)
{
    if ((uintptr_t)to % 32 == 0)
        blocks_avx2(acc, to, from, blocks, PAST_CACHE);
    else if ((uintptr_t)to % 16 == 0)
        blocks_avx2(acc, to, from, blocks, PAST_CACHE_16);
    else
        blocks_avx2(acc, to, from, blocks, CACHED);
}

#endif

/* Once, before anything else; the name of what was chosen. */
static const char *choose_kernel(void)
{
    kernel.sum = sum_plain;
    kernel.copy = kernel.stream = copy_plain;
#ifdef AVX2
    if (__builtin_cpu_supports("avx2")) {
        kernel.sum = sum_avx2;
        kernel.copy = copy_avx2;
        kernel.stream = stream_avx2;
        return "AVX2";
    }
#endif
    return "plain";
}

/* Stores that went past the caches become visible in the order of the others: before anybody is told of the bytes. */
static void settle(void)
{
#ifdef AVX2
    _mm_sfence();
#endif
}

/* A copy without a sum, past the caches. A line of them is loaded whole, then stored whole: stored between its loads, or cut, it takes twice the time. */
static void pour(uint8_t *to, const uint8_t *from, size_t bytes)
{
#ifdef AVX2
    size_t head = (size_t)(-(uintptr_t)to % 64);
    if (bytes >= FUSED_BYTES_MIN) {
        memcpy(to, from, head);
        for (; bytes - head >= 64; head += 64) {
            _mm_prefetch((const char *)(uintptr_t)((uintptr_t)(from + head) + 1024), _MM_HINT_T0);
            const __m128i *source = (const __m128i *)(from + head);
            __m128i line[4];
            for (size_t i = 0; i < 4; i++)
                line[i] = _mm_loadu_si128(source + i);
            for (size_t i = 0; i < 4; i++)
                _mm_stream_si128((__m128i *)(to + head) + i, line[i]);
        }
        to += head;
        from += head;
        bytes -= head;
    }
#endif
    memcpy(to, from, bytes);
}

static const uint64_t first_sums[8] = XXH3_INIT_ACC;

/* Of what follows the blocks: `last` has 1 to 1,024 bytes and, before them, the 64 bytes before them. */
static uint64_t last_sum(const uint64_t *acc, const uint8_t *last, size_t bytes, size_t total_bytes)
{
    XXH_ALIGN(64) uint64_t sums[8];
    memcpy(sums, acc, sizeof sums);
    XXH3_accumulate(sums, last, SECRET, (bytes - 1) / STRIPE_BYTES);
    XXH3_accumulate_512(sums, last + bytes - STRIPE_BYTES, LAST_SECRET - XXH_SECRET_LASTACC_START);
    return XXH3_finalizeLong_64b(sums, SECRET, total_bytes);
}

/* One run to one run; the sum of what `to` has now. */
static uint64_t copy_summed(uint8_t *to, const uint8_t *from, size_t bytes, bool past_cache)
{
    XXH_ALIGN(64) uint64_t acc[8];
    size_t blocks = bytes ? (bytes - 1) / BLOCK_BYTES : 0, done = blocks * BLOCK_BYTES;
    memcpy(acc, first_sums, sizeof acc);
    if (bytes < FUSED_BYTES_MIN) {
        memcpy(to, from, bytes);
        if (bytes <= SHORT_BYTES)
            return XXH3_64bits(to, bytes);
        kernel.sum(acc, NULL, to, blocks);
        return last_sum(acc, to + done, bytes - done, bytes);
    }
    (past_cache ? kernel.stream : kernel.copy)(acc, to, from, blocks);
    memcpy(to + done, from + done, bytes - done);
    return last_sum(acc, to + done, bytes - done, bytes);
}

#endif
