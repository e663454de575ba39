// How the backward runs: numbers only, as in tuning.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "aligned.h"
#include "device.h"
#include "norm_rows.h"
#include "tuning.h"

namespace fastln {

struct BackwardPlan {
  int32_t pieces = 0;         // of 16 bytes that a thread owns; 0: rows are cut into slices, and their sums come first
  int32_t threads = 0;        // a row's threads within a block: a power of two up to 32, else a multiple of 32
  int32_t cluster = 1;        // blocks that share a row
  int32_t block = 0;          // threads of a block, a multiple of `threads`
  int32_t blocks_per_sm = 1;  // that stay resident
  bool direct = false;        // few rows: one launch, of which some blocks sum columns
};

constexpr int kBackwardThreads = 512;  // of a block, at most

// The same, for so many pieces a thread on a GPU of that compute capability: from 10.0 on 512 threads do not leave the
// registers that 3 pieces take, nor 384 those of 4. (Registers go by four warps: 448 threads would have no more.)
constexpr int backward_threads(int pieces, int major) {
  return major < 10 || pieces < 3 ? kBackwardThreads : pieces == 3 ? 384 : 256;
}

constexpr int kMaxCluster = 8;  // the portable limit

// Pieces of a thread whose block shares rows with others: as many as leave a row's stage 64 KB, and registers for the
// sums of their columns.
constexpr int cluster_pieces(int64_t element_bytes) { return element_bytes == 2 ? 2 : 4; }

constexpr int kSlicePieces = 2;  // of 16 bytes a thread, where rows are cut into slices
inline int64_t slice_cols(int64_t element_bytes) {
  return int64_t{kSlicePieces} * kBackwardThreads * 16 / element_bytes;
}

// Columns from one partial sum to the next, so that each begins aligned.
inline int64_t backward_pitch(int64_t cols) { return round_up(cols, 8); }

// Columns that one block adds, where the sums of long rows come first.
constexpr int64_t kSumsChunk = 16384;

// Whether rows of x, dy and dx begin and end at multiples of 16 bytes.
inline bool grads_are_whole(const NormGrads& p, int64_t element_bytes) {
  return rows_are_aligned(p.x, p.rows, p.x_stride * element_bytes) &&
         rows_are_aligned(p.dy, p.rows, p.dy_stride * element_bytes) && p.cols * element_bytes % kMaxAccessBytes == 0;
}

struct BackwardGrid {
  int64_t blocks;    // that walk over the rows of a slice, side by side
  int64_t slices;    // that a row is cut into
  int64_t partials;  // partial sums of dweight and dbias: one a block, or a cluster
};

inline BackwardGrid backward_grid(const NormGrads& p, const BackwardPlan& plan, int64_t element_bytes,
                                  const DeviceFacts& device) {
  const int64_t slices = plan.pieces == 0 ? (p.cols + slice_cols(element_bytes) - 1) / slice_cols(element_bytes) : 1;
  const int64_t groups = plan.block / plan.threads;
  const int64_t needed = (p.rows + groups - 1) / groups;
  const int64_t resident = std::max<int64_t>(int64_t{device.sms} * plan.blocks_per_sm / plan.cluster / slices, 1);
  const int64_t walkers = plan.direct ? needed : std::min(needed, resident);
  return {walkers * plan.cluster, slices, walkers};
}

// A row's threads and pieces; then how many rows a block takes at once, and how many blocks stay. All measured on one
// H200 with float16 where nothing else is said, in us; "512x2" is 512 threads a row of 2 pieces each.
//
// Rows, and so threads, of other shapes share partial sums, of which the fewest are best: one block of 512 threads a
// multiprocessor beats two of 256 (4096x4096 35.2 and 36.7), and leaves add_partials() half as much.
inline BackwardPlan plan_backward(const NormGrads& p, int element_bytes, const DeviceFacts& device) {
  const int64_t row_pieces = (p.cols * element_bytes + 15) / 16;
  // Of the columns alone, not of the addresses: those must not change a bit.
  const bool whole = p.cols * element_bytes % kMaxAccessBytes == 0;
  // Of a row that one block holds.
  const int64_t block_pieces = whole ? 4 * backward_threads(4, device.major) : 2 * kBackwardThreads;
  BackwardPlan out;
  if (row_pieces > block_pieces) {
    out.threads = out.block = kBackwardThreads;
    // 1 to 16 rows: there is a block for each slice of columns, and nothing to wait for.
    out.direct = p.rows <= 16;
    // Two rows' stages of a cluster's block take 128 KB.
    const int64_t cluster_block_pieces = int64_t{kBackwardThreads} * cluster_pieces(element_bytes);
    const bool clusters = device.major >= 9 && device.shared_bytes_block >= 160 * 1024 && whole;
    if (clusters && row_pieces <= kMaxCluster * cluster_block_pieces) {
      out.pieces = cluster_pieces(element_bytes);
      while (out.cluster * cluster_block_pieces < row_pieces) out.cluster *= 2;
    }
    return out;
  }
  const auto threads_of = [&](int pieces) { return group_of((row_pieces + pieces - 1) / pieces); };
  const auto idle = [&](int pieces) {
    return 1.0 - static_cast<double>(row_pieces) / static_cast<double>(threads_of(pieces) * pieces);
  };
  int block = kBackwardThreads;
  if (row_pieces <= (whole ? 64 : 32)) {
    // 4096x512: 64x1 8.6, 32x2 8.7. 32768x256 float32: 64x1 28.6, 32x2 29.0. 65536x128: 16x1 18.0, 8x2 19.4.
    out.pieces = 1;
  } else if (row_pieces > 1024) {
    out.pieces = 4;  // 2048x16384: 512x4 70, a cluster of two of 512x2 68.7
  } else if (whole && element_bytes >= 4 && row_pieces > 128 && row_pieces <= 384 &&
             (row_pieces & (row_pieces - 1)) != 0) {
    // 16384x1280 float32: 128x3 67.2, 160x2 73.1. 32768x768 float32: 64x3 83.1, 96x2 84.6.
    out.pieces = 3;
    block = 384;
  } else if (whole && ((row_pieces > 512 && row_pieces <= 704) || idle(3) + 0.125 < idle(2))) {
    // 16384x5120, where 320x2 is 320 threads a multiprocessor: 162; 224x3 141. 32768x768: 32x3 by 256 42.6, by 512
    // 47.5, 64x2 45.0.
    out.pieces = 3;
    if (row_pieces <= 128) block = 256;
  } else {
    // 4096x1024: 64x2 12.5, 128x1 12.9. 4096x2048: 128x2 20.0, 256x1 22.7. 4096x8192: 512x2 61.3, 256x4 67.3.
    out.pieces = 2;
  }
  // In one launch: 512x4096 10.6, with partial sums 11.9; 1024x4096 19.0 and 15.4. 512x1024 4.4 and 6.7.
  out.direct = p.rows <= (row_pieces <= 256 ? 768 : row_pieces <= 512 ? 512 : 384);
  if (out.direct) block = p.rows < 48 ? 128 : p.rows < 320 ? 256 : 512;  // 16x4096 2.5, by 512 threads 3.1
  out.threads = static_cast<int32_t>(threads_of(out.pieces));
  block = std::min(block, backward_threads(out.pieces, device.major));
  out.block = std::max(out.threads, block / out.threads * out.threads);
  return out;
}

// Whether rows of this length must begin at multiples of 16 bytes: the kernel has no variant for others.
inline bool backward_needs_aligned_rows(const NormGrads& p, int element_bytes, const DeviceFacts& device) {
  const BackwardPlan plan = plan_backward(p, element_bytes, device);
  return plan.pieces > 2 || plan.cluster > 1;
}

inline int64_t backward_workspace_bytes(const NormGrads& p, int element_bytes, const DeviceFacts& device) {
  const BackwardPlan plan = plan_backward(p, element_bytes, device);
  const int64_t acc_bytes = element_bytes == 8 ? 8 : 4;
  int64_t values = 0;
  if ((p.dweight || p.dbias) && !plan.direct)
    values += backward_grid(p, plan, element_bytes, device).partials * 2 * backward_pitch(p.cols);
  if (plan.pieces == 0 && p.dx) values += 2 * p.rows * (1 + (p.cols + kSumsChunk - 1) / kSumsChunk);
  return values * acc_bytes;
}

}  // namespace fastln
