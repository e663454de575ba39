// Bundles of neighbouring rows on their way between global and shared memory: by bulk copies of whole sectors of 32
// bytes, wherever the rows begin. What a bundle begins and ends with besides, threads copy element by element. An element
// of a bundle lies in its buffer as far from the beginning as in memory from that of the sector that the bundle begins in.
//
// (Bulk copies that begin or end at odd multiples of 16 bytes took 38 to 39 us on an H200, whatever their length, others
// of 64 MiB 35.)
#pragma once

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"
#include "tuning.h"
#include "vec.cuh"

namespace fastln {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// A tensor of rows, as bundles of `bundle_rows` of them. With more than one a bundle, they lie side by side.
template <typename T>
struct BundledRows {
  using Elem = std::remove_const_t<T>;
  static constexpr int kElem = sizeof(Elem);
  static constexpr int kSector = kBundleAlignment / kElem, kPiece = kMaxAccessBytes / kElem;  // elements
  T* rows_at;
  int64_t rows, stride;
  int cols, bundle_rows;

  // Elements before the bundle in its first sector. (Whole addresses would be held in the registers of every thread.)
  __device__ __forceinline__ int offset(int64_t first_row) const {
    const auto element = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(rows_at)) / kElem;
    return static_cast<int>((element + static_cast<uint32_t>(first_row) * static_cast<uint32_t>(stride)) % kSector);
  }
  // Elements of the bundle, of which the last has fewer rows.
  __device__ __forceinline__ int count(int64_t first_row) const {
    return static_cast<int>(min(rows - first_row, static_cast<int64_t>(bundle_rows))) * cols;
  }

  // Starts the copy of a bundle to shared memory, which `barrier` waits for; for one thread. It begins, and mostly ends,
  // with a whole sector: what lies there besides are other elements of the tensor, or of its memory before them, which is
  // aligned. Past the end of the tensor nothing is read.
  __device__ __forceinline__ void fetch(int64_t first_row, uint32_t buffer, uint32_t barrier) const {
    const int before = offset(first_row);
    const Elem* from = rows_at + first_row * stride - before;
    const Elem* end = rows_at + (rows - 1) * stride + cols;
    int wanted = (before + count(first_row) + kSector - 1) / kSector * kSector;
    if (from + wanted > end) wanted = static_cast<int>(end - from) / kPiece * kPiece;
    if (wanted > 0) copy_bulk(buffer, from, wanted * kElem, barrier);
    else arrive(barrier);
  }
  __device__ __forceinline__ bool is_last(int64_t first_row) const { return first_row + bundle_rows >= rows; }
  // What fetch() leaves of the last bundle, for all threads of a block, before a barrier.
  __device__ __forceinline__ void fetch_end(int64_t first_row, uint32_t buffer) const {
    const int before = offset(first_row), elements = count(first_row);
    const int at = (before + elements) / kPiece * kPiece - before + static_cast<int>(threadIdx.x);
    if (at >= elements || threadIdx.x >= kPiece) return;
    Vec<Elem, 1> one;
    load_vec(one, rows_at + first_row * stride + at);
    store_shared_vec(buffer + (before + at) * kElem, one);
  }

  // Zeros for the rows that the last bundle lacks, likewise.
  __device__ __forceinline__ void clear_missing(int64_t first_row, uint32_t buffer) const {
    const int before = offset(first_row);
    for (int at = count(first_row) + threadIdx.x; at < bundle_rows * cols; at += blockDim.x)
      store_shared_vec(buffer + (before + at) * kElem, Vec<Elem, 1>{});
  }

  // Writes a bundle, behind a barrier: its whole sectors by the thread that `starts`, and the others by a warp, of which
  // this is lane `lane`; negative for other threads.
  __device__ __forceinline__ void write(int64_t first_row, uint32_t buffer, bool starts, int lane) const {
    if (!starts && lane < 0) return;
    const int before = offset(first_row), elements = count(first_row);
    Elem* to = rows_at + first_row * stride;
    const int begin = (kSector - before) % kSector;  // of the whole sectors
    const int end = (before + elements) / kSector * kSector - before;
    if (starts && begin < end) write_bulk(to + begin, buffer + (before + begin) * kElem, (end - begin) * kElem);
    if (lane >= 0) {
      static_assert(2 * kSector <= kWarp);
      const int at = lane < kSector ? lane : max(begin, end) + lane - kSector;
      if (at < (lane < kSector ? min(begin, elements) : elements))
        store_vec(to + at, load_shared_vec<Vec<Elem, 1>>(buffer + (before + at) * kElem));
    }
  }
};

// A thread's place in its group, its group's row of the bundle (of a pass over it), and the group of the block.
struct BundlePlace {
  int t, row, group;
};

// kThreads: of a group within a warp, of which rows are as many apart as lie alike in their pieces; 0 for groups of whole
// warps, `threads` each. What is the same for a warp comes from its lane 0, so that the compiler knows it to be.
template <int kThreads>
__device__ __forceinline__ BundlePlace place_in_bundle(int threads) {
  BundlePlace place;
  if constexpr (kThreads > 0) {
    place.t = threadIdx.x % kThreads;
    place.group = threadIdx.x / kThreads;
    place.row = threadIdx.x % kWarp / kThreads * kBundleWarps + __shfl_sync(0xffffffffu, threadIdx.x / kWarp, 0);
  } else {
    place.row = place.group = __shfl_sync(0xffffffffu, threadIdx.x / threads, 0);
    place.t = threadIdx.x - place.group * threads;
  }
  return place;
}

// Threads of different warps, for each waits on its own: one that starts the copies of outputs, one that starts those of
// what comes. The last warp copies what is no whole sector; edge_lane is negative for the others.
struct BundleThreads {
  bool stores = threadIdx.x == 0, fetches = threadIdx.x == kWarp;
  int edge_lane = static_cast<int>(threadIdx.x) - static_cast<int>(blockDim.x - kWarp);

  // Two mbarriers, one a stage, of which a phase ends when the bundles of so many tensors have come. Other threads see
  // them behind a barrier of the block.
  __device__ __forceinline__ void init_barriers(uint32_t ready, int tensors) const {
    if (!fetches) return;
    init_barrier(ready, tensors);
    init_barrier(ready + 8, tensors);
    publish_barriers<true>();
  }
};
#endif

}  // namespace fastln
