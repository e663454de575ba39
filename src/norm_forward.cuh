// The general forward kernel behind fastln::layer_norm, for rows that fit the registers of a block or of a
// cluster of blocks. norm_split.cuh takes the longer ones.
//
// A row belongs to a group of threads: part of a warp, a warp, a block, or a cluster. Each thread holds
// kPieces pieces of 16 bytes in registers; piece j of thread t is the row's (j * threads + t)-th, so that
// neighbouring threads touch neighbouring words. The group sums twice over its registers (mean, then
// centred squares: never E[x^2] - mean^2), so x is read once, and written once normalized.
//
// Batch invariance. The order of all additions follows from (kPieces, threads, cluster), which plan()
// takes from the columns, the dtype and the GPU's architecture alone. Rows never share a sum. So the bits
// of a row depend on its values, the columns, the dtype and the weights: not on the batch, the row's
// place in it, its stride or its alignment.
#pragma once

#include <cooperative_groups.h>

#include "norm_rows.h"
#include "reduce.cuh"
#include "shift.cuh"
#include "vec.cuh"

namespace fastln {

// How a row lies in memory.
enum class Rows16 {
  kWhole,    // it begins and ends at multiples of 16 bytes: a piece is one access
  kShifted,  // anywhere: pieces are shifted out of, and through shared memory into, granules (shift.cuh)
  kCluster,  // as kWhole, and a cluster of blocks shares it
};

// Threads of a block, at most. 512 leave 128 registers a thread. With 8 pieces, whose weight and bias are
// fetched late, 64 are enough, except for a cluster's sums and a shift's granules, and except from compute
// capability 10.0 on, where the compiler spills (plan() knows).
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kWideBlocksFit = false;
#else
constexpr bool kWideBlocksFit = true;
#endif
template <int kPieces, Rows16 kRows>
constexpr int kForwardThreads = kPieces == 8 && kRows == Rows16::kWhole && kWideBlocksFit ? 1024 : 512;

// Elements of shared memory that a kShifted row's output takes, with the granule that a shift reads ahead.
template <typename Elem>
__host__ __device__ constexpr int64_t shifted_elements(int64_t cols) {
  constexpr int64_t kAccess = kMaxAccessBytes / sizeof(Elem);
  return (cols + kAccess - 1) / kAccess * kAccess + kAccess;
}

// Sum kIndex over a row's group; every thread of it gets it. `threads` is a power of two up to 32, or
// blockDim.x. All threads of the block (of the cluster, if kCluster) must call it. With kCluster,
// block_total is in use until the whole cluster has passed a later barrier.
template <bool kCluster, int kIndex, typename Acc>
__device__ __forceinline__ Acc group_sum(Acc v, int threads, const BlockSum<Acc, 2, true>& block, Acc& block_total) {
  if (!kCluster && threads <= kWarp) {
    for (int offset = threads / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
  }
  v = block.template sum<kIndex>(v);
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if constexpr (kCluster) {
    const auto cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) block_total = v;
    cluster.sync();
    v = 0;
    for (unsigned rank = 0; rank < cluster.num_blocks(); ++rank) v += *cluster.map_shared_rank(&block_total, rank);
  }
#endif
  return v;
}

// kEarly: weight and bias are fetched before the reductions, which then hide their latency. Past L2, where
// other blocks hide it anyway, the registers they take cost more than that gains; see find_forward().
template <typename Elem, typename Param, int kPieces, bool kEarly, Rows16 kRows>
__global__ void __launch_bounds__((kForwardThreads<kPieces, kRows>)) norm_forward(const NormRows p) {
  constexpr bool kCluster = kRows == Rows16::kCluster, kShifted = kRows == Rows16::kShifted;
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  using V = Vec<Elem, kAccess>;
  using P = Vec<Param, kAccess>;
  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  __shared__ Acc block_total[2];
  const BlockSum<Acc, 2, true> block(partial);

  int64_t row;
  int t, stride;  // this thread's place in its group, and the group's size
  if constexpr (kCluster) {
    row = blockIdx.x / p.cluster;
    t = (blockIdx.x % p.cluster) * blockDim.x + threadIdx.x;
    stride = blockDim.x * p.cluster;
  } else if (p.threads > kWarp) {
    row = blockIdx.x;
    t = threadIdx.x;
    stride = p.threads;
  } else {
    row = static_cast<int64_t>(blockIdx.x) * (blockDim.x >> p.threads_log2) + (threadIdx.x >> p.threads_log2);
    t = threadIdx.x & (p.threads - 1);
    stride = p.threads;
  }
  // The last block of small groups may hang over the rows; it still takes part in the shuffles.
  const int cols = row < p.rows ? static_cast<int>(p.cols) : 0;
  const int whole = kShifted ? cols / kAccess * kAccess : cols;  // columns in pieces
  const int first = t * kAccess, step = stride * kAccess;  // piece j is at column first + j * step
  const Elem* x = opaque(static_cast<const Elem*>(p.x) + row * p.x_stride + first);  // this thread's part of [cols]
  const Param* weight = static_cast<const Param*>(p.weight);                         // [cols] or null
  const Param* bias = static_cast<const Param*>(p.bias);                             // [cols] or null
  const auto inside = [&](int j) { return first + j * step < whole; };
  // What is left of the row behind its last piece: one element for each of the first threads.
  const bool has_tail = kShifted && t < cols - whole;

  wait_for_previous_kernel();
  V held[kPieces];
  Acc tail = 0;
  if constexpr (kShifted) {
    // All granules first, then the shifts, so that no load waits for another.
    const int offset = granule_offset(x);
    const Elem* granule = opaque(x - offset);
    const Elem* end = static_cast<const Elem*>(p.x) + (p.rows - 1) * p.x_stride + p.cols;
    V next[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      held[j] = next[j] = V{};
      if (inside(j)) load_granule(held[j], granule + j * step, end);
      if (inside(j) && offset != 0) load_granule(next[j], granule + j * step + kAccess, end);
    }
    if (has_tail) tail = load_one(x - first + whole + t);
#pragma unroll
    for (int j = 0; j < kPieces; ++j) held[j] = shift(held[j], next[j], offset);
  } else {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      held[j] = V{};
      if (inside(j)) load_vec(held[j], x + j * step);
    }
  }
  P w[kEarly ? kPieces : 1], b[kEarly ? kPieces : 1];
  const auto load_params = [&](P& scale, P& shift, int j) {
    scale = splat<Param, kAccess>(1);
    shift = splat<Param, kAccess>(0);
    if (weight && inside(j)) load_vec(scale, weight + first + j * step);
    if (bias && inside(j)) load_vec(shift, bias + first + j * step);
  };
  if constexpr (kEarly) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) load_params(w[j], b[j], j);
  }

  // kAccess independent sums over the pieces, then pairwise. Unpacked anew in each pass: the values of all
  // pieces kept between passes would fill the registers.
  const auto total = [&](auto add_piece) {
    Acc sum[kAccess];
#pragma unroll
    for (int i = 0; i < kAccess; ++i) sum[i] = 0;
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      Acc v[kAccess];
      unpack(v, opaque(held[j]));
      add_piece(j, v, sum);
    }
#pragma unroll
    for (int width = kAccess / 2; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) sum[i] += sum[i + width];
    }
    return sum[0];
  };
  const Acc per_col = static_cast<Acc>(p.per_col);
  const Acc sum = total([](int, const Acc (&v)[kAccess], Acc (&s)[kAccess]) {
#pragma unroll
    for (int i = 0; i < kAccess; ++i) s[i] += v[i];
  });
  const Acc mean = mul(group_sum<kCluster, 0>(sum + tail, p.threads, block, block_total[0]), per_col);
  // Past the row x is held as 0; centred on 0 it adds nothing.
  Acc squares = total([&](int j, const Acc (&v)[kAccess], Acc (&s)[kAccess]) {
    const Acc centre = inside(j) ? mean : Acc(0);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) s[i] = fma(v[i] - centre, v[i] - centre, s[i]);
  });
  if (has_tail) squares = fma(tail - mean, tail - mean, squares);
  // Each thread's share is divided before it is added up: squares of values up to 1e18 stay finite.
  const Acc variance = group_sum<kCluster, 1>(mul(squares, per_col), p.threads, block, block_total[1]);
  const Acc rstd = reciprocal_sqrt(variance + static_cast<Acc>(p.eps));

  if (t == 0 && cols > 0 && p.mean) {
    static_cast<Acc*>(p.mean)[row] = mean;
    static_cast<Acc*>(p.rstd)[row] = rstd;
  }
  extern __shared__ uint4 dynamic_shared[];  // kShifted: the output of each of the block's rows, from a granule on
  Elem* shared = reinterpret_cast<Elem*>(dynamic_shared) +
                 (p.threads > kWarp ? 0 : threadIdx.x >> p.threads_log2) * shifted_elements<Elem>(p.cols);
  Elem* y = opaque(static_cast<Elem*>(p.y) + row * p.cols + first);  // this thread's part of [cols]
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    if (inside(j)) {
      if constexpr (!kEarly) load_params(w[0], b[0], j);
      Acc v[kAccess];
      AccOf<Param> scale[kAccess], shift[kAccess];
      unpack(v, opaque(held[j]));
      unpack(scale, w[kEarly ? j : 0]);
      unpack(shift, b[kEarly ? j : 0]);
#pragma unroll
      for (int i = 0; i < kAccess; ++i) v[i] = fma(mul(v[i] - mean, rstd), scale[i], shift[i]);
      V out;
      pack(out, v);
      if constexpr (kShifted) store_vec(shared + first + j * step, out);
      else store_vec(y + j * step, out);
    }
  }
  if constexpr (kShifted) {
    if (has_tail) {
      const Acc scale = weight ? static_cast<Acc>(load_one(weight + whole + t)) : Acc(1);
      const Acc shift = bias ? static_cast<Acc>(load_one(bias + whole + t)) : Acc(0);
      store_one(shared + whole + t, fma(mul(tail - mean, rstd), scale, shift));
    }
    if (p.threads > kWarp) __syncthreads();
    else __syncwarp();
    store_shifted(static_cast<Elem*>(p.y) + row * p.cols, shared, cols, t, stride);
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  // No block may end while another still reads its shared memory.
  if constexpr (kCluster) cooperative_groups::this_cluster().sync();
#endif
}

}  // namespace fastln
