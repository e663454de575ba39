// Arithmetic of the accumulate type, written once for float, half and packed half2.
//
// A lane is what one instruction works on: float, half, or half2 when a thread holds an even number
// of halves. torch's build flags turn off the operators of cuda_fp16.h, hence named functions.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_fp16.h>

#include "vec.cuh"

namespace fastln {

// None of these is ever contracted with its neighbour into a fused multiply-add: which of them were would
// differ between variants of a kernel, and with it the bits of a row. Where one is meant, fma() says so.
__device__ __forceinline__ float add(float a, float b) { return __fadd_rn(a, b); }
__device__ __forceinline__ double add(double a, double b) { return __dadd_rn(a, b); }
__device__ __forceinline__ half add(half a, half b) { return __hadd_rn(a, b); }
__device__ __forceinline__ half2 add(half2 a, half2 b) { return __hadd2_rn(a, b); }

__device__ __forceinline__ float sub(float a, float b) { return __fsub_rn(a, b); }
__device__ __forceinline__ half sub(half a, half b) { return __hsub_rn(a, b); }
__device__ __forceinline__ half2 sub(half2 a, half2 b) { return __hsub2_rn(a, b); }

__device__ __forceinline__ float mul(float a, float b) { return __fmul_rn(a, b); }
__device__ __forceinline__ double mul(double a, double b) { return __dmul_rn(a, b); }
__device__ __forceinline__ half mul(half a, half b) { return __hmul_rn(a, b); }
__device__ __forceinline__ half2 mul(half2 a, half2 b) { return __hmul2_rn(a, b); }

// a * b + c
__device__ __forceinline__ float fma(float a, float b, float c) { return fmaf(a, b, c); }
__device__ __forceinline__ double fma(double a, double b, double c) { return ::fma(a, b, c); }
__device__ __forceinline__ half fma(half a, half b, half c) { return __hfma(a, b, c); }
__device__ __forceinline__ half2 fma(half2 a, half2 b, half2 c) { return __hfma2(a, b, c); }

// The average of a block's sum is taken in two steps: average_share() on what one thread adds, then
// average_total() on the block's sum. float divides the shares, so that squares of values up to 1e18
// stay finite at any number of columns; half divides the total, the hazard its kernels exist to show.
// (1 / cols is no sum: it need not be a half.)
__device__ __forceinline__ float average_share(float share, float per_col) { return mul(share, per_col); }
__device__ __forceinline__ half average_share(half share, float) { return share; }
__device__ __forceinline__ float average_total(float total, float) { return total; }
__device__ __forceinline__ half average_total(half total, float per_col) {
  return __float2half_rn(mul(__half2float(total), per_col));
}

__device__ __forceinline__ float magnitude(float a) { return fabsf(a); }
__device__ __forceinline__ double magnitude(double a) { return fabs(a); }

__device__ __forceinline__ float reciprocal_sqrt(float a) { return rsqrtf(a); }
__device__ __forceinline__ double reciprocal_sqrt(double a) { return 1.0 / sqrt(a); }
__device__ __forceinline__ half reciprocal_sqrt(half a) { return hrsqrt(a); }

template <typename To> __device__ __forceinline__ To convert(float a) { return a; }
template <> __device__ __forceinline__ half convert<half>(float a) { return __float2half_rn(a); }
__device__ __forceinline__ float to_float(float a) { return a; }
__device__ __forceinline__ float to_float(half a) { return __half2float(a); }

// kItems values of Acc as lanes.
template <typename Acc, int kItems>
struct Lanes {
  static constexpr bool kPacked = std::is_same_v<Acc, half> && kItems % 2 == 0;
  static constexpr int kCount = kPacked ? kItems / 2 : kItems;
  using Lane = std::conditional_t<kPacked, half2, Acc>;

  Lane lane[kCount];

  __device__ __forceinline__ static Lane splat(Acc a) {
    if constexpr (kPacked) return __half2half2(a);
    else return a;
  }

  static constexpr int kWidth = kItems / kCount;  // items of a lane

  __device__ __forceinline__ static Lane zero() { return splat(convert<Acc>(0.0f)); }

  // Lane i of packed items.
  template <typename T>
  __device__ __forceinline__ static Lane lane_of(const Vec<T, kItems>& v, int i) {
    if constexpr (kPacked && std::is_same_v<T, half>) return *reinterpret_cast<const half2*>(&v.bits[i]);
    else if constexpr (kPacked) return __floats2half2_rn(get_item(v, 2 * i), get_item(v, 2 * i + 1));
    else return convert<Acc>(to_float(get_item(v, i)));
  }

  template <typename T>
  __device__ __forceinline__ static Lanes from(const Vec<T, kItems>& v) {
    Lanes out;
#pragma unroll
    for (int i = 0; i < kCount; ++i) out.lane[i] = lane_of(v, i);
    return out;
  }

  template <typename T>
  __device__ __forceinline__ Vec<T, kItems> to() const {
    Vec<T, kItems> v{};
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kPacked) v.bits[i] = *reinterpret_cast<const uint32_t*>(&lane[i]);
      else set_item(v, i, convert<T>(to_float(lane[i])));
    }
    return v;
  }

  // Clears the items for which keeps(item) is false.
  template <typename F>
  __device__ __forceinline__ void keep(F keeps) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if constexpr (kPacked) {
        auto& bits = *reinterpret_cast<uint32_t*>(&lane[i]);
        bits &= (keeps(2 * i) ? 0xffffu : 0u) | (keeps(2 * i + 1) ? 0xffff0000u : 0u);
      } else {
        lane[i] = keeps(i) ? lane[i] : convert<Acc>(0.0f);
      }
    }
  }

  // Sum of all items: lanes pairwise, then the two halves of the last one.
  __device__ __forceinline__ Acc total() const {
    Lane sum[kCount];
#pragma unroll
    for (int i = 0; i < kCount; ++i) sum[i] = lane[i];
    return total_of(sum, kCount);
  }

  // Sum of their squares, in the same order; its first additions are fused with multiplications.
  __device__ __forceinline__ Acc total_squares() const {
    constexpr int kHalf = kCount / 2;
    Lane sum[kCount];
#pragma unroll
    for (int i = kHalf; i < kCount; ++i) sum[i] = mul(lane[i], lane[i]);
#pragma unroll
    for (int i = 0; i < kHalf; ++i) sum[i] = fma(lane[i], lane[i], sum[i + kHalf]);
    return total_of(sum, kHalf > 0 ? kHalf : 1);
  }

 private:
  __device__ __forceinline__ static Acc total_of(Lane (&sum)[kCount], int count) {
#pragma unroll
    for (int width = count / 2; width > 0; width /= 2) {
#pragma unroll
      for (int i = 0; i < width; ++i) sum[i] = add(sum[i], sum[i + width]);
    }
    if constexpr (kPacked) return add(__low2half(sum[0]), __high2half(sum[0]));
    else return sum[0];
  }
};

}  // namespace fastln
