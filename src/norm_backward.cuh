// The general backward kernel behind fastln::layer_norm_bwd.
//
// x and dy are read once. A row belongs to a group of threads (part of a warp, whole warps, or the blocks of
// a cluster), each of which owns the same columns of every row that its group takes: kPieces pieces of 16 bytes.
// Blocks stay resident and walk over the rows, while the next rows are on their way into a ring in shared
// memory; what a thread reads there its own warp has copied, so the ring needs no barrier of the block. What a thread's
// columns add to dweight and dbias stays in its registers until the last row. Then the groups of a block are added up, each
// block writes one partial sum of both, and add_partials() adds those: no atomics, and an order that depends
// on the shape, the dtype and the GPU alone, so all bits are the same in every run. (norm_backward_bundle() takes many
// ragged rows of 16 bits that lie side by side.)
//
// Few rows take one launch instead: its first blocks compute dweight and dbias of slices of columns from all rows, as
// the statistics are known and nothing has to wait for another block. (Beside clusters and slices they are a launch of
// their own, sum_all_columns().)
//
// The bits of a row of dx depend on its values, the columns, the dtype and the weight alone.
#pragma once

#include <cooperative_groups.h>

#include "async_copy.cuh"
#include "norm_backward_columns.cuh"
#include "norm_backward_long.cuh"
#include "norm_backward_pair.cuh"
#include "norm_backward_partial.cuh"
#include "norm_backward_plan.h"
#include "norm_backward_ragged.cuh"
#include "norm_backward_shared.h"
#include "norm_backward_terms.cuh"
#include "norm_rows.h"
#include "reduce.cuh"
#include "shift.cuh"
#include "vec.cuh"

namespace fastln {

// Registers that leave a multiprocessor with 512 threads of this kernel room for a block of add_partials(): then that
// is there already when the last row is done (1 to 1.7 us of 13 to 63 on an H200). Where there are more pieces the
// compiler would spill; from compute capability 10.0 on it would do so here too, and for 3 pieces with 512 threads.
//
// Without sums of columns and with a piece a thread, 64 registers are enough for two blocks, but on other architectures
// some variants would spill.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ / 100 == 9
constexpr int kJoinedThreads = 640, kLeanThreads = 1024;
#else
constexpr int kJoinedThreads = kBackwardThreads, kLeanThreads = 768;
#endif
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 1000
constexpr int kLeastBlocks = 1;  // or the compiler aims at two, and spills
constexpr int kMajor = 10;
#else
constexpr int kLeastBlocks = 0;
constexpr int kMajor = 9;
#endif
template <int kPieces, bool kRagged, bool kCluster, bool kSums>
constexpr int kRegisterThreads =
    !kSums                                      ? (kPieces == 1 ? kLeanThreads : 768)
    : kPieces <= (kRagged ? 1 : 2) && !kCluster ? kJoinedThreads
                                                : backward_threads(kPieces, kRagged, kMajor);

// kRagged: rows' length is no multiple of kPieceBytes, and they may begin anywhere; else they begin and end at such.
// kCluster: a cluster of blocks shares a row. kSums: p.partial is not null.
template <typename Elem, typename Param, int kPieces, bool kRagged, bool kCluster, bool kSums,
          int kPieceBytes = kMaxAccessBytes>
__global__ void __launch_bounds__((kRegisterThreads<kPieces, kRagged, kCluster, kSums>), kLeastBlocks)
    norm_backward(const BackwardLaunch p) {
  using Acc = AccOf<Elem>;
  static_assert(kPieceBytes == kMaxAccessBytes || (!kRagged && !kCluster));
  using R = Runs<Elem, kPieces, kRagged, kPieceBytes>;
  constexpr int kAccess = R::kAccess, kRun = R::kRun, kRuns = R::kCount;
  // Whether a row stays in registers between its sums and dx; else it is read again, from the ring.
  constexpr bool kHold = kPieces * kAccess <= 16 && !kCluster;
  using V = Vec<Elem, kRun>;
  using P = Vec<Param, kRun>;
  extern __shared__ uint4 dynamic_shared[];
  __shared__ PairRoom<Acc> room;
  static_assert(sizeof(room) <= kStaticSharedBytes && kMaxStages <= kMaxCopyGroups);

  // Some variants that never come to this have it too, at one width: without, they are compiled to spill registers, or
  // take longer (of clusters). Others would spill with it, or take longer: kBare, float16 32768x1280 68.5 us, then 66.8.
  constexpr bool kSumsColumns = backward_may_sum_columns(kPieces, kRagged, kCluster, kSums);
  constexpr bool kBare = kPieces == 2 && !kRagged && !kCluster && !kSumsColumns && sizeof(Param) == 2;
  if constexpr (kSumsColumns || !(kBare || kPieces == 3) || (kCluster && !kRagged)) {
    if (blockIdx.x < p.column_blocks) {
      wait_for_previous_kernel();
      sum_columns<Elem, Param, !kRagged, kSumsColumns, kPieceBytes>(p, reinterpret_cast<Acc*>(dynamic_shared));
      return;
    }
  }

  const int threads = kCluster ? blockDim.x : p.threads;
  const int groups = kCluster ? 1 : blockDim.x / threads;
  const int group = kCluster ? 0 : threadIdx.x / threads;
  int t = threadIdx.x - group * threads, stride = threads;  // this thread's place in its group, and the group's size
  // 32 bits keep ragged rows within their registers, 64 bits the others; kBare is smaller by a third with 32.
  using Count = std::conditional_t<kRagged || kBare, int, int64_t>;
  Count block = static_cast<int>(blockIdx.x), blocks = p.blocks;
  if constexpr (kSumsColumns) block -= p.column_blocks;
  int64_t begin = 0;  // column of the row at which the slice does
  if (p.slice < p.cols) {
    begin = static_cast<int64_t>(block / blocks) * p.slice;
    block %= blocks;
  }
  if constexpr (kCluster) {
    t += block % p.cluster * threads;
    stride *= p.cluster;
    block /= p.cluster;
    blocks /= p.cluster;
  }
  const Count rows_at_once = blocks * groups;
  const int cols = static_cast<int>(min(p.slice, p.cols - begin));
  // Threads that share a warp, or a part of one, of a row: lane 0 to sharers - 1. (Of ragged rows of several pieces
  // always a whole one, known when compiling.)
  const int sharers = kCluster || (kRagged && kPieces > 1) ? kWarp : min(threads, kWarp), lane = threadIdx.x % sharers;
  // Run j begins at column first + j * step of the slice, if that is before `end`. Ragged, the columns of the sharers
  // begin at part_first, and the last sharers of a group have those behind the pieces too.
  const int part_first = kRagged ? t / sharers * (sharers * kPieces * kAccess) : 0;
  const int part_end = part_first + sharers * kPieces * kAccess;
  const int end = kRagged && t / sharers + 1 < stride / sharers ? min(part_end, cols) : cols;
  const int first = kRagged ? part_first + lane * kRun : t * kAccess, step = (kRagged ? sharers : stride) * kRun;
  const auto inside = [&](int j) { return first + j * step < end; };
  // The same for a whole warp: whether run j may be left out. (Only the last has few columns in most rows.)
  const auto skipped = [&](int j) { return kRagged && j + 1 == kRuns && end <= part_end; };

  wait_for_previous_kernel();
  // Unpacked once, if registers allow.
  constexpr bool kUnpacked = kHold && !kRagged;
  P weight[kUnpacked ? 1 : kRuns];
  Acc unpacked_weight[kUnpacked ? kRuns : 1][kRun];
#pragma unroll
  for (int j = 0; j < kRuns; ++j) {
    P& piece = weight[kUnpacked ? 0 : j];
    piece = splat<Param, kRun>(1);
    const Param* from = static_cast<const Param*>(p.weight) + begin + first + j * step;
    if (p.weight && inside(j)) {
      if (kRagged && kRun > 1 && first + j * step + kRun > cols) set_item(piece, 0, *from);
      else load_vec(piece, from);
    }
    if constexpr (kUnpacked) unpack(unpacked_weight[j], piece);
  }
  const auto scale_of = [&](int j, Acc(&scale)[kRun]) {
#pragma unroll
    for (int i = 0; i < kRun; ++i) scale[i] = unpacked_weight[kUnpacked ? j : 0][i];
    if constexpr (!kUnpacked) unpack(scale, weight[j]);
  };
  // The sums of the columns wait for nothing in the partial sums but for this kernel's end: their blocks may come.
  if (p.partial) let_next_kernel_begin();

  Acc dweight[kRuns][kRun] = {}, dbias[kRuns][kRun] = {};

  // The ring, see ring_stage_bytes(). The statistics are those of each warp's row (of each group's, where a warp has
  // several).
  const uint32_t tensor_bytes = ring_tensor_bytes(blockDim.x, sharers, kPieces, kRagged, kPieceBytes);
  const uint32_t stage_bytes = ring_stage_bytes(blockDim.x, sharers, kPieces, kRagged, kPieceBytes, sizeof(Acc));
  const uint32_t access_bytes = blockDim.x * kPieceBytes;  // from one piece of a thread to its next
  const uint32_t ring = shared_address(dynamic_shared);
  uint32_t own = kRagged ? ring + threadIdx.x / sharers * ragged_part_bytes(sharers, kPieces)  // the sharers' granules
                         : ring + threadIdx.x * kPieceBytes;                                   // the thread's pieces
  if constexpr (kRagged) asm("" : "+r"(own));  // or it is worked out anew at each use
  const uint32_t stats = ring + 2 * tensor_bytes + threadIdx.x / sharers * 2 * sizeof(Acc);
  // Elements that lie before a row in its first granule. (`begin` and part_first are multiples of granules.)
  const auto offset_of = [&](const void* tensor, int64_t row, int64_t row_stride) {
    const auto low = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(tensor)) / static_cast<uint32_t>(sizeof(Elem));
    return static_cast<int>((low + static_cast<uint32_t>(row) * static_cast<uint32_t>(row_stride)) % kAccess);
  };
  // Ragged: the thread's first granule of x, and of dy, of row 0, before it is aligned.
  const Elem* x_column = static_cast<const Elem*>(p.x) + begin + part_first + lane * kAccess;
  const Elem* dy_column = static_cast<const Elem*>(p.dy) + begin + part_first + lane * kAccess;
  const auto fill = [&](int64_t row, int stage) {
    __syncwarp();  // all lanes have read what was there: the statistics, which lane 0 copies, or neighbours' granules
    if (row < p.rows) {
      const uint32_t at = own + stage * stage_bytes;
      if constexpr (kRagged) {
        copy_ragged_row<Elem, kPieces>(p, row, x_column, dy_column, end - part_first, lane, sharers, at, tensor_bytes);
      } else {
        const auto copy = [&](uint32_t to, const void* tensor, int64_t row_stride) {
          const Elem* from = static_cast<const Elem*>(tensor) + row * row_stride + begin + first;
#pragma unroll
          for (int j = 0; j < kPieces; ++j)
            if (inside(j)) copy_async<kPieceBytes>(to + j * access_bytes, from + j * step);
        };
        copy(at, p.x, p.x_stride);
        copy(at + tensor_bytes, p.dy, p.dy_stride);
      }
      if (lane == 0) {
        const uint32_t to = stats + stage * stage_bytes;
        copy_async<sizeof(Acc)>(to, static_cast<const Acc*>(p.mean) + row);
        copy_async<sizeof(Acc)>(to + sizeof(Acc), static_cast<const Acc*>(p.rstd) + row);
      }
    }
    commit_copies();
  };
  if (kRagged && end < part_end) {
    for (int stage = 0; stage < p.stages; ++stage)
      clear_stage<Elem, kPieces>(own + stage * stage_bytes, tensor_bytes, lane, sharers);
  }

  // What a thread knows of the row in a stage of the ring.
  struct Row {
    int64_t index;
    uint32_t x, dy;  // where the thread's columns are in the ring; dy: ragged rows alone
    bool live;
    Acc mean, rstd;
  };
  // A lane's word of a run that begins at an element of shared memory: the words that it lies across are from here on.
  const auto word_at = [&](uint32_t at, int offset) {
    return at + offset * static_cast<int>(sizeof(Elem)) / R::kWordBytes * R::kWordBytes + lane * R::kWordBytes;
  };
  const auto row_in = [&](int64_t index, int stage) {
    Row row{index, own + stage * stage_bytes, 0, kCluster || index < p.rows};  // a cluster comes for live rows alone
    row.mean = row.live ? load_shared<Acc>(stats + stage * stage_bytes) : Acc(0);
    row.rstd = row.live ? magnitude(load_shared<Acc>(stats + stage * stage_bytes + sizeof(Acc))) : Acc(0);
    if constexpr (kRagged) {
      row.dy = row.x + tensor_bytes;
      const int x_offset = offset_of(p.x, index, p.x_stride), dy_offset = offset_of(p.dy, index, p.dy_stride);
      if (end != part_end)
        clear_behind<Elem, kPieces>(row.x, x_offset, row.dy, dy_offset, max(end - part_first, 0), lane, sharers);
      __syncwarp();
      row.x = word_at(row.x, x_offset);
      row.dy = word_at(row.dy, dy_offset);
    }
    return row;
  };
  // Run j of x and dy, zero past the row. (Ragged, only the last run can be past what the ring has.)
  const auto read = [&](const Row& row, int j, V& x, V& dy) {
    if (kRagged ? j + 1 == kRuns && !inside(j) : !row.live || !inside(j)) {
      x = V{};
      dy = V{};
      return;
    }
    if constexpr (!kRagged) {
      x = load_shared_vec<V>(row.x + j * access_bytes);
      dy = load_shared_vec<V>(row.x + tensor_bytes + j * access_bytes);
    } else {
      const auto from = [&](uint32_t at, const void* tensor, int64_t row_stride) {
        V v = load_shared_vec<V>(at + j * sharers * R::kWordBytes);
        if constexpr (kRun > 1) {
          const V next = load_shared_vec<V>(at + j * sharers * R::kWordBytes + R::kWordBytes);
          v.bits[0] = __funnelshift_r(v.bits[0], next.bits[0], offset_of(tensor, row.index, row_stride) % 2 * 16);
        }
        return v;
      };
      x = from(row.x, p.x, p.x_stride);
      dy = from(row.dy, p.dy, p.dy_stride);
    }
  };
  V x_held[kHold ? kRuns : 1], dy_held[kHold ? kRuns : 1];

  // Adds the row to dweight and dbias; the thread's sums of g and of g * xhat.
  const auto add_row = [&](const Row& row, Acc& g_sum, Acc& gx_sum) {
    g_sum = gx_sum = 0;
    if (kRagged && !row.live) return;
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      if (skipped(j)) continue;
      V& x_run = x_held[kHold ? j : 0];
      V& dy_run = dy_held[kHold ? j : 0];
      read(row, j, x_run, dy_run);
      Acc x[kRun], dy[kRun], scale[kRun];
      unpack(x, x_run);
      unpack(dy, dy_run);
      scale_of(j, scale);
#pragma unroll
      for (int i = 0; i < kRun; ++i) {
        const Acc xhat = mul(x[i] - row.mean, row.rstd);
        add_to_row(g_sum, gx_sum, dy[i], scale[i], xhat);
        if constexpr (kSums) add_to_column(dweight[j][i], dbias[j][i], dy[i], xhat);
      }
    }
  };
  // Writes the row's dx, given its averages of g and of g * xhat.
  const auto write_dx = [&](const Row& row, Acc g_average, Acc gx_average) {
    Elem* dx = static_cast<Elem*>(p.dx) + row.index * p.cols + begin;
    const Acc gx_share = mul(gx_average, row.rstd);  // of x - mean
    const int stop = row.live ? end : 0;             // of what is written
    const int odd = kRun > 1 && kRagged ? offset_of(p.dx, row.index, p.cols) % 2 : 0;
    WordWriter<Elem> words{dx, first, step, part_first, sharers, lane, odd, (stop - part_first - odd) / 2};
#pragma unroll
    for (int j = 0; j < kRuns; ++j) {
      V packed{};
      if (!skipped(j) && (kRagged || (row.live && inside(j)))) {
        V& x_run = x_held[kHold ? j : 0];
        V& dy_run = dy_held[kHold ? j : 0];
        if constexpr (!kHold) read(row, j, x_run, dy_run);
        Acc x[kRun], dy[kRun], scale[kRun], out[kRun];
        unpack(x, x_run);
        unpack(dy, dy_run);
        scale_of(j, scale);
#pragma unroll
        for (int i = 0; i < kRun; ++i) {
          out[i] = mul(mul(dy[i], scale[i]) - fma(x[i] - row.mean, gx_share, g_average), row.rstd);
        }
        pack(packed, out);
        if (!kRagged || (kRun == 1 && first + j * step < stop)) store_vec(dx + first + j * step, packed);
      }
      if constexpr (kRagged && kRun > 1) words.take(j, packed.bits[0], stop);
    }
    if constexpr (kRagged && kRun > 1) words.finish(kRuns - 1, skipped(kRuns - 1), stop);
  };
  const Acc per_col = p.per_col_as(Acc());
  const auto next = [&](int stage) { return stage + 1 == p.stages ? 0 : stage + 1; };

  int64_t index = static_cast<int64_t>(block) * groups + group;
  for (int stage = 0; stage < p.stages - 1; ++stage) fill(index + stage * rows_at_once, stage);
  int stage = 0, turn = 0;
  if constexpr (kCluster) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    // A row's sums go round the cluster while dx of the row before is computed.
    const ClusterSums<Acc> cluster(room);
    Acc g_sum, gx_sum;
    int parity = 0;
    const auto begin_row = [&](const Row& row, int turn) {
      add_row(row, g_sum, gx_sum);
      if (!p.dx) return;
      add_group<true>(g_sum, gx_sum, threads, 0, turn, room);
      cluster.send(g_sum, gx_sum, turn);
    };
    wait_for_copies(p.stages - 2);
    __syncwarp();
    Row row = row_in(index, 0);
    begin_row(row, 0);
    for (; index < p.rows; index += rows_at_once) {
      Acc g_average, gx_average;
      if (p.dx) cluster.receive(g_average, gx_average, turn, parity);
      fill(index + (p.stages - 1) * rows_at_once, stage == 0 ? p.stages - 1 : stage - 1);
      stage = next(stage);
      Row after = row;
      if (index + rows_at_once < p.rows) {
        wait_for_copies(p.stages - 2);
        __syncwarp();
        after = row_in(index + rows_at_once, stage);
        begin_row(after, turn ^ 1);
      }
      if (p.dx) write_dx(row, mul(g_average, per_col), mul(gx_average, per_col));
      row = after;
      turn ^= 1;
      parity ^= turn == 0;
    }
#endif
  } else {
    // Groups that share a warp go the same number of rounds, by the index of the first one's row. (Each way to write it
    // spills registers in the other variants on compute capability 8.0.)
    int64_t round = static_cast<int64_t>(block) * groups;
    for (; (kRagged ? index - group : round) < p.rows; round += rows_at_once, index += rows_at_once) {
      fill(index + (p.stages - 1) * rows_at_once, stage == 0 ? p.stages - 1 : stage - 1);
      wait_for_copies(p.stages - 1);
      __syncwarp();
      const Row row = row_in(index, stage);
      Acc g_sum, gx_sum;
      add_row(row, g_sum, gx_sum);
      if (p.dx) {
        if (p.sums) {
          g_sum = row.live ? static_cast<const Acc*>(p.sums)[2 * index] : Acc(0);
          gx_sum = row.live ? static_cast<const Acc*>(p.sums)[2 * index + 1] : Acc(0);
        } else {
          add_group<(kRagged && kPieces > 1)>(g_sum, gx_sum, threads, group, turn, room);
          g_sum = mul(g_sum, per_col);
          gx_sum = mul(gx_sum, per_col);
        }
        write_dx(row, g_sum, gx_sum);
      }
      stage = next(stage);
      turn ^= 1;
    }
  }

  if (!kSums || !p.partial) return;
  write_partial<Elem, kPieces, kRagged, kCluster, kPieceBytes>(p, dweight, dbias, begin, first, step, end, cols, block,
                                                               threads, group, groups,
                                                               reinterpret_cast<Acc*>(dynamic_shared));
}

}  // namespace fastln
