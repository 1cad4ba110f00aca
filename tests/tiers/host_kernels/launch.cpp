#include "shim.h"
#include "kernels.cu"

extern "C" void host_copy_runs(unsigned blocks, unsigned threads, const Run* runs, u32 count, u8* pool, u32 direction) {
    launched(blocks, threads, copy_runs, runs, count, pool, direction);
}
extern "C" void host_merge_planes(unsigned blocks, unsigned threads, const u8* planes, u8* elements, u64 count, u32 width) {
    launched(blocks, threads, merge_planes, planes, elements, count, width);
}
extern "C" void host_split_planes(unsigned blocks, unsigned threads, const u8* elements, u8* planes, u64 count, u32 width) {
    launched(blocks, threads, split_planes, elements, planes, count, width);
}
extern "C" void host_dequantise(unsigned blocks, unsigned threads, const u8* codes, const u16* low, const u16* scale, u8* target, u64 count,
                                u32 rows, u32 columns, u32 length, u32 by_channel, u32 grid, u32 element) {
    launched(blocks, threads, dequantise, codes, low, scale, target, count, rows, columns, length, by_channel, grid, element);
}
// What `dequantise` does to each value at last, for values that no code and scale would give.
extern "C" void host_store_values(const float* values, u8* target, u64 count, u32 element) {
    for (u64 i = 0; i < count; i++) store_value(target, i, ADD(values[i], 0.0f), element);
}
