// The backward of rows too long for a cluster: the two sums of each row first, chunk by chunk, so that norm_backward()
// can take the row in slices.
#pragma once

#include "norm_backward_pair.cuh"
#include "norm_backward_plan.h"
#include "norm_backward_terms.cuh"
#include "norm_rows.h"
#include "vec.cuh"

namespace fastln {

// sums[row][chunk]: sums of g and of g * xhat over a chunk of a row, one block each. A thread takes pieces of 16 bytes,
// kWhole by one access.
template <typename Elem, typename Param, bool kWhole>
__global__ void __launch_bounds__(kBackwardThreads)
    sum_chunks(const BackwardLaunch p, AccOf<Elem>* sums, int64_t chunks) {
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  __shared__ PairRoom<Acc> room;
  const int64_t row = blockIdx.x / chunks, begin = blockIdx.x % chunks * kSumsChunk;
  const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride + begin;
  const Elem* dy = static_cast<const Elem*>(p.dy) + row * p.dy_stride + begin;
  const Param* weight = p.weight ? static_cast<const Param*>(p.weight) + begin : nullptr;
  const int cols = static_cast<int>(min(kSumsChunk, p.cols - begin));
  wait_for_previous_kernel();
  const Acc mean = static_cast<const Acc*>(p.mean)[row], rstd = magnitude(static_cast<const Acc*>(p.rstd)[row]);
  Acc g_sum = 0, gx_sum = 0;
#pragma unroll 2
  for (int col = threadIdx.x * kAccess; col < cols; col += kBackwardThreads * kAccess) {
    Vec<Elem, kAccess> x_piece, dy_piece;
    Vec<Param, kAccess> weight_piece = splat<Param, kAccess>(1);
    if (kWhole || col + kAccess <= cols) {
      if (weight) load_vec(weight_piece, weight + col);
    } else {
#pragma unroll
      for (int i = 0; i < kAccess; ++i)
        if (weight && col + i < cols) set_item(weight_piece, i, weight[col + i]);
    }
    load_both<kWhole>(x_piece, dy_piece, x, dy, col, cols);
    Acc x_items[kAccess], dy_items[kAccess], scale[kAccess];
    unpack(x_items, x_piece);
    unpack(dy_items, dy_piece);
    unpack(scale, weight_piece);
#pragma unroll
    for (int i = 0; i < kAccess; ++i) {
      add_to_row(g_sum, gx_sum, dy_items[i], scale[i], mul(x_items[i] - mean, rstd));
    }
  }
  add_group<true>(g_sum, gx_sum, kBackwardThreads, 0, 0, room);
  if (threadIdx.x == 0) {
    sums[2 * blockIdx.x] = g_sum;
    sums[2 * blockIdx.x + 1] = gx_sum;
  }
}

// averages[row]: those of g and of g * xhat, from the chunks' sums; one warp a row.
template <typename Acc>
__global__ void average_chunks(const Acc* sums, int64_t rows, int64_t chunks, double per_col, Acc* averages) {
  const int64_t row = static_cast<int64_t>(blockIdx.x) * (blockDim.x / kWarp) + threadIdx.x / kWarp;
  wait_for_previous_kernel();
  if (row >= rows) return;
  Acc a = 0, b = 0;
  for (int64_t chunk = threadIdx.x % kWarp; chunk < chunks; chunk += kWarp) {
    a += sums[2 * (row * chunks + chunk)];
    b += sums[2 * (row * chunks + chunk) + 1];
  }
  add_lanes(a, b, kWarp);
  if (threadIdx.x % kWarp != 0) return;
  averages[2 * row] = mul(a, static_cast<Acc>(per_col));
  averages[2 * row + 1] = mul(b, static_cast<Acc>(per_col));
}

}  // namespace fastln
