// The forward for rows too long for the registers of a block, or of a cluster of blocks where the GPU has
// clusters and the row is whole: three launches over a row cut into chunks, with no upper limit on the columns.
//
//   moments    one block a chunk: its mean and its sum of centred squares, in two passes over the chunk
//   combine    one block a row: merges the chunks' moments by Chan's formula, in a fixed order
//   normalize  one block a chunk
//
// x is read twice from memory (the second pass over a chunk finds it in L1 or L2), so this is a path for
// completeness, not for speed. Chunks follow from the columns alone: results are batch invariant here too.
#pragma once

#include "norm_launch.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fastln {

// A chunk is kChunk columns: 64 KB of float32, which stay in L1 between the two passes.
constexpr int kSplitThreads = 512;

// Mean and sum of centred squares of `count` values.
template <typename Acc>
struct Moments {
  Acc mean;
  Acc squares;
  Acc count;
};

// T. F. Chan, G. H. Golub, R. J. LeVeque, "Updating formulae and a pairwise algorithm for computing
// sample variances" (1979), equation 2.1.
template <typename Acc>
__device__ __forceinline__ Moments<Acc> merge(const Moments<Acc>& a, const Moments<Acc>& b) {
  if (a.count == 0) return b;
  if (b.count == 0) return a;
  const Acc count = a.count + b.count;
  const Acc delta = b.mean - a.mean;
  const Acc share = b.count / count;
  return {a.mean + delta * share, a.squares + b.squares + delta * delta * a.count * share, count};
}

// moments: [rows, chunks]
template <typename Elem>
__global__ void __launch_bounds__(kSplitThreads)
    split_moments(const NormRows p, AccOf<Elem>* means, AccOf<Elem>* squares, int64_t chunks) {
  using Acc = AccOf<Elem>;
  __shared__ __align__(16) Acc partial[2][kMaxWarps];
  const BlockSum<Acc, 2> block(partial);
  const int64_t row = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int64_t begin = chunk * kChunk, end = min(begin + kChunk, p.cols);
  const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride;  // [cols]
  const Acc per_col = Acc(1) / static_cast<Acc>(end - begin);

  Acc sum = 0;
  for (int64_t col = begin + threadIdx.x; col < end; col += kSplitThreads) sum += load_one(x + col);
  const Acc mean = block.template sum<0>(sum) * per_col;
  Acc share = 0;  // squares divided by the whole row's columns, so that they stay finite
  const Acc per_row_col = Acc(1) / static_cast<Acc>(p.cols);
  for (int64_t col = begin + threadIdx.x; col < end; col += kSplitThreads) {
    const Acc d = load_one(x + col) - mean;
    share += d * d * per_row_col;
  }
  share = block.template sum<1>(share);
  if (threadIdx.x == 0) {
    means[blockIdx.x] = mean;
    squares[blockIdx.x] = share;
  }
}

// One block a row: thread t merges chunks t, t + 512, ... in order, then a tree over the threads.
// Leaves the row's mean and rstd in element 0 of its [chunks] of means and squares.
template <typename Elem>
__global__ void __launch_bounds__(kSplitThreads)
    split_combine(const NormRows p, AccOf<Elem>* means, AccOf<Elem>* squares, int64_t chunks) {
  using Acc = AccOf<Elem>;
  __shared__ Moments<Acc> shared[kSplitThreads];
  const int64_t row = blockIdx.x;
  means += row * chunks;
  squares += row * chunks;
  const Acc per_row_col = Acc(1) / static_cast<Acc>(p.cols);
  Moments<Acc> own{0, 0, 0};
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kSplitThreads) {
    const int64_t begin = chunk * kChunk;
    // Counts are shares of the row too, like the squares.
    own = merge(own, {means[chunk], squares[chunk], static_cast<Acc>(min(kChunk, p.cols - begin)) * per_row_col});
  }
  shared[threadIdx.x] = own;
  for (int width = kSplitThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) shared[threadIdx.x] = merge(shared[threadIdx.x], shared[threadIdx.x + width]);
  }
  if (threadIdx.x == 0) {
    const Acc mean = shared[0].mean;
    const Acc rstd = reciprocal_sqrt(shared[0].squares + static_cast<Acc>(p.eps));
    means[0] = mean;
    squares[0] = rstd;
    if (p.mean) {
      static_cast<Acc*>(p.mean)[row] = mean;
      static_cast<Acc*>(p.rstd)[row] = rstd;
    }
  }
}

template <typename Elem, typename Param>
__global__ void __launch_bounds__(kSplitThreads)
    split_normalize(const NormRows p, const AccOf<Elem>* means, const AccOf<Elem>* rstds, int64_t chunks) {
  using Acc = AccOf<Elem>;
  const int64_t row = blockIdx.x / chunks, chunk = blockIdx.x % chunks;
  const int64_t begin = chunk * kChunk, end = min(begin + kChunk, p.cols);
  const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride;  // [cols]
  Elem* y = static_cast<Elem*>(p.y) + row * p.cols;                  // [cols]
  const Param* weight = static_cast<const Param*>(p.weight);         // [cols] or null
  const Param* bias = static_cast<const Param*>(p.bias);             // [cols] or null
  const Acc mean = means[row * chunks], rstd = rstds[row * chunks];
  for (int64_t col = begin + threadIdx.x; col < end; col += kSplitThreads) {
    Acc v = (load_one(x + col) - mean) * rstd;
    if (weight) v *= static_cast<Acc>(load_one(weight + col));
    if (bias) v += static_cast<Acc>(load_one(bias + col));
    store_one(y + col, v);
  }
}

}  // namespace fastln
