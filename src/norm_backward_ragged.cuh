// How the general backward finds its columns in a row, and how ragged rows come into its ring in shared memory and go out.
#pragma once

#include "async_copy.cuh"
#include "norm_backward_shared.h"
#include "norm_rows.h"
#include "shift.cuh"
#include "vec.cuh"

namespace fastln {

// How a thread's columns lie in a row. Both keep a warp's accesses side by side.
//
// Rows of whole pieces of 16 bytes, or of 8: run j is piece j, and the group's threads take neighbouring pieces.
//
// Ragged rows, whose length is no multiple of 16 bytes, begin anywhere: 16 bytes that lie aligned in memory, a granule,
// belong to other columns in each row. Each warp of the group has kPieces * 32 pieces of its own; the granules they
// lie across, one more than pieces, are what it copies to shared memory. There its lanes take neighbouring words of 4
// bytes (8 for double), so that a run is one or two elements: shared memory can be read at any word, and pairs of
// 16-bit elements that begin within one take a funnel shift. One run more is for the columns behind the last piece,
// fewer than a granule.
template <typename Elem, int kPieces, bool kRagged, int kPieceBytes>
struct Runs {
  static constexpr int kAccess = kPieceBytes / static_cast<int>(sizeof(Elem));
  static constexpr int kRun = !kRagged ? kAccess : sizeof(Elem) == 2 ? 2 : 1;  // elements of a run
  static constexpr int kCount = kPieces * kAccess / kRun + kRagged;            // runs
  static constexpr int kWordBytes = kRun * static_cast<int>(sizeof(Elem));
};

// Starts the copies of a ragged row's granules to a stage of the ring at `at`: those that lie across the `width` columns
// which a warp, or a part of one, of `sharers` threads owns. x_column, dy_column: the lane's first granule of row 0, before
// it is aligned.
template <typename Elem, int kPieces>
__device__ __forceinline__ void copy_ragged_row(const BackwardLaunch& p, int64_t row, const Elem* x_column,
                                                const Elem* dy_column, int width, int lane, int sharers, uint32_t at,
                                                uint32_t tensor_bytes) {
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  const Elem* x = x_column + row * p.x_stride;
  const Elem* dy = dy_column + row * p.dy_stride;
  const int x_offset = granule_offset(x), dy_offset = granule_offset(dy);
  x -= x_offset;
  dy -= dy_offset;
  // A granule lies across the columns if it begins before their end.
  const int x_count = width + x_offset, dy_count = width + dy_offset;
  const uint32_t to = at + lane * kMaxAccessBytes;
  if (row < p.safe_rows) {
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int more = j * sharers;
      if ((lane + more) * kAccess < x_count) copy_async<16>(to + more * kMaxAccessBytes, x + more * kAccess);
    }
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      const int more = j * sharers;
      if ((lane + more) * kAccess < dy_count)
        copy_async<16>(to + tensor_bytes + more * kMaxAccessBytes, dy + more * kAccess);
    }
    // Up to two granules more of both tensors.
    const bool of_dy = lane & 2;
    const int more = kPieces * sharers - (of_dy ? 2 : 0);
    if (lane < 4 && (lane + more) * kAccess < (of_dy ? dy_count : x_count))
      copy_async<16>(to + (of_dy ? tensor_bytes : 0) + more * kMaxAccessBytes, (of_dy ? dy : x) + more * kAccess);
  } else {
    const Elem* x_end = static_cast<const Elem*>(p.x) + (p.rows - 1) * p.x_stride + p.cols;
    const Elem* dy_end = static_cast<const Elem*>(p.dy) + (p.rows - 1) * p.dy_stride + p.cols;
#pragma unroll 1
    for (int more = 0; lane + more < kPieces * sharers + 2; more += sharers) {
      if ((lane + more) * kAccess < x_count) copy_granule(to + more * kMaxAccessBytes, x + more * kAccess, x_end);
      if ((lane + more) * kAccess < dy_count)
        copy_granule(to + tensor_bytes + more * kMaxAccessBytes, dy + more * kAccess, dy_end);
    }
  }
}

// In shared memory zeros follow a ragged row, so that no lane has to ask whether it is past the end. clear_stage() writes
// them to all of a stage before it is used, for the columns of a warp, or of the part of one, of `sharers` threads. Copies
// write none but granules that the row reaches into; clear_behind() is for the rest of the last of these, behind the
// `width` columns, and for the one that a row with another offset may have reached into.
template <typename Elem, int kPieces>
__device__ __forceinline__ void clear_stage(uint32_t stage, uint32_t tensor_bytes, int lane, int sharers) {
  for (int at = lane * kMaxAccessBytes; at < ragged_part_bytes(sharers, kPieces); at += sharers * kMaxAccessBytes) {
    const Vec<Elem, kMaxAccessBytes / sizeof(Elem)> zeros{};
    store_shared_vec(stage + at, zeros);
    store_shared_vec(stage + tensor_bytes + at, zeros);
  }
}
template <typename Elem, int kPieces>
__device__ __forceinline__ void clear_behind(uint32_t x, int x_offset, uint32_t dy, int dy_offset, int width, int lane,
                                             int sharers) {
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  for (int item = lane; item < 4 * kAccess; item += sharers) {
    const bool of_dy = item >= 2 * kAccess;
    const int element = width + (of_dy ? dy_offset - 2 * kAccess : x_offset) + item;
    if (element < (sharers * kPieces + 2) * kAccess)
      store_shared((of_dy ? dy : x) + element * static_cast<int>(sizeof(Elem)), Elem{});
  }
}

// Writes the columns of a warp, or of the part of one, to a row of dx that begins at an odd 16-bit element, or not: run after
// run of two columns a lane, by words of memory, which begin `odd` columns off the runs.
template <typename Elem>
struct WordWriter {
  Elem* dx;
  int first, step, part_first, sharers, lane;
  int odd;
  int pairs;            // words that the columns fill
  uint32_t rest = 0;    // the word behind those, of which they have half
  uint32_t before = 0;  // the run before, which waits for the one behind it

  __device__ __forceinline__ void store(int j, uint32_t run, uint32_t next) {
    const uint32_t pair = __funnelshift_r(run, next, odd * 16);
    const int index = j * sharers + lane;
    if (index < pairs) store_vec(dx + first + odd + j * step, Vec<Elem, 2>{pair});
    if (index == pairs) rest = pair;
  }
  __device__ __forceinline__ void take(int j, uint32_t run, int stop) {
    if (j == 0 && odd && lane == 0 && first < stop) store_vec(dx + first, Vec<Elem, 1>{run});
    if (j > 0) {
      const uint32_t given = lane == 0 ? run : before;  // to the lane before
      store(j - 1, before, __shfl_sync(0xffffffffu, given, (lane + 1) % sharers, sharers));
    }
    before = run;
  }
  __device__ __forceinline__ void finish(int last, bool skipped, int stop) {
    if (!skipped) store(last, before, __shfl_down_sync(0xffffffffu, before, 1, sharers));
    // An element is left over of the columns, or none.
    const int col = part_first + 2 * pairs + odd;
    if (lane == pairs % sharers && col < stop) store_vec(dx + col, Vec<Elem, 1>{rest});
  }
};

}  // namespace fastln
