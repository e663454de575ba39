// The forward for rows too long for the registers of a block, or of a cluster of blocks where the GPU has
// clusters and the row is whole: three launches over a row cut into chunks, with no upper limit on the columns.
//
//   moments    one block a chunk: its mean and its sum of centred squares, in two passes over registers
//   combine    one block a row: merges the chunks' moments by Chan's formula, in a fixed order
//   normalize  one block a chunk, or, of rows that start anywhere, one thread a granule of y; the last ones first, whose
//              x is still in L2
//
// x is read twice, so this is a path for completeness. What is no granule is shifted out of granules (shift.cuh). Chunks
// follow from the columns alone, and the order of additions within one does not depend on where it starts: results are
// batch invariant here too.
#pragma once

#include "norm_forward.cuh"
#include "norm_launch.h"
#include "norm_pieces.cuh"
#include "reduce.cuh"
#include "shift.cuh"
#include "vec.cuh"

namespace fastln {

constexpr int kSplitThreads = 256;
constexpr int kSplitPieces = kChunkBytes / kMaxAccessBytes / kSplitThreads;  // of 16 bytes that a thread holds

// Blocks of a multiprocessor that the registers are held down to. Whole rows, float16 64x1048576: five 108.7 us, six
// 112.8. Others, float32 256x131073: moments by four 147, by five 151.
constexpr int split_blocks(RowLayout rows) { return rows == RowLayout::kWhole ? 5 : 4; }

// Those of split_normalize_shifted(). 512x65537 float16 with 40 registers 81.2 us, with 47 84.4; wide parameters, and
// older GPUs, would spill.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
constexpr int shifted_blocks(bool) { return 4; }
#else
constexpr int shifted_blocks(bool wide) { return wide ? 4 : 6; }
#endif

// A block's chunk of a row, and a thread's part of it: piece j of thread t is the (j * kSplitThreads + t)-th. What is
// left behind the last piece of the row is one element for each of the first threads.
template <typename Elem, RowLayout kRows>
class Chunk {
 public:
  using Acc = AccOf<Elem>;
  static constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem)), kCols = kChunkBytes / sizeof(Elem);
  using V = Vec<Elem, kAccess>;

  int64_t row, begin;  // and the chunk's first column
  int count, whole;    // of columns, and of those in pieces
  V held[kSplitPieces];
  Acc tail;

  __device__ __forceinline__ Chunk(const NormRows& p, int64_t index, int64_t chunks)
      : row(index / chunks),
        begin(index % chunks * kCols),
        count(static_cast<int>(min(p.cols - begin, int64_t{kCols}))),
        whole(count / kAccess * kAccess),
        tail(0) {
    const Elem* x = opaque(static_cast<const Elem*>(p.x) + row * p.x_stride + begin + column(0));
    const Elem* end = static_cast<const Elem*>(p.x) + (p.rows - 1) * p.x_stride + p.cols;
    const int offset = kRows == RowLayout::kWhole ? 0 : granule_offset(x);
    if (has_tail()) tail = load_one(x - column(0) + whole + threadIdx.x);
    V next[kSplitPieces];
#pragma unroll
    for (int j = 0; j < kSplitPieces; ++j) {
      held[j] = next[j] = V{};
      if (inside(j)) load_granule(held[j], x - offset + j * kStep, end);
      if (inside(j) && offset != 0) load_granule(next[j], x - offset + j * kStep + kAccess, end);
    }
    if constexpr (kRows == RowLayout::kShifted) {
#pragma unroll
      for (int j = 0; j < kSplitPieces; ++j) held[j] = shift(held[j], next[j], offset);
    }
  }

  // Of piece j, within the chunk.
  __device__ __forceinline__ int column(int j) const { return static_cast<int>(threadIdx.x) * kAccess + j * kStep; }
  __device__ __forceinline__ bool inside(int j) const { return column(j) < whole; }
  __device__ __forceinline__ bool has_tail() const {
    return kRows == RowLayout::kShifted && static_cast<int>(threadIdx.x) < count - whole;
  }

 private:
  static constexpr int kStep = kSplitThreads * kAccess;
};

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

// means, squares: [rows, chunks]
template <typename Elem, RowLayout kRows>
__global__ void __launch_bounds__(kSplitThreads, split_blocks(kRows))
    split_moments(const NormRows p, AccOf<Elem>* means, AccOf<Elem>* squares, int64_t chunks) {
  using Acc = AccOf<Elem>;
  __shared__ __align__(16) Acc shared[2][kMaxWarps];
  wait_for_previous_kernel();
  const Chunk<Elem, kRows> chunk(p, blockIdx.x, chunks);
  const BlockSum<Acc, 2> block(shared);
  const Acc per_chunk_col = Acc(1) / static_cast<Acc>(chunk.count);
  const Acc mean = mul(block.template sum<0>(sum_pieces(chunk.held) + chunk.tail), per_chunk_col);
  Acc share = sum_centred_squares(chunk.held, mean, [&](int j) { return chunk.inside(j); });
  if (chunk.has_tail()) share = fma(chunk.tail - mean, chunk.tail - mean, share);
  // Divided by the whole row's columns before it is added up: squares of values up to 1e18 stay finite.
  share = block.template sum<1>(mul(share, p.per_col_as(Acc())));
  if (threadIdx.x == 0) {
    means[blockIdx.x] = mean;
    squares[blockIdx.x] = share;
  }
}

// One block a row: thread t merges chunks t, t + kSplitThreads, ... in order, then a tree over the threads.
// Leaves the row's mean and rstd in element 0 of its [chunks] of means and squares.
template <typename Elem>
__global__ void __launch_bounds__(kSplitThreads)
    split_combine(const NormRows p, AccOf<Elem>* means, AccOf<Elem>* squares, int64_t chunks) {
  using Acc = AccOf<Elem>;
  __shared__ Moments<Acc> shared[kSplitThreads];
  constexpr int64_t kCols = kChunkBytes / sizeof(Elem);
  const int64_t row = blockIdx.x;
  wait_for_previous_kernel();
  means += row * chunks;
  squares += row * chunks;
  Moments<Acc> own{0, 0, 0};
  for (int64_t chunk = threadIdx.x; chunk < chunks; chunk += kSplitThreads) {
    // Counts are shares of the row too, like the squares.
    const auto count = static_cast<Acc>(min(kCols, p.cols - chunk * kCols)) * p.per_col_as(Acc());
    own = merge(own, {means[chunk], squares[chunk], count});
  }
  shared[threadIdx.x] = own;
  for (int width = kSplitThreads / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) shared[threadIdx.x] = merge(shared[threadIdx.x], shared[threadIdx.x + width]);
  }
  if (threadIdx.x == 0) {
    const Acc mean = shared[0].mean;
    const Acc rstd = reciprocal_sqrt(shared[0].squares + p.eps_as(Acc()));
    means[0] = mean;
    squares[0] = rstd;
    if (p.mean) {
      static_cast<Acc*>(p.mean)[row] = mean;
      static_cast<Acc*>(p.rstd)[row] = mul(rstd, static_cast<Acc>(p.rstd_sign));
    }
  }
}

// kN elements that begin anywhere in a row. Loads of several can be under way before the first value() waits for one.
template <typename T, int kN>
class AnyPlace {
 public:
  // Of a null row, zeros. A granule past `end` is not read, see load_granule().
  __device__ __forceinline__ AnyPlace(const T* row, int64_t column, const T* end)
      : offset_(granule_offset(row + column)) {
#pragma unroll
    for (int i = 0; i <= kParts; ++i) {
      part_[i] = {};
      if (row && (i < kParts || offset_ != 0)) load_granule(part_[i], row + column - offset_ + i * kGranule, end);
    }
  }
  __device__ __forceinline__ Vec<T, kN> value() const {
    Vec<T, kN> out;
#pragma unroll
    for (int i = 0; i < kParts; ++i) {
      const Vec<T, kGranule> v = shift(part_[i], part_[i + 1], offset_);
#pragma unroll
      for (int k = 0; k < v.kRegisters; ++k) out.bits[i * v.kRegisters + k] = v.bits[k];
    }
    return out;
  }

 private:
  static constexpr int kGranule = kMaxAccessBytes / static_cast<int>(sizeof(T)), kParts = kN / kGranule;
  int offset_;
  Vec<T, kGranule> part_[kParts + 1];
};

template <typename Elem, typename Param>
__global__ void __launch_bounds__(kSplitThreads, split_blocks(RowLayout::kWhole))
    split_normalize_whole(const NormRows p, const AccOf<Elem>* means, const AccOf<Elem>* rstds, int64_t chunks) {
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  wait_for_previous_kernel();
  const Chunk<Elem, RowLayout::kWhole> chunk(p, gridDim.x - 1 - blockIdx.x, chunks);
  Elem* y = static_cast<Elem*>(p.y) + chunk.row * p.cols + chunk.begin;  // [count]
  const Param* weight = static_cast<const Param*>(p.weight);             // [cols] or null
  const Param* bias = static_cast<const Param*>(p.bias);                 // [cols] or null
  const Acc mean = means[chunk.row * chunks], rstd = rstds[chunk.row * chunks];
#pragma unroll
  for (int j = 0; j < kSplitPieces; ++j) {
    if (!chunk.inside(j)) continue;
    const int64_t column = chunk.begin + chunk.column(j);
    Vec<Param, kAccess> w = splat<Param, kAccess>(1), b = splat<Param, kAccess>(0);
    if (weight) load_vec(w, weight + column);
    if (bias) load_vec(b, bias + column);
    store_vec(y + chunk.column(j), normalized<Elem>(opaque(chunk.held[j]), w, b, mean, rstd));
  }
}

// A thread has an aligned granule of y, and shifts x, weight and bias to it.
template <typename Elem, typename Param>
__global__ void __launch_bounds__(kSplitThreads, shifted_blocks(sizeof(Param) > sizeof(Elem)))
    split_normalize_shifted(const NormRows p, const AccOf<Elem>* means, const AccOf<Elem>* rstds, int64_t chunks,
                            unsigned blocks_a_row) {
  using Acc = AccOf<Elem>;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  const unsigned block = gridDim.x - 1 - blockIdx.x;
  const int64_t row = block / blocks_a_row;
  const Elem* x = static_cast<const Elem*>(p.x) + row * p.x_stride;  // [cols]
  Elem* y = static_cast<Elem*>(p.y) + row * p.cols;                  // [cols]
  const Elem* x_end = static_cast<const Elem*>(p.x) + (p.rows - 1) * p.x_stride + p.cols;
  const Param* weight = static_cast<const Param*>(p.weight);  // [cols] or null
  const Param* bias = static_cast<const Param*>(p.bias);      // [cols] or null
  // Of the granule; it begins before the row's first column if the row does not begin with it.
  const int64_t column = (int64_t{block % blocks_a_row} * kSplitThreads + threadIdx.x) * kAccess - granule_offset(y);
  if (column >= p.cols) return;
  wait_for_previous_kernel();
  const Acc mean = means[row * chunks], rstd = rstds[row * chunks];
  if (column >= 0 && column + kAccess <= p.cols) {
    const AnyPlace<Elem, kAccess> values(x, column, x_end);
    const AnyPlace<Param, kAccess> w(weight, column, weight + p.cols), b(bias, column, bias + p.cols);
    store_vec(y + column, normalized<Elem>(values.value(), weight ? w.value() : splat<Param, kAccess>(1),
                                           bias ? b.value() : splat<Param, kAccess>(0), mean, rstd));
  } else {
    for (int64_t c = max(column, int64_t{0}); c < min(column + kAccess, p.cols); ++c) {
      const Acc scale = weight ? static_cast<Acc>(load_one(weight + c)) : Acc(1);
      const Acc shift = bias ? static_cast<Acc>(load_one(bias + c)) : Acc(0);
      store_one(y + c, fma(mul(load_one(x + c) - mean, rstd), scale, shift));
    }
  }
}

}  // namespace fastln
