#include "shim.h"
#include "kernels.cu"

extern "C" void host_copy_runs(unsigned blocks, unsigned threads, const Run* runs, u32 count, u8* pool, u32 direction) {
    launched(blocks, threads, copy_runs, runs, count, pool, direction);
}
extern "C" void host_expand_sections(unsigned blocks, unsigned threads, const Section* sections, u32 count, const u8* packed, u8* pool) {
    launched(blocks, threads, expand_sections, sections, count, packed, pool);
}
extern "C" void host_hash_blocks(unsigned blocks, unsigned threads, const Stretch* stretches, u32 count, u64 all, const u8* pool, u64* sums) {
    launched(blocks, threads, hash_blocks, stretches, count, all, pool, sums);
}
extern "C" void host_hash_lanes(unsigned blocks, unsigned threads, const Piece* pieces, u32 count, const u8* pool, const u64* sums, u64* lanes) {
    launched(blocks, threads, hash_lanes, pieces, count, pool, sums, lanes);
}
extern "C" void host_hash_merge(unsigned blocks, unsigned threads, const Piece* pieces, u32 count, const u64* lanes, u64* hashes) {
    launched(blocks, threads, hash_merge, pieces, count, lanes, hashes);
}
// What `dequantise` does to each value at last, for values that no code and scale would give.
extern "C" void host_store_values(const float* values, u8* target, u64 count, u32 element) {
    for (u64 i = 0; i < count; i++) store_value(target, i, ADD(values[i], 0.0f), element);
}
