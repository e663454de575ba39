// What one launch works on. Plain data, no torch and no CUDA type, shared by the GPU and CPU kernels.
#pragma once

#include <cstdint>

namespace fastln {

// weight or bias: one number for every column, or a vector of `cols` numbers.
struct Affine {
  enum class Kind : int32_t {
    kScalar,   // `value` for every column (an absent weight is 1, an absent bias is 0)
    kElement,  // data: [cols] of the input's element type
    kFloat32,  // data: [cols] of float
  };
  const void* data = nullptr;
  float value = 0;
  Kind kind = Kind::kScalar;
};

// y = (x - mean) * rstd * weight + bias over each row.
struct Rows {
  const void* x;  // [rows, cols], element stride 1 along cols, `x_stride` elements from row to row
  void* y;        // [rows, cols], contiguous; may be x itself when x is contiguous
  int64_t rows;
  int64_t cols;
  int64_t x_stride;
  Affine weight;
  Affine bias;
  float eps;
  float per_col;  // 1 / cols
};

constexpr int kStepThreads = 512;  // of a block that walks a row in steps

// Threads of a block, at most, whose threads move `items` a step and hold them as `acc_bytes` each: so many that a
// multiprocessor has room for four blocks, or else for two. (Two blocks of 1024 threads wait, each for its own sums,
// and nothing else is there to run: float32 4096x4096 by 1024 threads of 4 items 45.1 us on an H200, by 512 of 8 34.2;
// float16 4096x1024 in half by 1024 of 1 27.8, by 512 of 2 14.2. But f16x8_pack_f32, which would hold 16 floats, by 512
// threads 93.6 at 8192x8192, by 1024 88.8.)
constexpr int block_threads(int items, int acc_bytes) { return 2 * items * acc_bytes <= 32 ? 512 : 1024; }

// Items that a thread holds between the passes over a row, where it moves `items` a step: these, or those of two steps,
// or 0 where a block cannot hold the row.
constexpr int held_items(int items, int acc_bytes, int64_t cols) {
  const int threads = block_threads(items, acc_bytes);
  if (cols <= int64_t{threads} * items) return items;
  return threads == 512 && cols <= int64_t{threads} * 2 * items ? 2 * items : 0;
}

}  // namespace fastln
