// What one launch of the general kernels works on. Plain data, no torch and no CUDA type.
#pragma once

#include <cstdint>

namespace fastln {

struct NormRows {
  const void* x;       // [rows, cols], element stride 1 along cols, `x_stride` elements from row to row
  void* y;             // [rows, cols], contiguous
  void* mean;          // [rows] of the accumulate type, or null together with rstd
  void* rstd;          // [rows]
  const void* weight;  // [cols] of the parameter type, or null for 1
  const void* bias;    // [cols], or null for 0
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  double eps;
  double per_col;  // 1 / cols
  int threads;  // of a row's group within a block: a power of two up to 32, or the block
  int threads_log2;  // of `threads`, where it is a power of two
  int cluster;  // blocks that share a row
};

}  // namespace fastln
