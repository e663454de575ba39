// The forward for long rows, compute capability 9.0 and later: a cluster of blocks shares a row.
//
// A row that fills a multiprocessor's registers is loaded, summed, summed and stored by turns, and its weight and
// bias, which no L1 holds, come from L2 again with every row: twice the bytes of x. (512x65536 float16 in one block a
// row took 1.42 copies on an H200, 1.28 without weight and bias.) Here
//
//   - blocks stay resident, each with the same columns of every row, and keep their weight and bias in shared memory;
//   - a warp is alone with its part of a row, kClusterPieces times 512 bytes. While it works on one from registers, a
//     bulk copy brings that of its next row into its slot of shared memory (a second slot gained nothing);
//   - the block has several groups of warps, each at a row of its own, so that some wait while others work;
//   - the two sums go from each warp to every block of the cluster by asynchronous stores, which an mbarrier counts, so
//     no warp waits for any other but for its row's sums. (A barrier of all threads of a cluster takes 0.8 us.)
//
// The order of additions follows from the plan: lanes of a warp, then the warps of the row. How many clusters there are,
// and groups in a block, and where weight and bias lie, changes no bit.
#pragma once

#include <cooperative_groups.h>

#include "async_copy.cuh"
#include "norm_pieces.cuh"
#include "norm_rows.h"
#include "reduce.cuh"
#include "vec.cuh"

namespace fastln {

constexpr int kClusterPieces = 8;     // of 16 bytes that a thread holds
constexpr int kClusterThreads = 512;  // of a block, at most: 128 registers each, of which it takes nearly all
constexpr int kUnitBytes = kClusterPieces * kWarp * kMaxAccessBytes;  // a warp's part of a row, its unit

// What norm_cluster() works on. `threads` and `cluster` are those of the plan; a block has `groups` times `threads`.
struct ClusterLaunch : NormRows {
  int groups;  // of warps in a block, each at a row of its own
  bool holds;  // weight and bias of the block's columns in shared memory; otherwise they are fetched with every row
};

// A block's shared memory, in bytes from its start: a slot a warp, then weight and bias, then the sums that arrive,
// then the mbarriers.
struct ClusterRoom {
  int64_t params, sums, barriers, bytes;
};
__host__ __device__ constexpr ClusterRoom cluster_room(int groups, int warps, int cluster, int64_t held_bytes_a_unit,
                                                       int acc_bytes) {
  ClusterRoom room{};
  room.params = int64_t{groups} * warps * kUnitBytes;
  room.sums = room.params + warps * held_bytes_a_unit;
  room.barriers = room.sums + int64_t{groups} * 2 * warps * cluster * acc_bytes;
  room.barriers = (room.barriers + 7) / 8 * 8;
  room.bytes = room.barriers + (int64_t{groups} * (warps + 2) + 1) * 8;
  return room;
}

// Bytes of weight and bias beside a unit of x.
template <typename Elem, typename Param>
__host__ __device__ constexpr int64_t held_bytes() {
  return int64_t{2} * kUnitBytes / sizeof(Elem) * sizeof(Param);
}

template <typename Elem, typename Param>
__global__ void __launch_bounds__(kClusterThreads, 1) norm_cluster(const ClusterLaunch p) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  using Acc = AccOf<Elem>;
  constexpr int kPieces = kClusterPieces;
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(Elem));
  constexpr int kStep = kWarp * kAccess, kUnit = kPieces * kStep;  // columns of a piece of all lanes, and of a unit
  using V = Vec<Elem, kAccess>;
  using P = Vec<Param, kAccess>;
  extern __shared__ __align__(128) uint4 dynamic_shared[];

  const int lane = threadIdx.x % kWarp, warp = threadIdx.x / kWarp;
  const int warps = p.threads / kWarp;  // of a group
  const int group = warp / warps, place = warp % warps;
  const int rank = static_cast<int>(blockIdx.x % p.cluster);
  const int units = warps * p.cluster, unit = rank * warps + place;
  // Columns from `column` on, at most `most` of them, that the row has.
  const auto columns = [&](int column, int most) { return max(min(static_cast<int>(p.cols) - column, most), 0); };
  const int begin = unit * kUnit;                           // the unit's first column; the last units may have none
  const int left = columns(begin, kUnit) - lane * kAccess;  // columns of the unit from this thread's first on
  const auto inside = [&](int j) { return j * kStep < left; };

  const ClusterRoom room =
      cluster_room(p.groups, warps, p.cluster, p.holds ? held_bytes<Elem, Param>() : 0, sizeof(Acc));
  const uint32_t shared = shared_address(dynamic_shared);
  const uint32_t slot = shared + warp * kUnitBytes;
  const auto sums = static_cast<uint32_t>(shared + room.sums + group * 2 * units * sizeof(Acc));  // [2, units]
  const auto params_ready = static_cast<uint32_t>(shared + room.barriers);
  const uint32_t sums_ready = params_ready + 8 + group * 16;  // one for each sum
  const uint32_t slot_ready = params_ready + 8 + p.groups * 16 + warp * 8;
  if (lane == 0) {
    init_barrier(slot_ready, 1);
    if (place == 0) {
      init_barrier(sums_ready, 1);
      init_barrier(sums_ready + 8, 1);
    }
    if (warp == 0) init_barrier(params_ready, 2);
    publish_barriers<true>();
  }
  __syncwarp();

  const unsigned step = gridDim.x / p.cluster * p.groups;
  int64_t row = blockIdx.x / p.cluster + gridDim.x / p.cluster * group;
  const auto fetch = [&](int64_t row) {  // lane 0 copies for all
    if (lane == 0 && row < p.rows && left > 0)
      copy_bulk(slot, static_cast<const Elem*>(p.x) + row * p.x_stride + begin, left * static_cast<int>(sizeof(Elem)),
                slot_ready);
  };

  wait_for_previous_kernel();
  fetch(row);
  Param* held_params = reinterpret_cast<Param*>(reinterpret_cast<char*>(dynamic_shared) + room.params);  // [2, columns]
  if (p.holds && threadIdx.x == 0) {
    const int first = rank * warps * kUnit;
    const int bytes = columns(first, warps * kUnit) * static_cast<int>(sizeof(Param));
    const auto copy = [&](Param* to, const void* from) {
      if (from && bytes > 0)
        copy_bulk(shared_address(to), static_cast<const Param*>(from) + first, bytes, params_ready);
      else arrive(params_ready);
    };
    copy(held_params, p.weight);
    copy(held_params + warps * kUnit, p.bias);
  }
  // All blocks of the cluster have begun, and their mbarriers are ready.
  cooperative_groups::this_cluster().sync();

  const Acc* arrived =  // [2, units]
      reinterpret_cast<const Acc*>(reinterpret_cast<const char*>(dynamic_shared) + (sums - shared));
  // Sum `which` over the row's warps, each of which brings one value, the same in all lanes; all must call it, and get
  // the sum. `parity` alternates from row to row.
  //
  // No warp sends before all others have read what they got of the last row: it has had that row's other sum, to which
  // they add later.
  const auto row_sum = [&](Acc v, int which, int parity) {
    const uint32_t ready = sums_ready + which * 8;
    if (lane < p.cluster)
      store_async(remote_address(sums + (which * units + unit) * sizeof(Acc), lane), v, remote_address(ready, lane));
    if (place == 0 && lane == 0) arrive_expecting(ready, units * static_cast<int>(sizeof(Acc)));
    wait_for_barrier<true>(ready, parity);
    Acc sum = 0;
#pragma unroll 1
    for (int i = lane; i < units; i += kWarp) sum += arrived[which * units + i];
    return warp_sum(sum);
  };
  const Acc per_col = p.per_col_as(Acc());

  for (int parity = 0; row < p.rows; row += step, parity ^= 1) {
    if (begin < p.cols) wait_for_barrier<false>(slot_ready, parity);
    V held[kPieces];
#pragma unroll
    for (int j = 0; j < kPieces; ++j) {
      held[j] = V{};
      if (inside(j)) held[j] = load_shared_vec<V>(slot + (j * kWarp + lane) * kMaxAccessBytes);
    }
    const Acc share = warp_sum(sum_pieces(held));
    __syncwarp();
    fetch(row + step);  // into the slot, which every lane has read
    const Acc mean = mul(row_sum(share, 0, parity), per_col);
    const Acc squares = sum_centred_squares(held, mean, inside);
    // Each thread's share is divided before it is added up: squares of values up to 1e18 stay finite.
    const Acc variance = row_sum(warp_sum(mul(squares, per_col)), 1, parity);
    const Acc rstd = reciprocal_sqrt(variance + p.eps_as(Acc()));
    if (unit == 0 && lane == 0 && p.mean) {
      static_cast<Acc*>(p.mean)[row] = mean;
      static_cast<Acc*>(p.rstd)[row] = mul(rstd, static_cast<Acc>(p.rstd_sign));
    }
    // This thread's part of weight and bias, [cols], if there are any; and of y.
    const auto write = [&](const Param* weight, const Param* bias) {
      Elem* y = static_cast<Elem*>(p.y) + row * p.cols + begin + lane * kAccess;
#pragma unroll
      for (int j = 0; j < kPieces; ++j) {
        if (!inside(j)) continue;
        P w = splat<Param, kAccess>(1), b = splat<Param, kAccess>(0);
        if (p.weight) load_vec(w, weight + j * kStep);
        if (p.bias) load_vec(b, bias + j * kStep);
        store_vec(y + j * kStep, normalized<Elem>(opaque(held[j]), w, b, mean, rstd));
      }
    };
    if (p.holds) {
      wait_for_barrier<false>(params_ready, 0);
      const Param* weight = held_params + place * kUnit + lane * kAccess;
      write(weight, weight + warps * kUnit);
    } else {
      write(static_cast<const Param*>(p.weight) + begin + lane * kAccess,
            static_cast<const Param*>(p.bias) + begin + lane * kAccess);
    }
  }
  // A block may end before the others of its cluster: with its last row's sums it has had all that they send it.
#endif
}

}  // namespace fastln
