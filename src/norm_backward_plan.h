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
  int32_t pieces = 0;         // that a thread owns; 0: rows are cut into slices, and their sums come first
  int32_t piece_bytes = 16;   // 8 for rows that are whole pieces only so
  int32_t threads = 0;        // a row's threads within a block: a power of two up to 32, else a multiple of 32
  int32_t cluster = 1;        // blocks that share a row
  int32_t block = 0;          // threads of a block, a multiple of `threads`
  int32_t blocks_per_sm = 1;  // that stay resident
  int32_t sharing = 1;        // blocks of a cluster, each at rows of its own, that add up their partial sums
  int32_t ring_kb = 64;       // of the rings of a multiprocessor, if that holds two stages; a cluster's have three
  bool direct = false;        // few rows: one launch, of which some blocks sum columns:
  int32_t column_pieces = 4;  // pieces, side by side, of a block: a power of two up to 32
  int32_t column_split = 1;   // blocks of a cluster, each at rows of its own, that share those
};

constexpr int kMaxColumnSplit = 8;
constexpr int kMaxStages = 4;  // of the ring

constexpr int kBackwardThreads = 512;  // of a block, at most

// The same, for so many pieces a thread on a GPU of that compute capability. 512 threads leave 128 registers, which
// hold up to 4 pieces before 10.0, but 2 of ragged rows or from 10.0 on. (Registers go by four warps: 448 threads would
// have no more.)
constexpr int backward_threads(int pieces, bool ragged, int major) {
  const int short_of = major < 10 && !ragged ? 5 : 3;
  return pieces < short_of ? kBackwardThreads : pieces == 3 ? 384 : 256;
}

constexpr int kSlicePieces = 2;  // of 16 bytes a thread, where rows are cut into slices
inline int64_t slice_cols(int64_t element_bytes) {
  return int64_t{kSlicePieces} * kBackwardThreads * 16 / element_bytes;
}

// Columns from one partial sum to the next, so that each begins aligned.
inline int64_t backward_pitch(int64_t cols) { return round_up(cols, 8); }

constexpr int backward_acc_bytes(int element_bytes) { return element_bytes == 8 ? 8 : 4; }

// Shared memory that the blocks of norm_backward() may ask for, where so many stay resident. The rest: its static part,
// at most, and what the hardware keeps of each block.
constexpr int64_t kStaticSharedBytes = 2048;
inline int64_t backward_shared_limit(const DeviceFacts& device, int blocks_per_sm) {
  const int64_t share = device.shared_bytes_sm / blocks_per_sm - kReservedSharedBytes;
  return std::min(device.shared_bytes_block, share) - kStaticSharedBytes;
}

// Where a block has several groups of threads, or shares a partial sum with another, the groups' sums of columns are
// added up through shared memory: columns of a group, and bytes of all groups of dweight and of dbias.
constexpr int summed_width(int threads, int pieces, int access, bool ragged) {
  return (threads * pieces + ragged) * access;
}
constexpr int64_t summed_bytes(int block, int threads, int pieces, int access, bool ragged, int acc_bytes) {
  return int64_t{2} * (block / threads) * summed_width(threads, pieces, access, ragged) * acc_bytes;
}
inline bool backward_adds_groups(const BackwardPlan& plan) { return plan.block > plan.threads || plan.sharing > 1; }

// Columns that one block adds, where the sums of long rows come first.
constexpr int64_t kSumsChunk = 16384;

// Whether a row's length is no multiple of a piece, so that rows begin anywhere.
inline bool rows_are_ragged(int64_t cols, int64_t element_bytes, int64_t piece_bytes) {
  return cols * element_bytes % piece_bytes != 0;
}

// The last rows of x or dy from whose end to the tensor's there may be less than whole 16 bytes.
inline int64_t backward_unsafe_rows(const NormGrads& p, int64_t element_bytes) {
  const int64_t stride = std::min(p.x_stride, p.dy_stride), most = kMaxAccessBytes / element_bytes - 1;
  return stride <= 0 ? p.rows : std::min(p.rows, (most + stride - 1) / stride);
}

// Whether there is a variant without sums of columns. Rows that take more registers, or a cluster, gain nothing by it.
constexpr bool backward_has_lean(int pieces, bool ragged, bool cluster) {
  return !ragged && pieces >= 1 && pieces <= 3 && !cluster;
}

// Whether blocks of a variant may be told to sum columns for few rows, whose own part then needs no sums.
constexpr bool backward_may_sum_columns(int pieces, bool ragged, bool cluster, bool sums) {
  return !cluster && !(sums && backward_has_lean(pieces, ragged, cluster));
}

// Registers of a thread of norm_backward_bundle(), at most. (131072x257: 80, of which three blocks are resident, 72 us; two
// blocks 85; 64, of which four are but which spill, 80. 4096x8193: 168 74, 128 83.)
constexpr int backward_bundle_registers(int pieces, bool wide_blocks) {
  return pieces == 1 ? (wide_blocks ? 80 : 96) : pieces == 2 ? (wide_blocks ? 120 : 128) : 168;
}

// How often its blocks pass over a bundle, a row a group each time, for one barrier of the block. (Of more pieces the loop
// alone costs a fifth: 8192x4097 72 us, with it 88.)
constexpr int backward_bundle_passes(int pieces) { return pieces == 1 ? 2 : 1; }

// How norm_backward_bundle() takes ragged rows.
struct BackwardBundles {
  int rows = 0;        // of a bundle; 0 where it cannot take them
  int threads = 0;     // of a block
  int64_t blocks = 0;  // that walk over the bundles
  int64_t buffer_bytes = 0, shared_bytes = 0;
};

inline BackwardBundles backward_bundles(const NormGrads& p, const BackwardPlan& plan, int64_t element_bytes,
                                        const DeviceFacts& device) {
  BackwardBundles out;
  const bool ragged = rows_are_ragged(p.cols, element_bytes, plan.piece_bytes);
  const bool side_by_side = p.x_stride == p.cols && p.dy_stride == p.cols;
  if (!device.has_hopper_code || element_bytes != 2 || !ragged || !p.dx || !side_by_side) return out;
  if (p.cols < kLeastBundleCols) return out;
  // A warp with three pieces gains little: 65536x769 97 us, so 94; with float32 parameters it would spill.
  if (plan.direct || plan.cluster > 1 || plan.pieces < 1 || (plan.pieces == 3 && plan.threads <= kWarp)) return out;
  const int groups =
      plan.threads <= kWarp ? kBundleWarps * kWarp / plan.threads : std::max(kBackwardThreads / plan.threads, 1);
  out.threads = groups * plan.threads;
  const int passes = backward_bundle_passes(plan.pieces);
  // A bundle's last row is read as far as the columns of its threads go.
  const int64_t read_cols = int64_t{8} * plan.pieces * plan.threads + 2 * std::min(plan.threads, kWarp) + 2;
  out.buffer_bytes = round_up(((passes * groups - 1) * p.cols + read_cols) * 2 + 2 * kBundleAlignment, 128);
  out.shared_bytes =
      std::max(6 * out.buffer_bytes, summed_bytes(out.threads, plan.threads, plan.pieces, 8, true, sizeof(float)));
  const int registers = backward_bundle_registers(plan.pieces, wide_blocks_fit(device));
  if (out.shared_bytes > device.shared_bytes_block - kStaticSharedBytes) return out;
  const int64_t resident = resident_blocks(registers, out.threads, out.shared_bytes + kStaticSharedBytes, device);
  // Of several pieces it pays once each block has some bundles: 4096x1025 17.4 us, norm_backward() 16.6; 1536x3001 19.1,
  // 20.0; 32768x1025 69, 71; 8192x4097 71, 78.
  const int64_t walkers = resident * device.sms, rows = passes * groups;
  if (resident * out.threads < kLeastBundleThreads || (plan.pieces > 1 && p.rows < 5 * walkers * rows)) return out;
  out.rows = static_cast<int>(rows);
  out.blocks = std::min(walkers, (p.rows + rows - 1) / rows);
  return out;
}

struct BackwardGrid {
  int64_t blocks;    // that walk over the rows of a slice, side by side
  int64_t slices;    // that a row is cut into
  int64_t partials;  // partial sums of dweight and dbias: one a block, or a cluster of blocks
};

inline BackwardGrid backward_grid(const NormGrads& p, const BackwardPlan& plan, int64_t element_bytes,
                                  const DeviceFacts& device) {
  if (const BackwardBundles bundles = backward_bundles(p, plan, element_bytes, device); bundles.rows > 0)
    return {bundles.blocks, 1, bundles.blocks};
  const int64_t slices = plan.pieces == 0 ? (p.cols + slice_cols(element_bytes) - 1) / slice_cols(element_bytes) : 1;
  const int64_t groups = plan.block / plan.threads;
  const int64_t needed = (p.rows + groups - 1) / groups;
  const int64_t resident = std::max<int64_t>(int64_t{device.sms} * plan.blocks_per_sm / plan.cluster / slices, 1);
  const int64_t most = std::max(resident / plan.sharing, int64_t{1}) * plan.sharing;
  const int64_t walkers = plan.direct ? needed : std::min(round_up(needed, plan.sharing), most);
  return {walkers * plan.cluster, slices, walkers / plan.sharing};
}

// Whether the kernel of such a variant can add up the partial sums of several blocks, where each has one group of
// threads.
constexpr bool backward_may_share(int element_bytes, int pieces, bool ragged, bool cluster, int piece_bytes) {
  return element_bytes == 2 && !ragged && !cluster && piece_bytes == 16 && (pieces == 2 || pieces == 4);
}

// Whether rows are few enough for one launch, in which x and dy come twice, the second time from L2. With clusters:
//   us, one launch and two   512 rows       1024 rows      1536 rows      2048 rows      3072 rows
//   512 columns              3.8 and 6.2    4.6 and 6.5    5.4 and 7.3    6.1 and 7.7    7.5 and 8.2
//   1024                     4.5 and 6.8    5.9 and 8.2    7.5 and 8.7    8.7 and 8.9    11.5 and 10.4
//   2048                     6.0 and 8.8    8.6 and 9.6    11.3 and 11.2  14.2 and 12.5
//   2560 (160 threads)       7.6 and 10.2   12.1 and 12.1  16.4 and 14.0
//   4096                     8.2 and 11.5   13.6 and 14.7  18.9 and 18.0
//   5120                     9.9 and 15.1   17.3 and 19.9
//   8192                     17.5 and 15.0 (256 rows: 10.0 and 11.6)
//   float32: 512             4.2 and 5.4    5.1 and 6.6    6.3 and 7.0    7.3 and 7.4    9.4 and 8.9
//   float32: 2048            7.2 and 8.9    13.7 and 11.5
//   dx alone: 1024           3.3 and 3.5    4.3 and 4.1    5.9 and 5.3
//   dx alone: 5120           6.7 and 7.5 (384 rows: 5.7 and 6.8)
//   dweight and dbias: 1024  5.1 and 6.0    5.7 and 7.3    6.9 and 7.2    8.0 and 7.4
inline bool backward_is_direct(int64_t rows, int64_t row_pieces, bool halves, bool ragged, bool dx, bool sums,
                               bool clusters) {
  if (!clusters) return rows <= (row_pieces <= 256 ? 768 : row_pieces <= 512 ? 512 : 384);
  const int64_t pieces = rows * row_pieces;
  if (row_pieces > 896) return rows <= (sums ? 320 : 128);
  if (!sums) return pieces <= (row_pieces <= 256 ? 131072 : 196608);
  if (!dx) return rows <= 1536 && pieces <= 131072;
  if (ragged) return rows <= (halves ? 2048 : 1024) && pieces <= (halves && row_pieces > 256 ? 262144 : 196608);
  if (!halves) return rows <= 3072 && pieces <= (row_pieces <= 128 ? 229376 : row_pieces <= 256 ? 294912 : 393216);
  if (rows > (row_pieces < 32 ? 2560 : 3072)) return false;
  return pieces <= (row_pieces <= 128 ? 294912 : row_pieces <= 256 ? 327680 : row_pieces <= 352 ? 262144 : 655360);
}

// Of one launch: plans the blocks that sum columns, which read x and dy as the others do. What counts is that they are
// about as many as multiprocessors and leave the others room. Returns the threads of a block, where a row takes no more.
inline int plan_direct(BackwardPlan& out, int64_t rows, int64_t row_pieces, bool halves, bool ragged,
                       const DeviceFacts& device, int max_cluster) {
  // Whether clusters pay: 256x128 2.7, without 3.2; but 256x1024 3.3, in clusters of 2 3.6.
  const bool many = rows >= (row_pieces < 64 ? 192 : 320);
  // 64x256 1.7, by 256 threads 1.8, but 64x1024 2.5 and 2.4; 512x512 3.6 and 3.8; 1024x769 7.3 and 7.9.
  const bool small = rows < (row_pieces < 64 ? 96 : 48) || ragged || (many && rows <= 640 && row_pieces <= 128);
  const int block = small ? 128 : 256;
  if (out.threads >= 384) {
    // One block a multiprocessor: 16x8192 3.2, of 4 pieces 6.9; 16x16384 4.5, of 16 pieces 6.6, of 4 10.9.
    out.column_pieces = row_pieces <= 1024 || ragged ? 16 : 32;
    return block;
  }
  // 256x4096 4.6, of 8 pieces 5.2; float32 256x2048 4.5 and 4.4. 512x4096 7.3, of 8 pieces in clusters of 2 7.9, but
  // 1024x1024 5.8, of 8 pieces in clusters of 8 5.4. 256x6144 9.3, of 8 pieces 7.8.
  const bool narrow = many && !small ? row_pieces < 64 || (halves && row_pieces >= 512) : halves || row_pieces < 512;
  out.column_pieces = narrow && row_pieces <= 640 ? 4 : 8;
  // 1024x1024 5.9 by clusters of 8, by 4 6.2, by 2 6.6 or more; 2048x768 6.9 by 8, by 4 8.8. float32 512x2048 6.5 without,
  // by 2 7.1.
  const int64_t slices = (row_pieces + out.column_pieces - 1) / out.column_pieces;
  const int64_t room = halves ? device.sms : device.sms * 3 / 4;
  while (many && out.column_split < std::min(kMaxColumnSplit, max_cluster) && slices * out.column_split * 2 <= room) {
    out.column_split *= 2;
  }
  return block;
}

// A row's threads and pieces; then how many rows a block takes at once, and how many blocks stay. All measured on one
// H200 with float16 where nothing else is said, in us; "512x2" is 512 threads a row of 2 pieces each.
//
// Rows, and so threads, of other shapes share partial sums, of which the fewest are best: one block of 512 threads a
// multiprocessor beats two of 256 (4096x4096 35.2 and 36.7), and leaves add_partials() half as much.
//
// More rows on their way than 64 KB are mostly no gain and may cost a seventh: 65536x1024 101 with 64 KB, 115 with 128;
// 4096x4096 float32 54.7 and 57.6; 8192x7168 98.8 and 106.
//
// Threads, pieces and cluster follow from the columns, the element size and the device alone, never from the addresses,
// the rows or what is asked for: those must not change a bit of dx. `sums`: dweight or dbias is asked for.
inline BackwardPlan plan_backward(int64_t rows, int64_t cols, int element_bytes, bool dx, bool sums,
                                  const DeviceFacts& device, int max_cluster) {
  // Half pieces, of up to 128 a row: 524288x100 99 us, ragged 204; 131072x260 76, 119; 65536x500 62, 68; but 65536x516 81,
  // 74; 32768x1500 108, 105; 8192x4100 87, 83.
  const bool in_halves = rows_are_half_pieces(cols, element_bytes) && cols <= 512;
  const bool ragged = !in_halves && rows_are_ragged(cols, element_bytes, kMaxAccessBytes), halves = element_bytes == 2;
  const int64_t row_pieces = std::max<int64_t>(cols * element_bytes / kMaxAccessBytes, 1);
  const auto max_threads = [&](int pieces) { return int64_t{backward_threads(pieces, ragged, device.major)}; };
  const int most_pieces = ragged ? 3 : 4;
  BackwardPlan out;
  if (row_pieces > most_pieces * max_threads(most_pieces)) {
    out.threads = out.block = kBackwardThreads;
    // 1 to 16 rows: there is a block for each slice of columns, and nothing to wait for. 1x32768 5.6, with slices of 4
    // pieces 7.2.
    out.direct = rows <= 16;
    out.column_pieces = 16;
    // 2048x20480: two of 448x3 87, three of 448x2 101, four of 512x2 130. 1024x65536: 512x2 135, 512x4 191 (it spills).
    const bool two = halves && !ragged && row_pieces > 2 * 3 * max_threads(3);
    const int pieces = two ? 2 : ragged || halves ? 3 : 4;
    // float32: 2048x16384 three of 352x4 103, two of 512x4 114; 1024x20480 four of 320x4 69, three of 448x4 71.
    const bool small_blocks = pieces == 4 && row_pieces > 3072 && row_pieces <= 4 * 4 * 352;
    const int64_t block_pieces = pieces * (small_blocks ? std::min<int64_t>(352, max_threads(4)) : max_threads(pieces));
    if (row_pieces <= max_cluster * block_pieces) {
      out.pieces = pieces;
      out.cluster = static_cast<int32_t>((row_pieces + block_pieces - 1) / block_pieces);
      out.threads = out.block =
          static_cast<int32_t>(round_up((row_pieces + out.cluster * pieces - 1) / (out.cluster * pieces), kWarp));
    }
    return out;
  }
  const int64_t own_pieces = in_halves ? cols / 4 : row_pieces;
  const auto threads_of = [&](int pieces) {
    return group_of(std::max<int64_t>((own_pieces + pieces - 1) / pieces, !ragged ? 1 : pieces > 1 ? kWarp : 4));
  };
  const auto idle = [&](int pieces) {
    return 1.0 - static_cast<double>(own_pieces) / static_cast<double>(threads_of(pieces) * pieces);
  };
  const bool power_of_two = (row_pieces & (row_pieces - 1)) == 0;
  int block = kBackwardThreads;
  if (in_halves) {
    // 131072x180: 16x4 48, 32x2 62.
    out.piece_bytes = 8;
    out.pieces = idle(3) + 0.125 < idle(4) ? 3 : 4;
  } else if (row_pieces <= 32) {
    // 32768x256: 32x1 18.2, 16x2 17.8. 65536x128: 16x1 18.0, 8x2 19.4.
    out.pieces = 1;
  } else if (row_pieces <= 64) {
    // 4096x512: 32x2 8.4, 64x1 8.9. float32: 32768x256 32x2 29.2, 64x1 30.4; 65536x257 32x2 by 384 57, by 512 61.
    out.pieces = 2;
    if (ragged) block = 384;
  } else if (ragged) {
    // 65536x769: 32x3 101, 64x2 129. 8192x4097: 256x2 81, 192x3 87. 4096x8193: 352x3 84, 512x2 87.
    // float32: 4096x4097 352x3 59, 512x2 61; 32768x769 96x2 84, 64x3 87.
    out.pieces = row_pieces <= 96 || row_pieces > (halves ? 1024 : 768) ? 3 : 2;
  } else if (row_pieces > 1024) {
    out.pieces = 4;  // 2048x16384: 512x4 70, a cluster of two of 512x2 69
  } else if (row_pieces > 704 && row_pieces <= 896) {
    // 8192x7168: 224x4 99, 448x2 109. 8192x6144: 192x4 85, 384x2 89.
    out.pieces = 4;
  } else if (row_pieces > 512 && row_pieces <= 704) {
    // 16384x5120: 224x3 138, 160x4 144, 320x2, which is 320 threads a multiprocessor, 165.
    out.pieces = 3;
  } else if (row_pieces > 352 && row_pieces <= 384) {
    // 16384x3072: 128x3 by 384 80, by 512 89, 192x2 87.
    out.pieces = 3;
    block = 384;
  } else if (!halves && row_pieces > 128 && row_pieces <= 352 && !power_of_two) {
    // float32: 16384x1280 128x3 by 384 64.9, 160x2 65.2; 32768x768 96x2 76.4, 64x3 80.5.
    out.pieces = row_pieces == 192 ? 2 : 3;
    if (out.pieces == 3) block = 384;
  } else if (idle(3) + 0.125 < idle(2)) {
    // 32768x768: 32x3 by 384 42.3, by 512 46.4, 64x2 47.5. 65536x640: 67.8, 68.2.
    out.pieces = 3;
    if (row_pieces <= 128) block = 384;
  } else {
    // 4096x1024: 64x2 12.2, 128x1 13.6. 4096x2048: 128x2 20.0, 256x1 22.7. 4096x8192: 512x2 61.3, 256x4 67.3.
    out.pieces = 2;
    // 32768x1152: 71.2 with 128 KB, 73.5 with 64. 32768x1600: 90.7 and 93.1.
    if (halves && !power_of_two) out.ring_kb = 128;
  }
  // The limits are of 132 multiprocessors.
  out.direct = backward_is_direct(rows * 132 / device.sms, row_pieces, halves, ragged, dx, sums, max_cluster > 1);
  out.threads = static_cast<int32_t>(threads_of(out.pieces));
  if (out.direct) {
    block = plan_direct(out, rows, row_pieces, halves, ragged, device, max_cluster);
    if (in_halves) out.column_pieces *= 2;  // as many columns
  }
  block = std::min(block, static_cast<int>(max_threads(out.pieces)));
  out.block = std::max(out.threads, block / out.threads * out.threads);
  // Without sums of columns there are registers for twice the threads, and no partial sums to add. 65536x128: 15.2, one
  // block 16.1; but 8192x8192 110 and 101.
  if (!sums && !out.direct && !ragged && out.pieces == 1) out.blocks_per_sm = 2;
  // Two blocks add up their partial sums: 4096x8192 58.5, not 61.4; 8192x8192 106.1, not 108.5; 4096x12288 82.4, not
  // 87.6; 2048x16384 63.0, not 69.3. With fewer columns it costs 1, and float32 and ragged rows gain nothing. Clusters
  // of 4 or 8 leave 12 of 132 multiprocessors idle (8192x8192 116.5).
  const bool may_share = backward_may_share(element_bytes, out.pieces, ragged, out.cluster > 1, out.piece_bytes) &&
                         out.block == out.threads;
  if (sums && !out.direct && may_share && row_pieces >= 1024 && max_cluster > 1) out.sharing = 2;
  // GPUs of 99 KB of shared memory a block have no room for the sums of two groups of 224 threads with 4 pieces.
  const auto sums_fit = [&] {
    return summed_bytes(out.block, out.threads, out.pieces, out.piece_bytes / element_bytes, ragged,
                        backward_acc_bytes(element_bytes)) <= backward_shared_limit(device, out.blocks_per_sm);
  };
  if (sums && !out.direct) {
    while (out.block > out.threads && !sums_fit()) out.block -= out.threads;
    if (!sums_fit()) out.sharing = 1;
  }
  return out;
}

// Of the workspace, in partial sums of dweight and dbias; and, for dx where rows are cut into slices, in the sums of each chunk of a row
// and the averages of each row.
inline int64_t backward_workspace_bytes(const NormGrads& p, const BackwardPlan& plan, int element_bytes,
                                        const DeviceFacts& device) {
  int64_t values = 0;
  if ((p.dweight || p.dbias) && !plan.direct)
    values += backward_grid(p, plan, element_bytes, device).partials * 2 * backward_pitch(p.cols);
  if (plan.pieces == 0 && p.dx) values += 2 * p.rows * (1 + (p.cols + kSumsChunk - 1) / kSumsChunk);
  return values * backward_acc_bytes(element_bytes);
}

}  // namespace fastln
