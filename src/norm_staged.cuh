// The forward for rows whose length is no multiple of 16 bytes: then every row starts at another offset
// from a 16-byte boundary, and no thread could move whole accesses of its own columns.
//
// The row goes through shared memory, which takes any offset: 16-byte copies of all that lies between the
// row's first and last boundary, single elements at its two ends, in as out. Thread t of a group works on
// columns t, t + threads, ..., so that neighbouring threads touch neighbouring elements. x is read once.
// The order of additions follows from the columns and the dtype alone, as in norm_forward.cuh.
#pragma once

#include "norm_rows.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fastln {

constexpr int kStagedThreads = 1024;

// Elements of shared memory that a row's group needs: the row, and one access for its offset.
template <typename Elem>
__host__ __device__ constexpr int64_t staged_elements(int64_t cols) {
  constexpr int64_t kAccess = kMaxAccessBytes / sizeof(Elem);
  return (cols + kAccess - 1) / kAccess * kAccess + kAccess;
}

// A row in memory as 16-byte accesses: where they begin, and which columns they leave to single elements.
template <typename Elem>
struct Span {
  static constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  int offset;  // elements from the boundary before the row to its first column
  int head;    // columns [0, head) come before the first whole access
  int tail;    // columns [tail, cols) come behind the last one

  __device__ __forceinline__ Span(const Elem* row, int cols) {
    offset = static_cast<int>(reinterpret_cast<uintptr_t>(row) / sizeof(Elem) % kAccess);
    head = min((kAccess - offset) % kAccess, cols);
    tail = head + (cols - head) / kAccess * kAccess;
  }
};

template <typename Elem, typename Param>
__global__ void __launch_bounds__(kStagedThreads) norm_staged(const NormRows p) {
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  extern __shared__ uint4 staged[];
  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const BlockSum<Acc, 2, true> block(partial);

  const int threads = p.threads;
  const bool is_block = threads > kWarp;
  const int group = is_block ? 0 : threadIdx.x >> p.threads_log2;
  const int t = is_block ? threadIdx.x : threadIdx.x & (threads - 1);
  const int64_t row = is_block ? blockIdx.x : static_cast<int64_t>(blockIdx.x) * (blockDim.x >> p.threads_log2) + group;
  const int cols = row < p.rows ? static_cast<int>(p.cols) : 0;
  const auto sync = [&] {
    if (is_block) __syncthreads();
    else __syncwarp();
  };
  const auto group_sum = [&](Acc v, auto index) {
    if (is_block) return block.template sum<decltype(index)::value>(v);
    for (int offset = threads / 2; offset > 0; offset /= 2) v += __shfl_xor_sync(0xffffffffu, v, offset);
    return v;
  };
  Elem* shared = reinterpret_cast<Elem*>(staged) + group * staged_elements<Elem>(p.cols);
  const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride;  // [cols]
  Elem* y = static_cast<Elem*>(p.y) + row * p.cols;                  // [cols]
  const Param* weight = static_cast<const Param*>(p.weight);         // [cols] or null
  const Param* bias = static_cast<const Param*>(p.bias);             // [cols] or null

  {
    const Span<Elem> in(x, cols);
    Elem* to = shared + in.offset;
    for (int col = in.head + t * kAccess; col < in.tail; col += threads * kAccess) {
      const auto address = static_cast<uint32_t>(__cvta_generic_to_shared(to + col));
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(address), "l"(x + col) : "memory");
    }
    for (int i = t; i < kAccess; i += threads) {
      if (i < in.head) to[i] = x[i];
      if (i < cols - in.tail) to[in.tail + i] = x[in.tail + i];
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    sync();
    shared = to;
  }

  // Four sums at a time, so that their additions overlap.
  constexpr int kUnroll = 4;
  const auto total = [&](auto term) {
    Acc sum[kUnroll] = {};
    int col = t;
    for (; col + (kUnroll - 1) * threads < cols; col += kUnroll * threads) {
#pragma unroll
      for (int i = 0; i < kUnroll; ++i) sum[i] = term(load_one(shared + col + i * threads), sum[i]);
    }
    for (; col < cols; col += threads) sum[0] = term(load_one(shared + col), sum[0]);
    return (sum[0] + sum[2]) + (sum[1] + sum[3]);
  };
  const Acc per_col = static_cast<Acc>(p.per_col);
  const Acc mean =
      group_sum(total([](Acc v, Acc s) { return s + v; }), std::integral_constant<int, 0>{}) * per_col;
  const Acc squares = total([mean](Acc v, Acc s) { return fma(v - mean, v - mean, s); });
  // Each thread's share is divided before it is added up: squares of values up to 1e18 stay finite.
  const Acc variance = group_sum(squares * per_col, std::integral_constant<int, 1>{});
  const Acc rstd = reciprocal_sqrt(variance + static_cast<Acc>(p.eps));
  if (t == 0 && cols > 0 && p.mean) {
    static_cast<Acc*>(p.mean)[row] = mean;
    static_cast<Acc*>(p.rstd)[row] = rstd;
  }

  // Normalized in place, each thread its own columns.
#pragma unroll 4
  for (int col = t; col < cols; col += threads) {
    const Acc scale = weight ? static_cast<Acc>(load_one(weight + col)) : Acc(1);
    const Acc shift = bias ? static_cast<Acc>(load_one(bias + col)) : Acc(0);
    store_one(shared + col, fma((load_one(shared + col) - mean) * rstd, scale, shift));
  }
  sync();

  // Where y has another offset from its boundary than x (a strided x), its accesses are gathered.
  const Span<Elem> out(y, cols);
  const bool same_offset = (reinterpret_cast<uintptr_t>(x) - reinterpret_cast<uintptr_t>(y)) % kMaxAccessBytes == 0;
  for (int col = out.head + t * kAccess; col < out.tail; col += threads * kAccess) {
    Vec<Elem, kAccess> v{};
    if (same_offset) {
      load_vec(v, shared + col);
    } else {
#pragma unroll
      for (int i = 0; i < kAccess; ++i) set_item(v, i, shared[col + i]);
    }
    store_vec(y + col, v);
  }
  for (int i = t; i < kAccess; i += threads) {
    if (i < out.head) y[i] = shared[i];
    if (i < cols - out.tail) y[out.tail + i] = shared[out.tail + i];
  }
}

}  // namespace fastln
