// The two sums of a row's backward, of g and of g * xhat, over the threads that the row belongs to: lanes of a warp,
// warps of a block, or blocks of a cluster.
#pragma once

#include <cooperative_groups.h>

#include "async_copy.cuh"
#include "reduce.cuh"

namespace fastln {

// Both sums over a group of `threads`, a power of two up to 32, to all its lanes. Half the lanes go on with a, the
// others with b, which takes nearly half of the shuffles.
template <typename Acc>
__device__ __forceinline__ void add_lanes(Acc& a, Acc& b, int threads) {
  if (threads == 1) return;
  int offset = threads / 2;
  const bool upper = threadIdx.x & offset;
  Acc kept = upper ? b : a;
  kept += __shfl_xor_sync(0xffffffffu, upper ? a : b, offset);
  for (int o = offset / 2; o > 0; o /= 2) kept += __shfl_xor_sync(0xffffffffu, kept, o);
  const Acc other = __shfl_xor_sync(0xffffffffu, kept, offset);
  a = upper ? other : kept;
  b = upper ? kept : other;
}

// All threads of a group of whole warps meet. `group` is its number in the block.
__device__ __forceinline__ void meet(int group, int threads) {
  if (threads == static_cast<int>(blockDim.x)) __syncthreads();
  else asm volatile("bar.sync %0, %1;" ::"r"(group + 1), "r"(threads) : "memory");
}

// Shared memory for the sums of all warps. Rows take turns with the two halves, so that one barrier a row is enough.
// A multiple of 128 bytes, so that the ring behind it begins at one.
template <typename Acc>
struct alignas(128) PairRoom {
  Acc warp[2][kBackwardThreads / kWarp][2];
  Acc block[2][kMaxCluster][2];
  uint64_t arrived[2];  // mbarriers, which count the bytes of `block` that have come
};

// Both sums over a row's group within the block, to all its threads, which must all call it. `turn` alternates from row
// to row. kWholeWarps: the group is of at least one.
template <bool kWholeWarps, typename Acc>
__device__ __forceinline__ void add_group(Acc& a, Acc& b, int threads, int group, int turn, PairRoom<Acc>& room) {
  if (!kWholeWarps && threads <= kWarp) {
    add_lanes(a, b, threads);
    return;
  }
  add_lanes(a, b, kWarp);
  if (threads == kWarp) return;
  const int warp = threadIdx.x / kWarp, warps = threads / kWarp;
  if (threadIdx.x % kWarp == 0) {
    room.warp[turn][warp][0] = a;
    room.warp[turn][warp][1] = b;
  }
  meet(group, threads);
  a = b = 0;
  const int first = group * warps;
#pragma unroll 4
  for (int w = 0; w < warps; ++w) {
    a += room.warp[turn][first + w][0];
    b += room.warp[turn][first + w][1];
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A cluster's sums, in two steps, between which a block goes on with something else: each block sends its sums to every
// other, and then all add them in the same order. A barrier of all threads of the cluster took 0.8 us a row on an
// H200.
template <typename Acc>
struct ClusterSums {
  PairRoom<Acc>& room;
  unsigned blocks, rank;

  // All blocks of the cluster must call it, and have begun when it returns.
  __device__ explicit ClusterSums(PairRoom<Acc>& r) : room(r) {
    const auto cluster = cooperative_groups::this_cluster();
    blocks = cluster.num_blocks();
    rank = cluster.block_rank();
    if (threadIdx.x == 0) {
      for (int turn = 0; turn < 2; ++turn) init_barrier(shared_address(&room.arrived[turn]), 1);
      publish_barriers<false>();
    }
    cooperative_groups::this_cluster().sync();
  }

  __device__ void send(Acc a, Acc b, int turn) const {
    const uint32_t arrived = shared_address(&room.arrived[turn]);
    if (threadIdx.x == 0) arrive_expecting(arrived, static_cast<int>(blocks * 2 * sizeof(Acc)));
    if (threadIdx.x < blocks)
      store_async(remote_address(shared_address(&room.block[turn][rank][0]), threadIdx.x), a, b,
                  remote_address(arrived, threadIdx.x));
  }

  // `parity`: how often this turn has been received before, modulo 2.
  __device__ void receive(Acc& a, Acc& b, int turn, int parity) const {
    wait_for_barrier<true>(shared_address(&room.arrived[turn]), parity);
    a = b = 0;
    for (unsigned from = 0; from < blocks; ++from) {
      a += room.block[turn][from][0];
      b += room.block[turn][from][1];
    }
  }
};
#endif

}  // namespace fastln
