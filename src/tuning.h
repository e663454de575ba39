// Which kernel variant a row gets. Numbers only: the launchers read them, plan() below is the one place
// that chooses, and it looks at the columns, the element size and the GPU, never at the
// number of rows, so that a row's bits are the same in every batch.
#pragma once

#include <algorithm>
#include <cstdint>

#include "device.h"

namespace fastln {

struct Plan {
  int32_t pieces = 0;   // of 16 bytes that a thread holds; 0: the row is cut into chunks (norm_split.cuh)
  int32_t threads = 0;  // a row's threads within a block: a power of two up to 32 (several rows a block),
                        // else a multiple of 32 (a block a row)
  int32_t cluster = 1;  // blocks that share a row
};

constexpr int kPortableCluster = 8;  // blocks that any device with clusters takes
constexpr int kMaxCluster = 16;      // and some

constexpr int kSmallGroupBlock = 64;  // threads of a block that holds several rows: 0.1 us better than 128

// A long block has more than 512 threads of 4 pieces. Elements of up to 4 bytes can be held so where 40 registers are
// enough (kWideBlocksFit and kFourFit40 in norm_forward.cuh): on GPUs of compute capability 9.x.
constexpr int kLongBlock = 768;  // threads, at most
constexpr bool is_long_block(const Plan& plan) { return plan.pieces == 4 && plan.threads > 512; }
constexpr bool holds_long_blocks(int element_bytes, int max_cluster, bool wide_blocks) {
  return wide_blocks && max_cluster > 1 && element_bytes <= 4;
}

// Whether a row has as many whole pieces as its threads within a block hold, so that no load is idle.
constexpr bool fills_threads(const Plan& plan, int64_t cols, int element_bytes) {
  return cols * element_bytes / 16 == int64_t{plan.pieces} * plan.threads;
}

// Whether rows of 16-bit elements are whole pieces of 8 bytes, but not of 16.
constexpr bool rows_are_half_pieces(int64_t cols, int64_t element_bytes) { return element_bytes == 2 && cols % 8 == 4; }

// By the number of 16-byte pieces in a row: the first of `pieces` that leaves at most an eighth of the loads
// idle, or else the one that leaves the fewest; of two that leave the same number, the one with more pieces.
//
// Rows that a cluster shares (norm_cluster.cuh) spread over up to `cluster` blocks before a block gets more than
// max_threads of theirs, on GPUs that have clusters of so many. `min_row`, `max_row`: pieces. `lengths`: only such
// rows. `full_bytes`: only whole ones of elements of so many bytes that leave no load idle.
//
// Measured on an H200, float16, as multiples of a copy in the same run (bench/tune.py, threads x pieces):
enum class Lengths { kAny, kWhole, kWholeOrHalves, kHalves };  // of whole pieces, of half pieces
struct Tuning {
  int64_t max_row;
  int max_threads;
  int pieces[2];
  int cluster = 1;
  Lengths lengths = Lengths::kAny;
  int full_bytes = 0;
  int64_t min_row = 0;
};
constexpr Tuning kTuning[] = {
    // In norm_walk.cuh 524288x100: 8x2 1.24, 4x3 1.47. 524288x84: 1.32, 1.49. (In norm_forward.cuh 1.40, 1.47; 1.60, 1.49.)
    {.max_row = 12, .max_threads = 512, .pieces = {2}, .lengths = Lengths::kHalves, .min_row = 9},
    // 32768x256: 16x2 1.02, 8x4 1.06, 32x1 1.29. 131072x512: 32x2 0.98, 16x4 0.98; 16x512: 32x2 1.22, 16x4 1.34.
    {.max_row = 64, .max_threads = 512, .pieces = {2, 3}},
    // 4096x1024: 32x4 1.11, 64x2 1.14, 16x8 1.27. 65536x1024: 32x4 0.99, 64x2 0.98. 32768x768: 32x3 0.98, 32x4 1.03,
    // 64x2 1.15. 65536x640: 32x3 1.01, 32x4 1.06, 64x2 1.31. (4096x1025: 64x2 1.59, 32x4 1.75.)
    // Half pieces: 65536x1004 32x4 68.2 us, 64x2 77.5; 32768x1028 37.5, 40.9.
    {.max_row = 128, .max_threads = 512, .pieces = {4, 3}, .lengths = Lengths::kWholeOrHalves},
    // bfloat16: 32768x1152 32x5 1.01, 64x3 1.10; 32768x1280 1.00, 1.05. float16: 1.00, 1.03; 1.00, 1.00.
    {.max_row = 160, .max_threads = 512, .pieces = {5}, .lengths = Lengths::kWhole},
    // 32768x1152: 64x3 1.03, 64x4 1.21. 32768x1536: 64x3 0.98, 96x2 0.99. float32 32768x768: 64x3 0.97, 96x2 0.98.
    {.max_row = 192, .max_threads = 512, .pieces = {3, 2}},
    // bfloat16 4096x2048: 64x4 1.02, 128x2 1.07; 8192x2048 0.98, 1.05; 32768x2048 0.96, 0.99; but 16x2048 1.30, 1.26.
    {.max_row = 256, .max_threads = 512, .pieces = {4}, .full_bytes = 2},
    // 32768x1600: 64x4 1.00, 96x3 1.05, 128x2 1.10.
    {.max_row = 256, .max_threads = 512, .pieces = {2, 4}},
    // float32: 16384x1280 64x5 0.96, 96x4 0.99; 8192x2560 128x5 0.97, 160x4 1.01; 4096x5120 256x5 1.00, 320x4 1.01.
    // (float16 gains nothing: 16384x2560 64x5 0.99, 96x4 0.99; and loses with few rows: 16x5120 2.2 us and 2.1.)
    {.max_row = 2560, .max_threads = 512, .pieces = {5}, .full_bytes = 4},
    // 8192x8192: 256x4 1.06, 128x8 1.07, 512x2 1.34. 16384x5120: 160x4 1.03, 320x2 1.22, 96x8 1.06.
    // 4096x4096: 128x4 1.13, 256x2 1.16 (and at 16 rows 256x2 is 7 % ahead). 2048x16384: 512x4 1.14, 256x8 1.16.
    {.max_row = 2048, .max_threads = 512, .pieces = {4, 3}},
    // 2048x20480: 640x4 1.06, 512x5 1.07, 320x8 1.10. float32 2048x12288: 768x4 1.03, 640x5 1.03, 384x8 1.07.
    {.max_row = 3072, .max_threads = kLongBlock, .pieces = {4}, .lengths = Lengths::kWhole},
    // 2048x32768: 512x8 1.11, 1024x4 1.28, eight blocks of 64x8 1.11.
    {.max_row = 4096, .max_threads = 512, .pieces = {8}},
    // 512x65536: eight blocks of 128x8 1.15, 1024x8 1.42. 512x131072: eight of 256x8 1.12, four of 512x8 1.15.
    // float32 1024x20480: eight of 96x8 1.11, 640x8 1.28.
    {.max_row = 8 * 4096, .max_threads = 128, .pieces = {8}, .cluster = kPortableCluster, .lengths = Lengths::kWhole},
    // float32 128x262144: sixteen of 512x8 1.33, in chunks 1.65 at twice the columns.
    {.max_row = 16 * 4096, .max_threads = 512, .pieces = {8}, .cluster = kMaxCluster, .lengths = Lengths::kWhole},
    // Without clusters.
    {.max_row = 8192, .max_threads = 1024, .pieces = {8}},
};

// Threads that a block of rows which are not whole may have, by the registers that those take.
constexpr int shifted_max_threads(int pieces) { return pieces == 4 ? kLongBlock : 512; }

inline int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Threads that cover `wanted`: a power of two within a warp, whole warps beyond.
inline int64_t group_of(int64_t wanted) {
  if (wanted > 32) return round_up(wanted, 32);
  int64_t threads = 1;
  while (threads < wanted) threads *= 2;
  return threads;
}

// What kWideBlocksFit (norm_forward.cuh) says of the code that runs there.
inline bool wide_blocks_fit(const DeviceFacts& device) { return device.major < 10; }

// max_cluster: blocks of a cluster that the GPU takes, 1 without clusters; see forward_max_cluster(). wide_blocks:
// wide_blocks_fit().
inline Plan plan(int64_t cols, int element_bytes, int max_cluster, bool wide_blocks) {
  const bool shifted = cols * element_bytes % 16 != 0;
  const int64_t row_pieces = cols * element_bytes / 16;
  const int64_t tail = cols * element_bytes % 16 / element_bytes;  // elements behind the last piece, a thread each
  for (const Tuning& row : kTuning) {
    const bool is_whole = !shifted && row.lengths != Lengths::kHalves;
    const bool has_halves = rows_are_half_pieces(cols, element_bytes) && row.lengths != Lengths::kWhole;
    const bool suits = row.lengths == Lengths::kAny || is_whole || has_halves;
    if (row_pieces < row.min_row || row_pieces > row.max_row || !suits || row.cluster > max_cluster) continue;
    if (row.max_threads == kLongBlock && !holds_long_blocks(element_bytes, max_cluster, wide_blocks)) continue;
    const int max_threads = wide_blocks ? row.max_threads : std::min(row.max_threads, 512);
    const auto threads_of = [&](int64_t wanted) { return group_of(std::max({wanted, tail, int64_t{1}})); };
    const auto idle = [&](int pieces) {
      const int64_t threads = threads_of((row_pieces + pieces - 1) / pieces);
      return 1.0 - static_cast<double>(row_pieces) / static_cast<double>(threads * pieces);
    };
    Plan out;
    out.pieces = row.pieces[0];
    if (row.full_bytes != 0 && (shifted || element_bytes != row.full_bytes || idle(out.pieces) > 0)) continue;
    if (const int other = row.pieces[1]; other != 0) {
      const double gain = idle(out.pieces) - idle(other);
      if (idle(out.pieces) > 0.125 && (gain > 0 || (gain == 0 && other > out.pieces))) out.pieces = other;
    }
    const int64_t wanted = (row_pieces + out.pieces - 1) / out.pieces;
    if (row.cluster > 1) {
      while (out.cluster < row.cluster && wanted > int64_t{out.cluster} * max_threads) out.cluster *= 2;
      out.threads = static_cast<int32_t>(round_up((wanted + out.cluster - 1) / out.cluster, 32));
    } else {
      if (wanted > max_threads) break;
      out.threads = static_cast<int32_t>(threads_of(wanted));
    }
    if (shifted && out.threads > shifted_max_threads(out.pieces)) break;
    return out;
  }
  return Plan{};
}

// Blocks that the registers of a multiprocessor hold at once. A warp has its own from one of four parts of them. (Of 160
// threads of 80 registers that is four and not five, of 224 of 96 two and not three: with a fifth block that had to wait for
// its place 8192x3201 took 46 us, not 33.)
constexpr int resident_blocks(int registers, int threads) {
  const int warps = 4 * (kRegistersPerSm / 4 / (registers * kWarp));
  return warps / ((threads + kWarp - 1) / kWarp);
}
// Blocks that its registers and its shared memory hold, at so many bytes a block with what is static.
inline int64_t resident_blocks(int registers, int threads, int64_t shared_bytes, const DeviceFacts& device) {
  return std::min<int64_t>(device.shared_bytes_sm / (shared_bytes + kReservedSharedBytes),
                           resident_blocks(registers, threads));
}

// Registers of a thread of norm_walk(), at most. With weight and bias unpacked once, in 16 more, fewer rows stay
// resident: 131072x260 41.4 us, packed 39.6.
constexpr int walk_registers(int pieces) { return 48 + 16 * pieces; }

// How many rows a group of norm_walk() takes: as many as leave no block without a place, or a half, a third... of that
// where it is more than 32. 1, which leaves them to norm_forward(), where too few would share what is saved (8192x300,
// 1.55 times as many as are resident: two a group 5.3 us, norm_forward 6.5), and where small groups of 4 pieces would
// have more bytes on their way than memory takes well (32768x1028 42.0, norm_forward 37.3; 16384x2500 56.4, 46.2; but of
// 128 threads 4096x4100 19.2, 21.4).
inline int64_t rows_to_walk(int64_t rows, int pieces, int threads, int sms) {
  if (pieces == 4 && threads < 128) return 1;
  const int block = std::max(threads, kSmallGroupBlock);
  const int64_t resident = int64_t{sms} * resident_blocks(walk_registers(pieces), block) * (block / threads);
  if (2 * rows <= 3 * resident || resident == 0) return 1;
  const int64_t waves = (rows + 32 * resident - 1) / (32 * resident);
  return (rows + waves * resident - 1) / (waves * resident);
}

// Rows of 16-bit elements as norm_bundle() takes them.
constexpr int kBundleWarps = 8;       // of a block whose groups are warps or parts of one
constexpr int kBundleAlignment = 32;  // bytes, of its copies: a sector
// Threads of a multiprocessor, at least: the fewest that paid on an H200 (backward, 8192x4301 104 us, before 115). GPUs of
// 100 KB of shared memory have room for fewer of most rows.
constexpr int kLeastBundleThreads = 288;

// Registers of a thread of norm_bundle(), at most. (Four pieces in 80, with weight and bias fetched for each row: 4096x4097
// 21.9 us, in 96 20.2; 8192x3001 29.6, 27.9; but 2048x12289, of which two rows are resident in 80, 31.8, 35.6. Two pieces
// with weight and bias unpacked once, in 72: 131072x257 39.0, in 64 37.5. From compute capability 10.0 on, what the
// compiler needs without spills.)
constexpr int bundle_registers(int pieces, bool wide_blocks) {
  if (!wide_blocks) return pieces == 2 ? 80 : pieces == 3 ? 96 : 128;
  return pieces == 2 ? 64 : pieces == 3 ? 80 : 96;
}

struct Bundles {
  int rows = 0;      // of a bundle; 0 where norm_bundle() cannot take them
  int threads = 0;   // of a block
  int resident = 0;  // blocks of a multiprocessor
  int out_buffers = 2;
  int64_t buffer_bytes = 0;

  constexpr int64_t shared_bytes() const { return (2 + out_buffers) * buffer_bytes; }
};

// Columns at least, so that of all bundles only the last may end in the tensor's last piece, behind which no copy reads.
constexpr int kLeastBundleCols = 8;

// Rows that overlap (expanded ones, windows of a longer row) are not for it: many of those may end in that piece.
inline Bundles bundles_of(const Plan& plan, int64_t cols, int64_t x_stride, const DeviceFacts& device) {
  Bundles out;
  if (!device.has_hopper_code || plan.pieces < 2 || plan.pieces > 4 || plan.cluster > 1) return out;
  if (cols < kLeastBundleCols || x_stride < cols) return out;
  const bool side_by_side = x_stride == cols;
  if (plan.threads <= kWarp) {
    if (!side_by_side || plan.pieces > 3) return out;
    out.threads = kBundleWarps * kWarp;
    out.rows = out.threads / plan.threads;
  } else {
    // Up to 6 KB two rows share a block (32768x1025: 37.0 us, one 42.6; 8192x3001 28.8, 29.6; but 4096x4097 22.6, 21.9).
    out.rows = side_by_side && plan.pieces * plan.threads <= 384 ? 2 : 1;
    out.threads = out.rows * plan.threads;
    out.out_buffers = out.rows;
  }
  // Before and behind a bundle, what makes its sectors whole.
  out.buffer_bytes = round_up(out.rows * cols * 2 + 2 * kBundleAlignment, 128);
  constexpr int64_t kStaticBytes = 512;  // at most
  const int64_t bytes = out.shared_bytes() + kStaticBytes;
  if (bytes > device.shared_bytes_block) return Bundles{};
  const int registers = bundle_registers(plan.pieces, wide_blocks_fit(device));
  out.resident = static_cast<int>(resident_blocks(registers, out.threads, bytes, device));
  return out.resident * out.threads >= kLeastBundleThreads ? out : Bundles{};
}

// Whether norm_bundle() takes so many rows: where norm_forward() shifts pieces, from about half as many as stay resident
// (2048x769, 0.65 times those, 4.5 us, norm_forward 4.8; but 4096x257, 0.48 times, 4.0, 4.0). Of four pieces, and where
// norm_walk() takes fewer, from twice as many (1536x4097, 2.3 times, 10.7, 11.4; 512x8193, 1.9 times, 8.4, 8.3;
// 24000x140, 1.9 times, 6.4, walking 6.5; 9500x300, 1.5 times, 6.3, 5.6).
inline bool takes_bundles(const Bundles& bundles, const Plan& plan, int64_t rows, bool pairs, int sms) {
  const int64_t resident = int64_t{sms} * bundles.resident * bundles.rows;
  return bundles.rows > 0 && (pairs || plan.pieces == 4 ? rows > 2 * resident : 10 * rows > 6 * resident);
}

// When weight and bias are fetched, of rows that norm_forward takes. It changes no bit.
enum class Fetch {
  kEarly,  // before the reductions, which hide their latency
  kTight,  // likewise, in as few registers as leave room for one more block
  kHalf,   // those of the first two of a thread's four pieces before, of each other one when one of these is written
  kOne,    // likewise those of one piece
  kLate,   // after the reductions
};

// Of how many of a thread's pieces they are fetched before the reductions.
constexpr int pieces_ahead(Fetch fetch, int pieces) {
  switch (fetch) {
    case Fetch::kLate: return 0;
    case Fetch::kOne: return 1;
    case Fetch::kHalf: return 2;
    default: return pieces;
  }
}

constexpr bool may_fetch_two_late(int element_bytes) { return element_bytes == 2; }  // two pieces

// `full`: the rows have kernels that ask nothing (norm_forward.cuh), and these hold weight and bias, or some of them, in
// few registers. `wide`: parameters of twice the size of the elements take twice the registers. Figures are microseconds
// on an H200, or copies of the same run.
//
// Early is what few rows want (1x8192: 2.1 us, late 2.8). Past L2 other blocks hide the latency, and the registers that
// early takes cost more than it gains; within L2 they do once there are more rows than stay resident with them.
inline Fetch fetch_of(const Plan& plan, int64_t rows, int64_t cols, int element_bytes, bool full, bool wide,
                      bool past_l2, int sms) {
  const auto late_if = [](bool late) { return late ? Fetch::kLate : Fetch::kEarly; };
  const bool crowded = rows * plan.threads > int64_t{640} * sms;
  // Rows that stay resident on a multiprocessor, their threads, and rows on all multiprocessors, of a variant that takes
  // so many registers a thread.
  const auto resident = [&](int registers) { return kRegistersPerSm / registers / plan.threads; };
  const auto resident_threads = [&](int registers) { return resident(registers) * plan.threads; };
  const auto wave = [&](int registers) { return int64_t{resident(registers)} * sms; };

  // With parameters of twice the size, one piece's ahead takes 56 registers, late 48 (bfloat16 with float32 parameters:
  // 4096x12288 one 54.4, late 56.6; 4096x16384 74.9, 78.7; 4096x6144 28.0, 29.3; 1024x8192 12.1, 13.8; 2048x24576 75.6,
  // 80.1), which pays unless it costs too many of the rows (4096x13312, 416 threads: 64.1, 60.5; 2048x20480, 640: 67.9,
  // 54.1; of 256 threads only many lose: 8192x8192 69.7, 69.1).
  const bool one_wide_fits = resident(56) == resident(48) || resident_threads(56) >= 896;
  if (is_long_block(plan)) {  // these have no room for the registers that early takes
    return full && (!crowded || (wide && one_wide_fits)) ? Fetch::kOne : Fetch::kLate;
  }
  if (wide) {
    const bool four = plan.pieces == 4 && (past_l2 || plan.threads > 32);
    if (full && crowded) {
      // 32768x768: one 26.3, early 30.0; 12608x768 11.9, 12.8. 8192x1280: one 14.0, late 15.0; 32768x1280 42.7, 43.8.
      if (plan.pieces == 3 || plan.pieces == 5) return Fetch::kOne;
      // Two in 72 registers: 4096x4096 19.4, late 21.0; 8192x2048 18.8, 20.9; 16384x1024 18.5, 20.4; but 4096x1024 6.5,
      // early 6.3; and of more threads 8192x8192 74.2, late 69.2.
      if (four && plan.threads <= 128) return Fetch::kHalf;
      if (four && one_wide_fits) return Fetch::kOne;
    }
    // 131072x512 late 66.7, early 71.6. 8192x1600 late 16.9, early 19.7.
    return late_if(past_l2 || (four && crowded));
  }

  if (full && plan.pieces == 4 && plan.threads > 128 && crowded) {
    // float32 holds all in 64 registers (4096x4096: tight 0.98 copies, late in 40 registers 1.02; 8192x8192 0.99, 1.00;
    // 4096x4608 37.6 us, late 38.8; 2048x4096 18.0, early in 70 registers 19.0; but 16x4096 2.3 and 2.2, and 128 threads
    // gain nothing), or where these leave many threads idle, one piece's in 48 (4096x6144 51.1, late 51.3; 1024x6144 15.1,
    // 15.7; tight 1.09 copies, late 1.05).
    if (element_bytes == 4) return resident_threads(64) >= 864 ? Fetch::kTight : Fetch::kOne;
    // 16-bit elements hold half in 64 (bfloat16 16384x5120 82.0, late 83.3; 8192x6144 50.7, 51.6; 8192x8192 66.5, 67.9;
    // 4096x8192 35.2, 35.8; 2048x8192 19.3, 19.9; 2048x16384 37.2, 37.3; all in 72: 85.2 and 72.5 at the first and
    // third), or one piece's in 56 (4096x12288 51.5, late 52.0, half 56.8; 8192x9216 74.3, 74.9, 76.4; 1024x12288 15.9,
    // 16.4, 16.7).
    if (resident_threads(64) >= 896) return Fetch::kHalf;
    if (resident_threads(56) >= 1024) return Fetch::kOne;
  }
  // Full rows of 5 pieces have one ahead (bfloat16 8192x1280 in 56 registers 13.2, late 14.2; 32768x1280 41.9, 42.5;
  // float32 4096x5120 in 48 42.1, late 42.8; 1024x5120 12.9, early 14.1; but 8192x2560 42.0, early 41.6).
  if (full && plan.pieces == 5 && crowded && (element_bytes == 2 || plan.threads > 128)) return Fetch::kOne;
  // Rows of 16-bit elements and up to 128 threads hold all in 72 registers, which leaves room for 896 threads: as many as
  // can be had with weight and bias early, and few enough for memory, which slows down the more rows are on their way.
  // They are ahead so once they are more than would be resident, late ones from 96 threads on (bfloat16 2048x2048: tight
  // 5.9, early 6.4; 4096x4096 18.2, late 19.6; 2048x4096 10.3, 11.2; 16384x4096 65.7, 67.9; 16384x3072 49.9, 50.8;
  // 65536x1024 65.5, 66.6; but 1024x2048 4.0, 3.9; 1584x4096 8.5, 8.2; half in 64 registers: 4096x4096 18.8).
  const bool outnumber = rows > wave(plan.threads > 64 ? 40 : 72);
  if (full && element_bytes == 2 && plan.pieces == 4 && plan.threads <= 128 && outnumber) return Fetch::kTight;

  if (past_l2) {
    // 8192x8192: early 1.31 copies, late 1.01; 32768x2048 1.04, 0.98; except where few are held, or few elements to
    // unpack into more (32768x768: early 0.98, late 1.02; float32 16384x2048 0.98, 1.00), and all loads are busy
    // (32768x1152: early 1.10, late 1.03).
    const bool no_idle_loads = fills_threads(plan, cols, element_bytes);
    switch (plan.pieces) {
      case 2: return late_if(may_fetch_two_late(element_bytes) && plan.threads > 32);
      case 3: return late_if(!no_idle_loads);
      default: return late_if(element_bytes == 2 || !no_idle_loads || plan.threads > 128);
    }
  }
  // Within L2: 1024x8192 early 13.6, late 12.7; 2048x8192 25.7, 20.3; 512x12288 12.8, 8.4; 4096x1280 7.6, 7.4.
  if (!crowded) return Fetch::kEarly;
  if (plan.pieces == 5) return late_if(element_bytes == 2);
  if (plan.pieces != 4) return Fetch::kEarly;
  if (element_bytes > 2) return late_if(plan.threads > 256);
  // With few threads a row, unless half a wave of late ones were left over: 1056x4096 early 6.6, late 6.1, but 2112x4096
  // 11.1, 12.3.
  return late_if(plan.threads > 128 || (plan.threads >= 96 && (rows <= wave(40) || 2 * rows > 3 * wave(40))));
}

}  // namespace fastln
