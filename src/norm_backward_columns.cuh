// dweight and dbias of few rows: each block, or cluster of blocks, sums a slice of columns over all rows.
#pragma once

#include <cooperative_groups.h>

#include "norm_backward_shared.h"
#include "norm_backward_terms.cuh"
#include "norm_rows.h"
#include "vec.cuh"

namespace fastln {

// dweight and dbias of the block's slice of columns, kPieces pieces of kPieceBytes wide. Thread t takes piece t % kPieces of
// rows t / kPieces, and so on, starting where its place in the cluster says; the threads' sums are added in a fixed order,
// then the blocks'.
template <typename Elem, typename Param, bool kWhole, int kPieceBytes, int kPieces>
__device__ __forceinline__ void sum_slice(const BackwardLaunch& p, AccOf<Elem>* shared) {
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kPieceBytes / static_cast<int>(sizeof(Elem));
  constexpr int kCols = kPieces * kAccess;
  constexpr int kRowsTogether = kWhole ? 4 : 1;  // more of ragged rows, and their kernels spill on some architectures
  using V = Vec<Elem, kAccess>;
  const int split = p.column_split, rank = static_cast<int>(blockIdx.x) % split;
  const int64_t begin = static_cast<int64_t>(blockIdx.x) / split * kCols;
  const int lanes = static_cast<int>(blockDim.x) / kPieces, lane = static_cast<int>(threadIdx.x) / kPieces;
  const int place = static_cast<int>(threadIdx.x) % kPieces * kAccess;  // among the slice's columns
  const int64_t col = begin + place;
  Acc dweight[kAccess], dbias[kAccess];
#pragma unroll
  for (int i = 0; i < kAccess; ++i) dweight[i] = dbias[i] = 0;
  if (col < p.cols) {
#pragma unroll kRowsTogether
    for (int64_t row = rank * lanes + lane; row < p.rows; row += lanes * split) {
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
  const auto write = [&](int item, Acc sum) {
    Param* out = static_cast<Param*>(item < kCols ? p.dweight : p.dbias);
    const int64_t at = begin + item % kCols;
    if (out && at < p.cols) store_one(out + at, sum);
  };
  Acc* total = shared + 2 * kAccess * blockDim.x;
  const int used = static_cast<int>(min(static_cast<int64_t>(lanes), p.rows));
  for (int item = threadIdx.x; item < 2 * kCols; item += blockDim.x) {
    Acc four[4] = {};  // side by side, so that they do not wait for each other
    int l = 0;
#pragma unroll 4
    for (; l + 4 <= used; l += 4) {
#pragma unroll
      for (int i = 0; i < 4; ++i) four[i] += shared[(l + i) * (2 * kCols) + item];
    }
    for (; l < used; ++l) four[0] += shared[l * (2 * kCols) + item];
    const Acc sum = (four[0] + four[1]) + (four[2] + four[3]);
    if (split == 1) write(item, sum);
    else total[item] = sum;
  }
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  if (split == 1) return;
  const auto cluster = cooperative_groups::this_cluster();
  cluster.sync();
  if (rank == 0) {
    for (int item = threadIdx.x; item < 2 * kCols; item += blockDim.x) {
      Acc of[kMaxColumnSplit];
#pragma unroll
      for (int b = 0; b < kMaxColumnSplit; ++b) of[b] = b < split ? *cluster.map_shared_rank(total + item, b) : Acc(0);
      Acc sum = 0;
#pragma unroll
      for (int b = 0; b < kMaxColumnSplit; ++b) sum += of[b];
      write(item, sum);
    }
  }
  cluster.sync();  // no block ends while its memory is read
#endif
}

// The same, p.column_pieces pieces wide, or always 4 if not kAnyWidth. (Width known when compiling: 1024x512
// float16 4.3 us on an H200, otherwise 4.7.)
template <typename Elem, typename Param, bool kWhole, bool kAnyWidth, int kPieceBytes = kMaxAccessBytes>
__device__ __forceinline__ void sum_columns(const BackwardLaunch& p, AccOf<Elem>* shared) {
  if constexpr (!kAnyWidth) return sum_slice<Elem, Param, kWhole, kPieceBytes, 4>(p, shared);
  switch (p.column_pieces) {
    case 4: return sum_slice<Elem, Param, kWhole, kPieceBytes, 4>(p, shared);
    case 8: return sum_slice<Elem, Param, kWhole, kPieceBytes, 8>(p, shared);
    case 32:
      if constexpr (kWhole) return sum_slice<Elem, Param, kWhole, kPieceBytes, 32>(p, shared);
    default: return sum_slice<Elem, Param, kWhole, kPieceBytes, 16>(p, shared);
  }
}

// The same in a launch of its own, where the blocks of norm_backward() would hold more shared memory than this needs.
template <typename Elem, typename Param, bool kWhole>
__global__ void __launch_bounds__(kBackwardThreads) sum_all_columns(const BackwardLaunch p) {
  extern __shared__ uint4 dynamic_shared[];
  wait_for_previous_kernel();
  sum_columns<Elem, Param, kWhole, true>(p, reinterpret_cast<AccOf<Elem>*>(dynamic_shared));
}

}  // namespace fastln
