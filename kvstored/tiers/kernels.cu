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

// ---- byte planes: most significant byte first, one after the other; elements are little-endian

extern "C" __global__ void merge_planes(const u8* planes, u8* elements, u64 count, u32 width) {
    for (u64 i = first_index(); i < count; i += stride())
        for (u32 b = 0; b < width; b++) elements[i * width + b] = planes[(u64)(width - 1 - b) * count + i];
}

extern "C" __global__ void split_planes(const u8* elements, u8* planes, u64 count, u32 width) {
    for (u64 i = first_index(); i < count; i += stride())
        for (u32 b = 0; b < width; b++) planes[(u64)(width - 1 - b) * count + i] = elements[i * width + b];
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

// ---- lossy sections of method UNIFORM (codec/lossy.py): a code a value, two float16 a group. `grid` 2 is FP4, whose groups have no least value.
// Groups run along `length` values of a token, or with `by_channel` of a channel: then codes are stored channel by channel.

extern "C" __global__ void dequantise(const u8* codes, const u16* low, const u16* scale, u8* target, u64 count, u32 rows, u32 columns,
                                      u32 length, u32 by_channel, u32 grid, u32 element) {
    const float four[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    for (u64 i = first_index(); i < count; i += stride()) {
        u64 at = i;
        if (by_channel) {
            const u64 tile = i / ((u64)rows * columns), inside = i % ((u64)rows * columns);
            at = (tile * columns + inside % columns) * rows + inside / columns;
        }
        const u64 group = at / length;
        const u8 code = codes[at];
        float value;
        if (grid == 2u) {
            const float size = four[code & 7u];
            value = MULTIPLY(code & 8u ? -size : size, half_value(scale[group]));
        } else {
            value = ADD(MULTIPLY((float)code, half_value(scale[group])), half_value(low[group]));
        }
        store_value(target, i, ADD(value, 0.0f), element);  // a difference from nothing: -0 becomes 0
    }
}
