// Makes the kernels plain C++: every thread of a grid runs after the other. They have no barriers, so that is one of their legal orders.
#pragma once
struct Index { unsigned x; };
static thread_local Index blockIdx, threadIdx, blockDim, gridDim;
#define __global__
#define __device__
#define __forceinline__ inline

template <typename Kernel, typename... Arguments>
static void launched(unsigned blocks, unsigned threads, Kernel kernel, Arguments... arguments) {
    gridDim.x = blocks;
    blockDim.x = threads;
    for (blockIdx.x = 0; blockIdx.x < blocks; blockIdx.x++)
        for (threadIdx.x = 0; threadIdx.x < threads; threadIdx.x++) kernel(arguments...);
}
