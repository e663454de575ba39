// What the backward keeps in dynamic shared memory, in bytes: numbers only, for the kernels and for their host side.
#pragma once

#include <algorithm>
#include <cstdint>

#include "aligned.h"
#include "device.h"
#include "norm_backward_plan.h"

namespace fastln {

// Bytes of the part that `lanes` threads have of a stage of the ring, of ragged rows: a granule for each of their
// pieces, and up to two that follow. For a warp that is a multiple of 128 bytes. (16 bytes off, 2048x16384 float16 took
// 77 us on an H200, not 70.)
constexpr int ragged_part_bytes(int lanes, int pieces) {
  return (lanes * pieces + (lanes < kWarp ? 2 : 8)) * kMaxAccessBytes;
}

// Bytes of x, and as many of dy, in a stage of the ring. `sharers` threads share a warp, or a part of one, of a row.
constexpr int ring_tensor_bytes(int block, int sharers, int pieces, bool ragged, int piece_bytes) {
  return ragged ? block / sharers * ragged_part_bytes(sharers, pieces) : block * pieces * piece_bytes;
}

// Bytes of a stage, a multiple of 128: x and dy, then mean and rstd for each `sharers` threads.
constexpr int ring_stage_bytes(int block, int sharers, int pieces, bool ragged, int piece_bytes, int acc_bytes) {
  const int tensor_bytes = ring_tensor_bytes(block, sharers, pieces, ragged, piece_bytes);
  return (2 * tensor_bytes + block / sharers * 2 * acc_bytes + 127) / 128 * 128;
}

// Bytes of shared memory that sum_columns() needs: each thread's sums, and the block's.
constexpr int sum_columns_bytes(int block, int column_pieces, int access, int acc_bytes) {
  return 2 * access * (block + column_pieces) * acc_bytes;
}

struct BackwardShared {
  int stages;     // of the ring, 1 to kMaxStages; a cluster's blocks hold two rows at once
  int64_t bytes;  // of a block of norm_backward()
};

// `partials`: partial sums of dweight and dbias are asked for.
inline BackwardShared backward_shared(const BackwardPlan& plan, int64_t cols, int element_bytes, bool partials,
                                      const DeviceFacts& device) {
  const int access = plan.piece_bytes / element_bytes, acc_bytes = backward_acc_bytes(element_bytes);
  const int pieces = plan.pieces == 0 ? kSlicePieces : plan.pieces;
  const bool ragged = rows_are_ragged(cols, element_bytes, plan.piece_bytes);
  const int64_t stage =
      ring_stage_bytes(plan.block, std::min(plan.threads, kWarp), pieces, ragged, plan.piece_bytes, acc_bytes);
  const int64_t least = plan.cluster > 1 ? 2 : 1;
  const int64_t wanted = plan.direct        ? least
                         : plan.cluster > 1 ? least + 1
                                            : std::max<int64_t>(plan.ring_kb * 1024 / plan.blocks_per_sm / stage, 2);
  const int64_t fit = backward_shared_limit(device, plan.blocks_per_sm) / stage;
  const int stages = static_cast<int>(std::clamp<int64_t>(std::min(fit, wanted), least, kMaxStages));
  const int64_t columns = plan.direct ? sum_columns_bytes(plan.block, plan.column_pieces, access, acc_bytes) : 0;
  const int64_t sums = partials && backward_adds_groups(plan)
                           ? summed_bytes(plan.block, plan.threads, pieces, access, ragged, acc_bytes)
                           : 0;
  return {stages, std::max({stages * stage, columns, sums})};
}

}  // namespace fastln
