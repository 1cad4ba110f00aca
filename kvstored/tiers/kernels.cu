// What runs on the GPU: copies of many runs between a pool and pinned host memory, and the parts of the codec that are worth it there.
//
// Compiled by NVRTC when a device is opened (kernels.py), by nvcc and as plain C++ in the tests, which hold every kernel to the CPU codec bit
// by bit. So: no headers, no barriers between threads, and products and sums are rounded one by one (MULTIPLY, ADD), never fused.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#ifdef __CUDA_ARCH__
#define MULTIPLY(a, b) __fmul_rn(a, b)
#define ADD(a, b) __fadd_rn(a, b)
#else
#define MULTIPLY(a, b) ((a) * (b))
#define ADD(a, b) ((a) + (b))
#endif

static __device__ __forceinline__ u64 first_index() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
static __device__ __forceinline__ u64 stride() { return (u64)gridDim.x * blockDim.x; }

// ---- copies

// One run of bytes: its address on the host, its offset in the pool, and the number of its first tile among the tiles of all runs.
struct Run {
    u64 host;
    u64 offset;
    u64 size;
    u64 tile;
};

struct Sixteen {
    u64 low;
    u64 high;
};

#define TILE_BYTES 16384u

static __device__ __forceinline__ void copy_tile(u8* to, const u8* from, u64 size) {
    u64 done = 0;
    if ((((u64)to | (u64)from) & 15) == 0) {
        const u64 words = size / 16;
        for (u64 i = threadIdx.x; i < words; i += blockDim.x) ((Sixteen*)to)[i] = ((const Sixteen*)from)[i];
        done = words * 16;
    }
    for (u64 i = done + threadIdx.x; i < size; i += blockDim.x) to[i] = from[i];
}

// direction 0: host to pool, 1: pool to host. Few blocks suffice for PCIe, and leave the others to the engine: each takes tile after tile.
extern "C" __global__ void copy_runs(const Run* runs, u32 count, u8* pool, u32 direction) {
    const u64 tiles = runs[count - 1].tile + (runs[count - 1].size + TILE_BYTES - 1) / TILE_BYTES;
    for (u64 tile = blockIdx.x; tile < tiles; tile += gridDim.x) {
        u32 below = 0, above = count;  // the last run whose first tile is not after this one
        while (above - below > 1) {
            const u32 middle = (below + above) / 2;
            if (runs[middle].tile <= tile) below = middle;
            else above = middle;
        }
        const Run run = runs[below];
        const u64 begin = (tile - run.tile) * TILE_BYTES;
        const u64 left = run.size - begin;
        const u64 size = left < TILE_BYTES ? left : TILE_BYTES;
        u8* host = (u8*)run.host + begin;
        u8* own = pool + run.offset + begin;
        if (direction == 0) copy_tile(own, host, size);
        else copy_tile(host, own, size);
    }
}

// ---- values: numbers as in codec/elements.py (1 bfloat16, 2 float16, 3 e4m3, 4 e5m2, 5 float32)

union Bits {
    float value;
    u32 bits;
};

static __device__ __forceinline__ float float_of(u32 bits) {
    Bits both;
    both.bits = bits;
    return both.value;
}

static __device__ __forceinline__ u32 bits_of(float value) {
    Bits both;
    both.value = value;
    return both.bits;
}

static __device__ float half_value(u16 half) {
    const u32 sign = (u32)(half & 0x8000u) << 16, exponent = half >> 10 & 31u, fraction = half & 0x3FFu;
    if (exponent == 31u) return float_of(sign | 0x7F800000u | fraction << 13);
    if (exponent) return float_of(sign | (exponent + 112u) << 23 | fraction << 13);
    const float size = MULTIPLY((float)fraction, 5.9604644775390625e-8f);  // 2**-24, exact
    return float_of(sign | bits_of(size));
}

// To a form with fewer bits, to nearest, ties to even; `value` is finite and not above the form's largest.
static __device__ u32 rounded(float value, u32 exponent_bits, u32 mantissa_bits) {
    const u32 raw = bits_of(value), sign = raw >> 31;
    const int bias = (1 << (exponent_bits - 1)) - 1;
    int exponent = (int)(raw >> 23 & 255u) - 127;
    u32 mantissa = raw & 0x7FFFFFu;
    u32 code = 0;
    if (raw & 0x7F800000u) {  // the subnormals of float32 are far below those of all forms
        mantissa |= 0x800000u;
        int drop = 23 - (int)mantissa_bits;
        int field = exponent + bias;
        if (field < 1) {
            drop += 1 - field;
            field = 1;
        }
        if (drop < 26) {
            const u32 kept = mantissa >> drop, rest = mantissa & ((1u << drop) - 1u), half = 1u << (drop - 1);
            const u32 up = rest > half || (rest == half && (kept & 1u));
            code = kept + up + ((u32)(field - 1) << mantissa_bits);  // a carry goes on into the exponent
        }
    }
    return sign << (exponent_bits + mantissa_bits) | code;
}

static __device__ void store_value(u8* target, u64 i, float value, u32 element) {
    const float largest = element == 1u ? 3.3895314e38f : element == 2u ? 65504.0f : element == 3u ? 448.0f
        : element == 4u ? 57344.0f : 3.4028235e38f;
    const float limited = value > largest ? largest : value < -largest ? -largest : value;
    const u32 raw = bits_of(limited);
    if (element == 1u) ((u16*)target)[i] = (u16)((raw + 0x7FFFu + (raw >> 16 & 1u)) >> 16);
    else if (element == 2u) ((u16*)target)[i] = (u16)rounded(limited, 5u, 10u);
    else if (element == 3u) target[i] = (u8)rounded(limited, 4u, 3u);
    else if (element == 4u) target[i] = (u8)rounded(limited, 5u, 2u);
    else ((u32*)target)[i] = raw;
}

// ---- sections of frames whose entropy coding was undone on the host (codec/unpacked.py): planes are merged, codes become values

enum { PLAIN = 0, PLANES = 1, UNIFORM = 2, ROTATED = 3, BOUNDED = 4, EXPONENTS = 5 };

struct Section {
    u64 source, target;
    u32 begin, end, count, crossing, width, element;
    u32 rows, columns, length, by_channel, grid, groups;
};

static __device__ void merge_planes(const Section& s, const u8* planes, u8* to, u32 first, u32 step) {
    for (u32 i = s.begin + first; i < s.end; i += step)
        for (u32 b = 0; b < s.width; b++) to[(u64)(i - s.begin) * s.width + b] = planes[(u64)(s.width - 1 - b) * s.count + i];
}

// First bytes, the eight bits behind the sign, as pairs of distances from a base or as a byte each; the second bytes have the sign and seven bits more.
// Exceptions from pairs are written again, by the thread that wrote the element before.
struct Exponents {
    const u8 *base, *packed, *others;
    u32 line;
};

static __device__ u8 first_byte(const Section& s, const Exponents& e, u32 i) {
    const u8 base = e.base[s.rows > 1 ? i / (s.rows * s.columns) * s.columns + i % s.columns : 0];
    if (s.grid == 0) return (u8)(e.packed[i] + base);
    const u32 inside = i % (2 * e.line), at = i / (2 * e.line) * e.line;
    return (u8)((inside < e.line ? e.packed[at + inside] & 15u : e.packed[at + inside - e.line] >> 4) + base);
}

static __device__ void store_parts(const Section& s, const Exponents& e, u8* to, u32 i, u8 first) {
    u8* at = to + (u64)(i - s.begin) * s.width;
    const u8 second = e.others[i];
    at[s.width - 1] = (u8)((second & 128u) | first >> 1);
    at[s.width - 2] = (u8)((first & 1u) << 7 | (second & 127u));
    for (u32 b = 0; b + 2 < s.width; b++) at[b] = e.others[(u64)(s.width - 2 - b) * s.count + i];
}

static __device__ void merge_exponents(const Section& s, const u8* packed, u8* to, u32 first, u32 step) {
    const u32* where = (const u32*)packed;
    const u8* which = packed + (u64)4 * s.length;
    Exponents e;
    e.base = which + s.length;
    e.packed = e.base + s.groups;
    e.others = e.packed + (s.grid == 0 ? s.count : s.count / 2);
    e.line = s.rows % 2 == 0 ? s.columns : s.count < 4 ? 1 : s.count / 2;
    for (u32 i = s.begin + first; i < s.end; i += step) store_parts(s, e, to, i, first_byte(s, e, i));
    for (u32 k = 0; k < s.length; k++)
        if (where[k] >= s.begin && where[k] < s.end && (where[k] - s.begin) % step == first)
            store_parts(s, e, to, where[k], which[k]);
}

// A code a value, two float16 a group. Grid 2 is FP4, whose groups have no least value. Groups run along `length` values of a token, or with
// `by_channel` of a channel: then codes lie channel by channel.
static __device__ void dequantise(const Section& s, const u8* packed, u8* to, u32 first, u32 step) {
    const float four[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    const u16* low = (const u16*)packed;
    const u16* scale = low + s.groups;
    const u8* codes = (const u8*)(scale + s.groups);
    for (u32 i = s.begin + first; i < s.end; i += step) {
        u32 at = i;
        if (s.by_channel) {
            const u32 tile = i / (s.rows * s.columns), inside = i % (s.rows * s.columns);
            at = (tile * s.columns + inside % s.columns) * s.rows + inside / s.columns;
        }
        const u32 group = at / s.length;
        const u8 code = codes[at];
        float value;
        if (s.grid == 2u) {
            const float size = four[code & 7u];
            value = MULTIPLY(code & 8u ? -size : size, half_value(scale[group]));
        } else {
            value = ADD(MULTIPLY((float)code, half_value(scale[group])), half_value(low[group]));
        }
        store_value(to, i - s.begin, ADD(value, 0.0f), s.element);  // a difference from nothing: -0 becomes 0
    }
}

#define ROTATED_COLUMNS_MAX 256u

// The levels of Max's quantiser for 2, 3 and 4 bits (codec/lossy.py), one after the other.
static __device__ const float GAUSS[14] = {0.4528f, 1.510f, 0.2451f, 0.7560f, 1.344f, 2.152f, 0.1284f,
                                           0.3881f, 0.6568f, 0.9424f, 1.256f,  1.618f, 2.069f, 2.733f};

// A float16 a row, a code a value; `grid` bits each. A thread takes a row: codes to values, Walsh-Hadamard, signs.
static __device__ void unrotate(const Section& s, const u8* packed, u8* to, u32 first, u32 step) {
    const u16* norm = (const u16*)packed;
    const u8* codes = (const u8*)(norm + s.groups);
    const u32 levels = 1u << (s.grid - 1u), begin = levels - 2u;
    const float share = 1.0f / (float)s.columns;
    float row[ROTATED_COLUMNS_MAX];
    for (u32 r = s.begin / s.columns + first; r * s.columns < s.end; r += step) {
        const float size = half_value(norm[r]);
        for (u32 c = 0; c < s.columns; c++) {
            const u8 code = codes[r * s.columns + c];
            const float level = GAUSS[begin + (code & (levels - 1u))];
            row[c] = MULTIPLY(code >> (s.grid - 1u) & 1u ? -level : level, size);
        }
        for (u32 half = 1; half < s.columns; half *= 2)
            for (u32 c = 0; c < s.columns; c++)
                if (!(c & half)) {
                    const float left = row[c], right = row[c + half];
                    row[c] = ADD(left, right);
                    row[c + half] = ADD(left, -right);
                }
        for (u32 c = 0; c < s.columns; c++) {
            const u32 i = r * s.columns + c;
            const float sign = ((u64)(c + 1u) * 0x9E3779B97F4A7C15ULL) >> 63 ? -share : share;
            if (i >= s.begin && i < s.end) store_value(to, i - s.begin, ADD(MULTIPLY(row[c], sign), 0.0f), s.element);
        }
    }
}

// Numbers of a step; those with code 255 are kept exactly: where and which, in a list before the codes.
static __device__ void unbound(const Section& s, const u8* packed, u8* to, u32 first, u32 step) {
    const float size = *(const float*)packed;
    const u32* where = (const u32*)packed + 1;
    const u32* exact = where + s.groups;
    const u8* codes = (const u8*)(exact + s.groups);
    for (u32 i = s.begin + first; i < s.end; i += step)
        if (codes[i] != 255) store_value(to, i - s.begin, ADD(MULTIPLY((float)((int)codes[i] - 127), size), 0.0f), s.element);
    for (u32 k = first; k < s.groups; k += step)
        if (where[k] >= s.begin && where[k] < s.end)
            for (u32 b = 0; b < s.width; b++) to[(u64)(where[k] - s.begin) * s.width + b] = (u8)(exact[k] >> (8 * b));
}

extern "C" __global__ void expand_sections(const Section* sections, u32 count, const u8* packed, u8* pool) {
    for (u32 n = blockIdx.x; n < count; n += gridDim.x) {
        const Section s = sections[n];
        const u8* from = packed + s.source;
        u8* to = pool + s.target;
        if (s.crossing == PLANES) merge_planes(s, from, to, threadIdx.x, blockDim.x);
        else if (s.crossing == UNIFORM) dequantise(s, from, to, threadIdx.x, blockDim.x);
        else if (s.crossing == ROTATED) unrotate(s, from, to, threadIdx.x, blockDim.x);
        else if (s.crossing == EXPONENTS) merge_exponents(s, from, to, threadIdx.x, blockDim.x);
        else if (s.crossing == BOUNDED) unbound(s, from, to, threadIdx.x, blockDim.x);
        else copy_tile(to, from + (u64)s.begin * s.width, (u64)(s.end - s.begin) * s.width);
    }
}

// ---- xxh3-64 (seed 0, more than 240 bytes) of what lies in the pool. Blocks of 1 KiB follow each other, but what each adds depends on its bytes alone:
// so the sums of all blocks are made at once, then one thread for each of a piece's eight lanes goes along them.

#define BLOCK_BYTES 1024u
#define STRIPES 16u
#define P32_1 0x9E3779B1ULL
#define P32_2 0x85EBCA77ULL
#define P32_3 0xC2B2AE3DULL
#define P64_1 0x9E3779B185EBCA87ULL
#define P64_2 0xC2B2AE3D27D4EB4FULL
#define P64_3 0x165667B19E3779F9ULL
#define P64_4 0x85EBCA77C2B2AE63ULL
#define P64_5 0x27D4EB2F165667C5ULL

// Bytes of one extent of a piece: whole blocks of it, of which the first is number `first` among all of the call.
struct Stretch {
    u64 offset, first;
};

// A piece: its first block's number, how many whole ones, its length, where the rest after them begins, and where its last 64 bytes are:
// `split` of them at `last`, the others at `next`.
struct Piece {
    u64 first, blocks, length, rest, last, next, split, unused;
};

static __device__ const u64 SECRET[24] = {  // xxh3's own, as words
    0xBE4BA423396CFEB8ULL, 0x1CAD21F72C81017CULL, 0xDB979083E96DD4DEULL, 0x1F67B3B7A4A44072ULL, 0x78E5C0CC4EE679CBULL, 0x2172FFCC7DD05A82ULL,
    0x8E2443F7744608B8ULL, 0x4C263A81E69035E0ULL, 0xCB00C391BB52283CULL, 0xA32E531B8B65D088ULL, 0x4EF90DA297486471ULL, 0xD8ACDEA946EF1938ULL,
    0x3F349CE33F76FAA8ULL, 0x1D4F0BC7C7BBDCF9ULL, 0x3159B4CD4BE0518AULL, 0x647378D9C97E9FC8ULL, 0xC3EBD33483ACC5EAULL, 0xEB6313FAFFA081C5ULL,
    0x49DAF0B751DD0D17ULL, 0x9E68D429265516D3ULL, 0xFCA1477D58BE162BULL, 0xCE31D07AD1B8F88FULL, 0x280416958F3ACB45ULL, 0x7E404BBBCAFBD7AFULL,
};

static __device__ __forceinline__ u64 secret(u32 at) {
    const u32 word = at / 8, cut = 8 * (at & 7);
    return cut ? SECRET[word] >> cut | SECRET[word + 1] << (64 - cut) : SECRET[word];
}

static __device__ __forceinline__ u64 word_at(const u8* from) {
    if (((u64)from & 7) == 0) return *(const u64*)from;
    u64 word = 0;
    for (u32 i = 0; i < 8; i++) word |= (u64)from[i] << (8 * i);
    return word;
}

static __device__ __forceinline__ u64 stripe(const u8* from, u32 lane, u32 key) {
    const u64 mixed = word_at(from + 8 * lane) ^ secret(key + 8 * lane);
    return word_at(from + 8 * (lane ^ 1u)) + (mixed & 0xFFFFFFFFULL) * (mixed >> 32);
}

extern "C" __global__ void hash_blocks(const Stretch* stretches, u32 count, u64 blocks, const u8* pool, u64* sums) {
    for (u64 i = first_index(); i < blocks * 8; i += stride()) {
        const u64 block = i / 8;
        const u32 lane = (u32)(i & 7);
        u32 below = 0, above = count;  // the last stretch that does not begin after this block
        while (above - below > 1) {
            const u32 middle = (below + above) / 2;
            if (stretches[middle].first <= block) below = middle;
            else above = middle;
        }
        const u8* from = pool + stretches[below].offset + (block - stretches[below].first) * BLOCK_BYTES;
        u64 sum = 0;
        for (u32 s = 0; s < STRIPES; s++) sum += stripe(from + 64 * s, lane, 8 * s);
        sums[i] = sum;
    }
}

static __device__ u64 first_value(u32 lane) {
    const u64 values[8] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    return values[lane];
}

// Leaves in `lanes` what each lane has after the whole piece.
extern "C" __global__ void hash_lanes(const Piece* pieces, u32 count, const u8* pool, const u64* sums, u64* lanes) {
    for (u64 i = first_index(); i < (u64)count * 8; i += stride()) {
        const Piece piece = pieces[i / 8];
        const u32 lane = (u32)(i & 7);
        const u64 key = secret(128 + 8 * lane);
        const u64* sum = sums + piece.first * 8 + lane;
        u64 value = first_value(lane);
        for (u64 b = 0; b < piece.blocks; b++) {
            value += sum[b * 8];
            value = (value ^ value >> 47 ^ key) * P32_1;
        }
        const u32 stripes = (u32)((piece.length - 1 - piece.blocks * BLOCK_BYTES) / 64);
        for (u32 s = 0; s < stripes; s++) value += stripe(pool + piece.rest + 64 * s, lane, 8 * s);
        u8 last[64];
        for (u32 b = 0; b < 64; b++) last[b] = b < piece.split ? pool[piece.last + b] : pool[piece.next + b - piece.split];
        lanes[i] = value + stripe(last, lane, 121);
    }
}

static __device__ u64 folded(u64 a, u64 b) {
    const u64 low = (a & 0xFFFFFFFFULL) * (b & 0xFFFFFFFFULL), high = (a >> 32) * (b >> 32);
    const u64 cross = (a >> 32) * (b & 0xFFFFFFFFULL), other = (a & 0xFFFFFFFFULL) * (b >> 32);
    const u64 middle = (low >> 32) + (cross & 0xFFFFFFFFULL) + other;
    return (middle << 32 | (low & 0xFFFFFFFFULL)) ^ (high + (cross >> 32) + (middle >> 32));
}

extern "C" __global__ void hash_merge(const Piece* pieces, u32 count, const u64* lanes, u64* hashes) {
    for (u64 i = first_index(); i < count; i += stride()) {
        u64 value = pieces[i].length * P64_1;
        for (u32 n = 0; n < 4; n++)
            value += folded(lanes[i * 8 + 2 * n] ^ secret(11 + 16 * n), lanes[i * 8 + 2 * n + 1] ^ secret(19 + 16 * n));
        value = (value ^ value >> 37) * 0x165667919E3779F9ULL;
        hashes[i] = value ^ value >> 32;
    }
}
