// Sums over a warp and over a block. The order of additions depends on the block size only, so a
// row's result is the same bits in every launch.
#pragma once

#include <cstdint>
#include <type_traits>

#include "arith.cuh"
#include "device.h"

namespace fastln {

constexpr int kMaxThreads = 1024;
constexpr int kMaxWarps = kMaxThreads / kWarp;

// Butterfly over the 32 lanes; every lane gets the sum. All lanes of the warp must call it.
template <typename Acc>
__device__ __forceinline__ Acc warp_sum(Acc v) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2) v = add(v, __shfl_xor_sync(0xffffffffu, v, offset));
  return v;
}

// The sum of kN values, pairwise; overwrites them.
template <typename Acc, int kN>
__device__ __forceinline__ Acc pairwise_sum(Acc (&v)[kN]) {
#pragma unroll
  for (int width = kN / 2; width > 0; width /= 2) {
#pragma unroll
    for (int i = 0; i < width; ++i) v[i] += v[i + width];
  }
  return v[0];
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

// The sum of the 16 bytes of values at `address`, pairwise. (Two at once where they are halves.)
template <typename Acc>
__device__ __forceinline__ Acc sum_shared16(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  using Word = std::conditional_t<sizeof(Acc) == 4, float, half2>;
  const auto word = [](const uint32_t& bits) { return *reinterpret_cast<const Word*>(&bits); };
  const Word sum = add(add(word(v.x), word(v.y)), add(word(v.z), word(v.w)));
  if constexpr (sizeof(Acc) == 4) return sum;
  else return add(__low2half(sum), __high2half(sum));
}

// Sums over the block, each in two stages: every warp reduces by shuffles, then one value a warp goes
// through shared memory and every thread adds those up again. Doing the second stage in all threads, rather
// than in some that then broadcast, saves a barrier; reading 16 bytes of values a thread saves most of the shuffles,
// which the whole block would wait for. (Up to eight values every thread reads all, the second 16 bytes too; with
// more, two reads a thread cost more than a shuffle: float32 4096x1024, 32 warps, 30.3 us on an H200, 28.5 this way.)
//
// Made before the loads of a row are waited for, so that its address arithmetic costs no time. blockDim.x
// is a multiple of 32.
template <typename Acc, int kSums>
class BlockSum {
 public:
  // shared: room for the kSums calls of sum() that one launch may make, each with a part of its own.
  // used: whether there will be any.
  __device__ __forceinline__ explicit BlockSum(Acc (&shared)[kSums][kMaxWarps], bool used = true) : read_(0), own_(0) {
    if (!used) return;
    const unsigned lane = threadIdx.x % kWarp, warps = blockDim.x / kWarp;
    const uint32_t base = static_cast<uint32_t>(__cvta_generic_to_shared(&shared[0][0]));
    own_ = base + threadIdx.x / kWarp * sizeof(Acc);
    if constexpr (kPerRead == 1) {
      read_ = base + lane * sizeof(Acc);
    } else {
      // A thread reads values of warps that the block has not: those are zero. What sum() writes before its
      // barrier, it writes elsewhere, so this needs none.
      if (threadIdx.x < kMaxWarps && threadIdx.x >= warps) {
#pragma unroll
        for (int i = 0; i < kSums; ++i) store_shared(base + (i * kMaxWarps + lane) * sizeof(Acc), Acc{});
      }
      read_ = base + (warps <= 8 ? 0 : lane % ((warps <= 16 ? 16 : 32) / kPerRead)) * 16;
    }
    asm volatile("" : "+r"(read_), "+r"(own_));
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
    __syncthreads();
    if constexpr (kPerRead == 1) {
      Acc other{};
      if (lane < warps) other = load_shared<Acc>(read_ + kOffset);
      return warp_sum(other);
    } else {
      Acc sum = sum_shared16<Acc>(read_ + kOffset);
      if (warps <= 8) {
        if (kPerRead < 8 && warps > kPerRead) sum = add(sum, sum_shared16<Acc>(read_ + kOffset + 16));
        return sum;
      }
      // Neighbouring lanes have read neighbouring values.
      if (warps > 16) sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, 16 / kPerRead));
      if constexpr (kPerRead == 4) sum = add(sum, __shfl_xor_sync(0xffffffffu, sum, 2));
      return add(sum, __shfl_xor_sync(0xffffffffu, sum, 1));
    }
  }

 private:
  static constexpr unsigned kPerRead = sizeof(Acc) == 8 ? 1 : 16 / sizeof(Acc);  // values
  uint32_t read_, own_;  // addresses of what this thread reads and of this warp's value, in shared memory
};

}  // namespace fastln
