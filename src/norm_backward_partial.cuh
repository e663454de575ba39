// The partial sums of dweight and dbias: how a block, or several of a cluster, write one, and the kernel that adds them up.
#pragma once

#include <cooperative_groups.h>

#include "async_copy.cuh"
#include "norm_backward_plan.h"
#include "norm_backward_ragged.cuh"
#include "norm_rows.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fastln {

// kN values to an address that is a multiple of their size, or of 16 bytes where they are more.
template <typename Acc, int kN>
__device__ __forceinline__ void store_run(Acc* p, const Acc (&values)[kN]) {
  Vec<Acc, kN> v;
  pack(v, values);
  store_vec(p, v);
}

// Every thread's kN sums of columns [col, col + kN) to `out`, which has room for whole runs. All lanes must call it;
// those with col >= cols write nothing. Eight floats are two accesses, of which each of two neighbours makes one in
// each other's run, so that a store writes whole sectors of 32 bytes.
template <typename Acc, int kN>
__device__ __forceinline__ void store_sums(Acc* out, const Acc (&sums)[kN], int col, int cols) {
  if constexpr (sizeof(Acc) * kN <= 16) {
    if (col < cols) store_run(out + col, sums);
  } else {
    static_assert(sizeof(Acc) * kN == 32);
    constexpr int kHalf = kN / 2;
    const bool odd = threadIdx.x % 2;
    Acc of_even[kHalf], of_odd[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; ++i) {
      const Acc low = sums[i], high = sums[kHalf + i];
      const Acc own = odd ? high : low, other = __shfl_xor_sync(0xffffffffu, odd ? low : high, 1);
      of_even[i] = odd ? other : own;
      of_odd[i] = odd ? own : other;
    }
    const int even_col = odd ? col - kN : col, odd_col = even_col + kN;
    if (even_col < cols) store_run(out + even_col + (odd ? kHalf : 0), of_even);
    if (odd_col < cols) store_run(out + odd_col + (odd ? kHalf : 0), of_odd);
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// 16 bytes of the shared memory of a block of the cluster.
__device__ __forceinline__ void load_remote(float (&v)[4], uint32_t address) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(v[0]), "=f"(v[1]), "=f"(v[2]), "=f"(v[3])
               : "r"(address)
               : "memory");
}

// The sums of columns [2, width] that lie in shared memory, at the same place in each of the cluster's `sharing`
// blocks, added up into [2, pitch] at `out`: by each block a part of the columns. All its threads must call it.
__device__ __forceinline__ void add_shared_sums(const float* shared, float* out, int width, int cols, int64_t pitch,
                                                int sharing) {
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  const int step = static_cast<int>(blockDim.x) * 4;
  const int first = static_cast<int>(cluster.block_rank()) * step + static_cast<int>(threadIdx.x) * 4;
  for (int item = first; item < 2 * width; item += sharing * step) {
    const int col = item < width ? item : item - width;
    if (col >= cols) continue;
    float sum[4] = {};
    for (int b = 0; b < sharing; ++b) {
      float v[4];
      load_remote(v, remote_address(shared_address(shared + item), b));
#pragma unroll
      for (int i = 0; i < 4; ++i) sum[i] += v[i];
    }
    store_run(out + (item < width ? 0 : pitch) + col, sum);
  }
  cluster.sync();  // no block ends while others read its memory
}
// The same by a call: variants of 2 pieces spill registers without, those of 4 with it.
__device__ __noinline__ void call_add_shared_sums(const float* shared, float* out, int width, int cols, int64_t pitch,
                                                  int sharing) {
  add_shared_sums(shared, out, width, cols, pitch, sharing);
}
#endif

// Writes the partial sum of a block: what its groups have summed, added up; with p.sharing, also over that many blocks of a
// cluster. A thread has kRuns runs of columns, run j from column first + j * step of the slice that begins at `begin`, if
// that is before `end`. The slice has `cols` columns. `shared` is the memory of the ring, as [groups, 2, width].
template <typename Elem, int kPieces, bool kRagged, bool kCluster, int kPieceBytes, typename Acc, int kRuns, int kRun,
          typename Count>
__device__ __forceinline__ void write_partial(const BackwardLaunch& p, const Acc (&dweight)[kRuns][kRun],
                                              const Acc (&dbias)[kRuns][kRun], int64_t begin, int first, int step,
                                              int end, int cols, Count block, int threads, int group, int groups,
                                              Acc* shared) {
  constexpr int kAccess = Runs<Elem, kPieces, kRagged, kPieceBytes>::kAccess;
  constexpr bool kShares = backward_may_share(sizeof(Elem), kPieces, kRagged, kCluster, kPieceBytes);
  const int sharing = kShares ? p.sharing : 1;
  Acc* out = static_cast<Acc*>(p.partial) + static_cast<int64_t>(block / sharing) * 2 * p.pitch + begin;  // [2, pitch]
  if (groups == 1 && sharing == 1) {
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      store_sums(out, dweight[j], first + j * step, end);
      store_sums(out + p.pitch, dbias[j], first + j * step, end);
    }
    return;
  }
  // Added up through shared memory; nothing in the ring is waited for any more.
  wait_for_copies(0);
  __syncthreads();
  const int width = summed_width(threads, kPieces, kAccess, kRagged);
  Acc* sums = shared + group * 2 * width + first;
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    if (first + j * step >= end) continue;
    store_run(sums + j * step, dweight[j]);
    store_run(sums + width + j * step, dbias[j]);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kShares) {
    if (sharing > 1) {  // where a block has one group
      if constexpr (kPieces == 2) call_add_shared_sums(shared, out, width, cols, p.pitch, sharing);
      else add_shared_sums(shared, out, width, cols, p.pitch, sharing);
      return;
    }
  }
#endif
  __syncthreads();
  for (int item = threadIdx.x; item < 2 * width; item += blockDim.x) {
    const int col = item < width ? item : item - width;
    if (col >= cols) continue;
    Acc sum = 0;
#pragma unroll 4
    for (int g = 0; g < groups; ++g) sum += shared[g * 2 * width + item];
    out[(item < width ? 0 : p.pitch) + col] = sum;
  }
}

constexpr int kAddThreads = 512;

// Adds the `count` partial sums of dweight (blockIdx.y 0) and dbias (1), in a fixed order. A thread takes 16 bytes of
// columns, `lanes` threads (a power of two up to 32) those of a block, each from several partial sums.
template <typename Acc, typename Param>
__global__ void __launch_bounds__(kAddThreads) add_partials(const Acc* partial, int64_t count, int64_t pitch,
                                                            int64_t cols, int lanes, void* dweight, void* dbias) {
  constexpr int kRun = 16 / sizeof(Acc);
  __shared__ __align__(16) Acc shared[kAddThreads / kWarp][kWarp * kRun];
  const int64_t begin = static_cast<int64_t>(blockIdx.x) * lanes * kRun;
  const int place = threadIdx.x % lanes * kRun;
  auto* out = static_cast<Param*>(blockIdx.y == 0 ? dweight : dbias);
  wait_for_previous_kernel();
  if (!out) return;
  Acc sum[kRun] = {};
  if (begin + place < cols) {
    const Acc* from = partial + blockIdx.y * pitch + begin + place;
#pragma unroll 8
    for (int64_t row = threadIdx.x / lanes; row < count; row += kAddThreads / lanes) {
      Vec<Acc, kRun> v;
      load_vec(v, from + row * 2 * pitch);
#pragma unroll
      for (int i = 0; i < kRun; ++i) sum[i] += get_item(v, i);
    }
  }
  for (int offset = lanes; offset < kWarp; offset *= 2) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], offset);
  }
  if (threadIdx.x % kWarp < lanes) store_run(&shared[threadIdx.x / kWarp][place], sum);
  __syncthreads();
  const int item = threadIdx.x;
  if (item >= lanes * kRun || begin + item >= cols) return;
  Acc total = 0;
#pragma unroll
  for (int warp = 0; warp < kAddThreads / kWarp; ++warp) total += shared[warp][item];
  store_one(out + begin + item, total);
}

}  // namespace fastln
