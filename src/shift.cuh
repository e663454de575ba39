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

// Elements [offset, offset + kN) of lo followed by hi; 0 <= offset < kN, the same for a whole row.
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
      if constexpr (sizeof(T) < 4) out.bits[i] = __funnelshift_r(word[kFirst + i], word[kFirst + i + 1], bytes % 4 * 8);
      else out.bits[i] = word[kFirst + i];
    }
  };
  // A branch, the same for a whole row, rather than selects: a fifth of the instructions.
  switch (bytes / 4) {
    case 0: from_word(std::integral_constant<int, 0>{}); break;
    case 1: from_word(std::integral_constant<int, 1>{}); break;
    case 2: from_word(std::integral_constant<int, 2>{}); break;
    default: from_word(std::integral_constant<int, 3>{}); break;
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

// Writes a row whose columns lie in shared memory, from a granule on, to `y`, by the threads of a group:
// whole granules, and single elements at the row's two ends.
template <typename T>
__device__ __forceinline__ void store_shifted(T* y, const T* shared, int cols, int t, int threads) {
  constexpr int kAccess = kMaxAccessBytes / static_cast<int>(sizeof(T));
  const int head = min((kAccess - granule_offset(y)) % kAccess, cols);  // columns before the first whole granule
  const int tail = head + (cols - head) / kAccess * kAccess;            // and from the end of the last one on
  for (int col = head + t * kAccess; col < tail; col += threads * kAccess) {
    Vec<T, kAccess> lo, hi{};
    load_vec(lo, shared + col - head);
    if (head != 0) load_vec(hi, shared + col - head + kAccess);
    store_vec(y + col, shift(lo, hi, head));
  }
  for (int i = t; i < kAccess; i += threads) {
    if (i < head) y[i] = shared[i];
    if (i < cols - tail) y[tail + i] = shared[tail + i];
  }
}

}  // namespace fastln
