// The general forward kernel behind fastln::layer_norm, for rows that fit the registers of a block.
// norm_cluster.cuh and norm_split.cuh take the longer ones.
//
// A row belongs to a group of threads: part of a warp, a warp, or a block. Each thread holds kPieces
// pieces of 16 bytes in registers; piece j of thread t is the row's (j * threads + t)-th, so that
// neighbouring threads touch neighbouring words. The group sums twice over its registers (mean, then
// centred squares: never E[x^2] - mean^2), so x is read once, and written once normalized.
//
// Batch invariance. The order of all additions follows from (kPieces, threads), which plan()
// takes from the columns, the dtype and the GPU's architecture alone. Rows never share a sum. So the bits
// of a row depend on its values, the columns, the dtype and the weights: not on the batch, the row's
// place in it, its stride or its alignment.
#pragma once

#include "norm_rows.h"
#include "reduce.cuh"
#include "shift.cuh"
#include "vec.cuh"

namespace fastln {

// How a row lies in memory.
enum class Rows16 {
  kWhole,    // it begins and ends at multiples of 16 bytes: a piece is one access
  kShifted,  // anywhere: pieces are shifted out of, and through shared memory into, granules (shift.cuh)
};

// With 8 pieces, whose weight and bias are fetched late, 64 registers are enough for a block of 1024 threads, except
// for a shift's granules, and except from compute capability 10.0 on, where the compiler spills (plan() knows). There
// 3 and 4 pieces take more, too.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr bool kWideBlocksFit = false;
#else
constexpr bool kWideBlocksFit = true;
#endif

// Whether the unpacked values stay in registers between the passes; otherwise they are unpacked anew in each, which
// costs up to 3 instructions an element but leaves the registers to other warps.
template <typename Elem, int kPieces, bool kEarly, Rows16 kRows>
constexpr bool kKeepsValues = sizeof(Elem) > 2 ? (kRows == Rows16::kWhole && kPieces <= 3)
                                               : kPieces == 2 || (kPieces == 4 && kEarly && kRows == Rows16::kWhole);

// Registers of a thread, at most: 128 let a block have 512 threads. What the compiler would use beyond these it
// uses to unpack earlier, which is worth less than another block. (On an H200: 32768x1152 float16 with 2 pieces
// 45.9 us at 56 registers, 48.7 at 64; 32768x768 with 3 26.4 at 64, 27.1 at 80; 32768x769 38.3 at 64, 41.6 at 80;
// 4096x8193 49.2 at 64, 55.1 at 72.)
template <typename Elem, typename Param, int kPieces, bool kEarly, Rows16 kRows>
constexpr int forward_registers() {
  constexpr bool kWide = sizeof(Param) > sizeof(Elem);  // takes twice the registers
  if (kPieces == 8 && kRows == Rows16::kWhole && kWideBlocksFit) return 64;
  if (sizeof(Elem) > 4) return 128;
  if (kPieces == 4 && !kEarly) return kRows == Rows16::kWhole && kWideBlocksFit ? 40 : 64;
  if (kWide || kPieces == 8) return 128;
  if (kPieces == 2) return kRows == Rows16::kWhole && sizeof(Elem) == 4 ? 48 : 56;
  return kPieces == 3 ? (kWideBlocksFit ? 64 : 80) : 128;
}

// Elements of shared memory that a kShifted row's output takes, with the granule that a shift reads ahead.
template <typename Elem>
__host__ __device__ constexpr int64_t shifted_elements(int64_t cols) {
  constexpr int64_t kAccess = kMaxAccessBytes / sizeof(Elem);
  return (cols + kAccess - 1) / kAccess * kAccess + kAccess;
}

// Sum kIndex over a row's group; every thread of it gets it. `threads` is a power of two up to 32, or
// blockDim.x. All threads of the block must call it.
template <bool kUnroll, int kIndex, typename Acc>
__device__ __forceinline__ Acc group_sum(Acc v, int threads, const BlockSum<Acc, 2>& block) {
  if (threads > kWarp) return block.template sum<kIndex>(v);
  if constexpr (kUnroll) {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2)
      if (offset < threads) v += __shfl_xor_sync(0xffffffffu, v, offset);
  } else {  // a loop, over which the compiler moves nothing that would need registers
    for (int offset = threads / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
  }
  return v;
}

// kEarly: weight and bias are fetched before the reductions, which then hide their latency. Past L2, where
// other blocks hide it anyway, the registers they take cost more than that gains; see find_forward().
template <typename Elem, typename Param, int kPieces, bool kEarly, Rows16 kRows>
__global__ void __maxnreg__((forward_registers<Elem, Param, kPieces, kEarly, kRows>())) norm_forward(const NormRows p) {
  constexpr bool kShifted = kRows == Rows16::kShifted;
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  using V = Vec<Elem, kAccess>;
  using P = Vec<Param, kAccess>;
  int64_t row;
  int t, stride;  // this thread's place in its group, and the group's size
  if (p.threads > kWarp) {
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
  const int first = t * kAccess, step = stride * kAccess;        // piece j is at column first + j * step
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

  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const BlockSum<Acc, 2> block(partial, p.threads > kWarp);

  constexpr bool kKeep = kKeepsValues<Elem, kPieces, kEarly, kRows>;
  Acc kept[kKeep ? kPieces : 1][kAccess];
  const auto values = [&](Acc(&v)[kAccess], int j) {
    if constexpr (kKeep) {
#pragma unroll
      for (int i = 0; i < kAccess; ++i) v[i] = kept[j][i];
    } else {
      unpack(v, opaque(held[j]));
    }
  };
  if constexpr (kKeep) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) unpack(kept[j], held[j]);
  }
  const Acc per_col = p.per_col_as(Acc());
  Acc sums[kAccess];  // independent ones over the pieces, then added pairwise
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    Acc v[kAccess];
    values(v, j);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) sums[i] = j == 0 ? v[i] : sums[i] + v[i];
  }
  Acc sum = pairwise_sum(sums);
  if constexpr (kShifted) sum += tail;
  const Acc mean = mul(group_sum<kKeep, 0>(sum, p.threads, block), per_col);
#pragma unroll
  for (int j = 0; j < kPieces; ++j) {
    const Acc centre = inside(j) ? mean : Acc(0);  // past the row x is held as 0; centred on 0 it adds nothing
    Acc v[kAccess];
    values(v, j);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      v[i] -= centre;
      sums[i] = j == 0 ? mul(v[i], v[i]) : fma(v[i], v[i], sums[i]);
      if constexpr (kKeep) kept[j][i] = v[i];
    }
  }
  Acc squares = pairwise_sum(sums);
  if (has_tail) squares = fma(tail - mean, tail - mean, squares);
  // Each thread's share is divided before it is added up: squares of values up to 1e18 stay finite.
  const Acc variance = group_sum<kKeep, 1>(mul(squares, per_col), p.threads, block);
  const Acc rstd = reciprocal_sqrt(variance + p.eps_as(Acc()));

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
      values(v, j);
      unpack(scale, w[kEarly ? j : 0]);
      unpack(shift, b[kEarly ? j : 0]);
#pragma unroll
      for (int i = 0; i < kAccess; ++i) v[i] = fma(mul(kKeep ? v[i] : v[i] - mean, rstd), scale[i], shift[i]);
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
}

}  // namespace fastln
