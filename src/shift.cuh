// Rows that start anywhere. Where a row's length is no multiple of 16 bytes (or its address or stride is
// none), 16-byte accesses cannot be a thread's own columns. They are granules, aligned in memory, and a
// shift turns two neighbouring granules into the columns that lie across them.
#pragma once

#include <cstdint>
#include <type_traits>

#include "async_copy.cuh"
#include "vec.cuh"

namespace fastln {

// Elements that lie before `p` in its granule.
template <typename T>
__device__ __forceinline__ int granule_offset(const T* p) {
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(T));
  return static_cast<int>(reinterpret_cast<uintptr_t>(p) / sizeof(T) % kAccess);
}

// Rows this far apart lie alike in their granules, whatever the stride: those are what the groups of a warp take, so
// that none waits for the shifts of another. (float16 on an H200: 131072x257 54.3 us, then 52.7; 262144x65 34.4, then
// 31.3. But groups of two threads, 16 a warp, lose: they share sectors. 524288x33 42.2 us, then 50.0.)
constexpr int kAlikeRows = kMaxAccessBytes / 2;
constexpr int kAlikeThreads = 4;  // of a group, at least

// The row of a warp's group, of so many that each warp has.
__device__ __forceinline__ int64_t shifted_row(int64_t warp, int group, int groups) {
  return (warp / kAlikeRows * groups + group) * kAlikeRows + warp % kAlikeRows;
}

// Elements [offset, offset + kN) of lo followed by hi; 0 <= offset <= kN, the same for a whole row.
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> shift(const Vec<T, kN>& lo, const Vec<T, kN>& hi, int offset) {
  constexpr int kWords = Vec<T, kN>::kRegisters;
  static_assert(kWords == 4);
  const int bytes = offset * static_cast<int>(sizeof(T));
  const uint32_t word[2 * kWords] = {lo.bits[0], lo.bits[1], lo.bits[2], lo.bits[3],
                                     hi.bits[0], hi.bits[1], hi.bits[2], hi.bits[3]};
  Vec<T, kN> out;
  const auto from_word = [&](auto first) {
#pragma unroll
    for (int i = 0; i < kWords; ++i) {
      constexpr int kFirst = decltype(first)::value;
      if constexpr (sizeof(T) < 4 && kFirst < kWords)
        out.bits[i] = __funnelshift_r(word[kFirst + i], word[kFirst + i + 1], bytes % 4 * 8);
      else out.bits[i] = word[kFirst + i];
    }
  };
  // A branch, the same for a whole row, rather than selects: a fifth of the instructions.
  switch (bytes / 4) {
    case 0: from_word(std::integral_constant<int, 0>{}); break;
    case 1: from_word(std::integral_constant<int, 1>{}); break;
    case 2: from_word(std::integral_constant<int, 2>{}); break;
    case 3: from_word(std::integral_constant<int, 3>{}); break;
    default: from_word(std::integral_constant<int, 4>{}); break;
  }
  return out;
}

// A granule of x. One that ends past `end`, the end of the whole tensor, is read element by element; one
// that only ends past its row is not: what lies there is other elements of the tensor, and unused. (Nor can
// a granule begin before the tensor's memory, which is aligned.)
template <typename T, int kN>
__device__ __forceinline__ void load_granule(Vec<T, kN>& v, const T* p, const T* end) {
  if (p + kN <= end) {
    load_vec(v, p);
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i)
      if (p + i < end) set_item(v, i, p[i]);
  }
}

// A granule of x, as load_granule(), to shared memory.
template <typename T>
__device__ __forceinline__ void copy_granule(uint32_t shared, const T* p, const T* end) {
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(T));
  if (p + kAccess <= end) {
    copy_async<kMaxAccessBytes>(shared, p);
  } else {
    Vec<T, kAccess> last{};
    load_granule(last, p, end);
    store_shared_vec(shared, last);
  }
}

// The vector of lane `lane` (modulo `lanes`) of the caller's part of the warp, which is `lanes` lanes, a power of two.
// All lanes of the warp must call it.
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> from_lane(Vec<T, kN> v, int lane, int lanes) {
#pragma unroll
  for (int i = 0; i < Vec<T, kN>::kRegisters; ++i) v.bits[i] = __shfl_sync(0xffffffffu, v.bits[i], lane, lanes);
  return v;
}

// Elements [from, end) of a granule, 0 < from, in at most three stores.
template <typename T, int kN>
__device__ __forceinline__ void store_from(T* granule, const Vec<T, kN>& v, int from) {
  const int byte = from * static_cast<int>(sizeof(T));
  char* to = reinterpret_cast<char*>(granule);
  if (byte <= 8) *reinterpret_cast<uint2*>(to + 8) = make_uint2(v.bits[2], v.bits[3]);
  if constexpr (sizeof(T) <= 4) {
    const auto half = [&](int at, uint32_t low, uint32_t high) {  // of the granule, in which `byte` lies
      if (byte <= at + 4) *reinterpret_cast<uint32_t*>(to + at + 4) = high;
      if constexpr (sizeof(T) == 2) {
        if (byte == at + 2) *reinterpret_cast<uint16_t*>(to + at + 2) = static_cast<uint16_t>(low >> 16);
        if (byte == at + 6) *reinterpret_cast<uint16_t*>(to + at + 6) = static_cast<uint16_t>(high >> 16);
      }
    };
    if (byte < 8) half(0, v.bits[0], v.bits[1]);
    if (byte > 8) half(8, v.bits[2], v.bits[3]);
  }
}

// Elements [0, until) of a granule, until < kN, in at most three stores.
template <typename T, int kN>
__device__ __forceinline__ void store_until(T* granule, const Vec<T, kN>& v, int until) {
  const int byte = until * static_cast<int>(sizeof(T));
  char* to = reinterpret_cast<char*>(granule);
  if (byte >= 8) *reinterpret_cast<uint2*>(to) = make_uint2(v.bits[0], v.bits[1]);
  if constexpr (sizeof(T) <= 4) {
    const auto half = [&](int at, uint32_t low, uint32_t high) {  // of the granule, in which `byte` lies
      if (byte >= at + 4) *reinterpret_cast<uint32_t*>(to + at) = low;
      if constexpr (sizeof(T) == 2) {
        if (byte == at + 2) *reinterpret_cast<uint16_t*>(to + at) = static_cast<uint16_t>(low);
        if (byte == at + 6) *reinterpret_cast<uint16_t*>(to + at + 4) = static_cast<uint16_t>(high);
      }
    };
    if (byte < 8) half(0, v.bits[0], v.bits[1]);
    if (byte > 8) half(8, v.bits[2], v.bits[3]);
  }
}

}  // namespace fastln
