// Sums over a warp and over a block. The order of additions depends on the block size only, so a
// row's result is the same bits in every launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arith.cuh"

namespace fastln {

constexpr int kWarp = 32;
constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarp;

// Butterfly over the 32 lanes; every lane gets the sum. All lanes of the warp must call it.
template <typename Acc>
__device__ __forceinline__ Acc warp_sum(Acc v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) v = add(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

// A value in shared memory by its 32-bit address. (From an array the compiler works the address out anew
// at each use, behind the shuffles, where the whole block waits for it.)
template <typename Acc>
__device__ __forceinline__ void store_shared(uint32_t address, Acc v) {
  if constexpr (sizeof(Acc) == 8) asm volatile("st.shared.f64 [%0], %1;" ::"r"(address), "d"(v) : "memory");
  else if constexpr (sizeof(Acc) == 4) asm volatile("st.shared.f32 [%0], %1;" ::"r"(address), "f"(v) : "memory");
  else asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(*reinterpret_cast<uint16_t*>(&v)) : "memory");
}

template <typename Acc>
__device__ __forceinline__ Acc load_shared(uint32_t address) {
  if constexpr (sizeof(Acc) == 8) {
    double v;
    asm volatile("ld.shared.f64 %0, [%1];" : "=d"(v) : "r"(address) : "memory");
    return v;
  } else if constexpr (sizeof(Acc) == 4) {
    float v;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(v) : "r"(address) : "memory");
    return v;
  } else {
    uint16_t v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(address) : "memory");
    return *reinterpret_cast<half*>(&v);
  }
}

__device__ __forceinline__ float4 load_shared4(uint32_t address) {
  float4 v;
  asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address) : "memory");
  return v;
}

// Sums over the block, each in two stages: every warp reduces by shuffles, then one value a warp goes
// through shared memory and every warp adds those up again. Doing the second stage in all warps, rather
// than in one that then broadcasts, saves a barrier.
//
// Made before the loads of a row are waited for, so that its address arithmetic costs no time. blockDim.x
// is a multiple of 32.
//
// kBroadcast: up to eight warps' values are read by every thread at once, four a load, which takes less time
// than five shuffles, and more registers.
template <typename Acc, int kSums, bool kBroadcast>
class BlockSum {
 public:
  // shared: room for the kSums calls of sum() that one launch may make, each with a part of its own.
  __device__ __forceinline__ explicit BlockSum(Acc (&shared)[kSums][kMaxWarps]) {
    base_ = static_cast<uint32_t>(__cvta_generic_to_shared(&shared[0][0]));
    own_ = base_ + threadIdx.x / kWarp * sizeof(Acc);
    asm volatile("" : "+r"(base_), "+r"(own_));
  }

  // All threads of the block must call it, with the same kIndex, once for each; all get the sum. It has
  // one barrier, or none for a block of one warp.
  template <int kIndex>
  __device__ __forceinline__ Acc sum(Acc v) const {
    static_assert(kIndex < kSums);
    constexpr uint32_t kOffset = kIndex * kMaxWarps * sizeof(Acc);
    const unsigned lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    v = warp_sum(v);
    if (warps == 1) return v;
    if (lane == 0) store_shared(own_ + kOffset, v);
    if constexpr (kBroadcast && std::is_same_v<Acc, float>) {
      // Those past the last warp are zero.
      if (warps <= 8) {
        if (threadIdx.x < 8 && threadIdx.x >= warps) store_shared(base_ + kOffset + lane * sizeof(Acc), Acc{});
        __syncthreads();
        const float4 a = load_shared4(base_ + kOffset);
        float sum = (a.x + a.y) + (a.z + a.w);
        if (warps > 4) {
          const float4 b = load_shared4(base_ + kOffset + 16);
          sum += (b.x + b.y) + (b.z + b.w);
        }
        return sum;
      }
    }
    __syncthreads();
    Acc other{};
    if (lane < warps) other = load_shared<Acc>(base_ + kOffset + lane * sizeof(Acc));
    return warp_sum(other);
  }

 private:
  uint32_t base_, own_;  // addresses of the first warp's value and of this warp's, in shared memory
};

}  // namespace fastln
