// dweight and dbias of few rows: each block sums a slice of columns over all rows.
#pragma once

#include "norm_backward_plan.h"
#include "norm_backward_terms.cuh"
#include "norm_rows.h"
#include "vec.cuh"

namespace fastln {

constexpr int kColumnPieces = 4;  // of 16 bytes, side by side, that a block sums: whole sectors

// dweight and dbias of the `block`-th slice of columns, from all rows. Thread t takes piece t % kColumnPieces of
// rows t / kColumnPieces, and so on; the threads' sums are added in order. `shared` has room for 2 * kAccess values
// a thread.
template <typename Elem, typename Param, bool kWhole>
__device__ void sum_columns(const BackwardLaunch& p, int64_t block, AccOf<Elem>* shared) {
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  constexpr int kCols = kColumnPieces * kAccess;
  using V = Vec<Elem, kAccess>;
  const int lanes = blockDim.x / kColumnPieces, lane = threadIdx.x / kColumnPieces;
  const int place = threadIdx.x % kColumnPieces * kAccess;  // among the block's columns
  const int64_t col = block * kCols + place;
  Acc dweight[kAccess], dbias[kAccess];
#pragma unroll
  for (int i = 0; i < kAccess; ++i) dweight[i] = dbias[i] = 0;
  if (col < p.cols) {
#pragma unroll 2
    for (int64_t row = lane; row < p.rows; row += lanes) {
      const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride;
      const Elem* dy = static_cast<const Elem*>(p.dy) + row * p.dy_stride;
      V x_piece, dy_piece;
      load_both<kWhole>(x_piece, dy_piece, x, dy, col, p.cols);
      const Acc mean = static_cast<const Acc*>(p.mean)[row], rstd = magnitude(static_cast<const Acc*>(p.rstd)[row]);
      Acc x_items[kAccess], dy_items[kAccess];
      unpack(x_items, x_piece);
      unpack(dy_items, dy_piece);
#pragma unroll
      for (int i = 0; i < kAccess; ++i) {
        add_to_column(dweight[i], dbias[i], dy_items[i], mul(x_items[i] - mean, rstd));
      }
    }
  }
  Acc* own = shared + lane * (2 * kCols) + place;
#pragma unroll
  for (int i = 0; i < kAccess; ++i) {
    own[i] = dweight[i];
    own[kCols + i] = dbias[i];
  }
  __syncthreads();
  const int used = static_cast<int>(min(static_cast<int64_t>(lanes), p.rows));
  for (int item = threadIdx.x; item < 2 * kCols; item += blockDim.x) {
    Acc sum = 0;
#pragma unroll 8
    for (int l = 0; l < used; ++l) sum += shared[l * (2 * kCols) + item];
    Param* out = static_cast<Param*>(item < kCols ? p.dweight : p.dbias);
    const int64_t at = block * kCols + item % kCols;
    if (out && at < p.cols) store_one(out + at, sum);
  }
}

// The same in a launch of its own, where the blocks of norm_backward() would hold more shared memory than this needs.
template <typename Elem, typename Param, bool kWhole>
__global__ void __launch_bounds__(kBackwardThreads) sum_all_columns(const BackwardLaunch p) {
  extern __shared__ uint4 dynamic_shared[];
  wait_for_previous_kernel();
  sum_columns<Elem, Param, kWhole>(p, blockIdx.x, reinterpret_cast<AccOf<Elem>*>(dynamic_shared));
}

}  // namespace fastln
