// Aligned vectors of elements, the loads and stores that move them, and their conversion to and from
// the accumulate type.
#pragma once

#include <cstdint>
#include <type_traits>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "aligned.h"

namespace fastln {

// kN elements as the 32-bit registers that a load fills. They stay packed until they are used: had a
// thread to unpack 16-bit elements right behind each load, it would wait there, one load at a time (on
// an H200 that doubled the time of 4096x4096).
template <typename T, int kN>
struct Vec {
  static constexpr int kBytes = static_cast<int>(sizeof(T)) * kN;
  static constexpr int kRegisters = kBytes < 4 ? 1 : kBytes / 4;
  uint32_t bits[kRegisters];
};

// No cache hints: marked as streaming, as first to evict, the same accesses were 3-4 % slower past L2
// (8192x8192 float16 on an H200: 70.4 us, plain 67.9), and what fits L2 should stay there for its reader.
template <typename T, int kN>
__device__ __forceinline__ void load_vec(Vec<T, kN>& v, const T* p) {
  constexpr int kBytes = Vec<T, kN>::kBytes;
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i) {
      const uint4 word = *(reinterpret_cast<const uint4*>(p) + i);
      v.bits[4 * i] = word.x;
      v.bits[4 * i + 1] = word.y;
      v.bits[4 * i + 2] = word.z;
      v.bits[4 * i + 3] = word.w;
    }
  } else if constexpr (kBytes == 8) {
    const uint2 word = *reinterpret_cast<const uint2*>(p);
    v.bits[0] = word.x;
    v.bits[1] = word.y;
  } else if constexpr (kBytes == 4) {
    v.bits[0] = *reinterpret_cast<const uint32_t*>(p);
  } else {
    v.bits[0] = *reinterpret_cast<const uint16_t*>(p);
  }
}

template <typename T, int kN>
__device__ __forceinline__ void store_vec(T* p, const Vec<T, kN>& v) {
  constexpr int kBytes = Vec<T, kN>::kBytes;
  if constexpr (kBytes >= 16) {
#pragma unroll
    for (int i = 0; i < kBytes / 16; ++i)
      *(reinterpret_cast<uint4*>(p) + i) =
          make_uint4(v.bits[4 * i], v.bits[4 * i + 1], v.bits[4 * i + 2], v.bits[4 * i + 3]);
  } else if constexpr (kBytes == 8) {
    *reinterpret_cast<uint2*>(p) = make_uint2(v.bits[0], v.bits[1]);
  } else if constexpr (kBytes == 4) {
    *reinterpret_cast<uint32_t*>(p) = v.bits[0];
  } else {
    *reinterpret_cast<uint16_t*>(p) = static_cast<uint16_t>(v.bits[0]);
  }
}

// Element i of a vector, as an unsigned integer of the element's size in the low bits. `i` must be known
// when compiling.
template <typename T, int kN>
__device__ __forceinline__ void set_item(Vec<T, kN>& v, int i, std::type_identity_t<T> item) {
  if constexpr (sizeof(T) == 2) {
    const uint32_t bits = *reinterpret_cast<const uint16_t*>(&item);
    if (i % 2 == 0) v.bits[i / 2] = (v.bits[i / 2] & 0xffff0000u) | bits;
    else v.bits[i / 2] = (v.bits[i / 2] & 0xffffu) | bits << 16;
  } else if constexpr (sizeof(T) == 4) {
    v.bits[i] = *reinterpret_cast<const uint32_t*>(&item);
  } else {
    v.bits[2 * i] = __double2loint(item);
    v.bits[2 * i + 1] = __double2hiint(item);
  }
}

template <typename T, int kN>
__device__ __forceinline__ T get_item(const Vec<T, kN>& v, int i) {
  if constexpr (sizeof(T) == 2) {
    const auto bits = static_cast<uint16_t>(i % 2 == 0 ? v.bits[i / 2] & 0xffffu : v.bits[i / 2] >> 16);
    return *reinterpret_cast<const T*>(&bits);
  } else if constexpr (sizeof(T) == 4) {
    return *reinterpret_cast<const T*>(&v.bits[i]);
  } else {
    return __hiloint2double(v.bits[2 * i + 1], v.bits[2 * i]);
  }
}

// The type that sums over elements of T are kept in.
template <typename T> using AccOf = std::conditional_t<std::is_same_v<T, double>, double, float>;

template <typename T, int kN>
__device__ __forceinline__ void unpack(AccOf<T> (&out)[kN], const Vec<T, kN>& v) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < kN; ++i)
      out[i] = __uint_as_float(i % 2 == 0 ? v.bits[i / 2] << 16 : v.bits[i / 2] & 0xffff0000u);
  } else if constexpr (std::is_same_v<T, half>) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      const float2 pair = __half22float2(*reinterpret_cast<const half2*>(&v.bits[i / 2]));
      out[i] = pair.x;
      if (i + 1 < kN) out[i + 1] = pair.y;
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) out[i] = get_item(v, i);
  }
}

template <typename T, int kN>
__device__ __forceinline__ void pack(Vec<T, kN>& v, const AccOf<T> (&in)[kN]) {
  if constexpr (std::is_same_v<T, __nv_bfloat16>) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      const auto pair = __floats2bfloat162_rn(in[i], i + 1 < kN ? in[i + 1] : 0.0f);
      v.bits[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else if constexpr (std::is_same_v<T, half>) {
#pragma unroll
    for (int i = 0; i < kN; i += 2) {
      const half2 pair = __floats2half2_rn(in[i], i + 1 < kN ? in[i + 1] : 0.0f);
      v.bits[i / 2] = *reinterpret_cast<const uint32_t*>(&pair);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kN; ++i) set_item(v, i, static_cast<T>(in[i]));
  }
}

// One element, in the type that sums over it are kept in.
template <typename T>
__device__ __forceinline__ AccOf<T> load_one(const T* p) {
  Vec<T, 1> v;
  load_vec(v, p);
  AccOf<T> out[1];
  unpack(out, v);
  return out[0];
}

template <typename T>
__device__ __forceinline__ void store_one(T* p, AccOf<T> value) {
  Vec<T, 1> v{};
  const AccOf<T> in[1] = {value};
  pack(v, in);
  store_vec(p, v);
}

// Elements of a word, which are neighbours that one access of at least 4 bytes moves.
template <typename T> constexpr int kWordElements = sizeof(T) < 4 ? 4 / static_cast<int>(sizeof(T)) : 1;

// Whether kN elements may be moved at once.
template <int kN, typename T>
__device__ __forceinline__ bool is_aligned_for(const T* p) {
  return kN == 1 || reinterpret_cast<uintptr_t>(p) % (kN * sizeof(T)) == 0;
}

// A word, or two, at no multiple of its size, element by element.
template <typename T, int kN>
__device__ __forceinline__ void load_split(Vec<T, kN>& v, const T* p) {
#pragma unroll
  for (int i = 0; i < kN; ++i) set_item(v, i, p[i]);
}

template <typename T, int kN>
__device__ __forceinline__ void store_split(T* p, const Vec<T, kN>& v) {
#pragma unroll
  for (int i = 0; i < kN; ++i) p[i] = get_item(v, i);
}

// kN times the same small integer.
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> splat(int value) {
  AccOf<T> items[kN];
#pragma unroll
  for (int i = 0; i < kN; ++i) items[i] = value;
  Vec<T, kN> v;
  pack(v, items);
  return v;
}

// Kernels are launched so that their blocks may be set up while the kernel before them in the stream drains
// (programmatic dependent launch, compute capability 9.0 and later); nothing may be read or written before
// this. On an H200 that takes 0.1 to 0.2 us off a call.
__device__ __forceinline__ void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The blocks of the kernel behind this one in the stream may be set up once all of this one's have called it, if there
// is room and that kernel calls wait_for_previous_kernel(), which waits for this one's end.
__device__ __forceinline__ void let_next_kernel_begin() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The same value, but the compiler no longer knows that: it cannot reuse what it derived from it before,
// nor derive it anew where it is used. (Of an address it must be told again that it is global memory's.)
template <typename T>
__device__ __forceinline__ T* opaque(T* p) {
  asm("" : "+l"(p));
  __builtin_assume(__isGlobal(p));
  return p;
}
__device__ __forceinline__ int opaque(int i) {
  asm volatile("" : "+r"(i));
  return i;
}
template <typename T, int kN>
__device__ __forceinline__ Vec<T, kN> opaque(Vec<T, kN> v) {
#pragma unroll
  for (int i = 0; i < Vec<T, kN>::kRegisters; ++i) asm volatile("" : "+r"(v.bits[i]));
  return v;
}

// Where a thread's items lie in a row: run r of thread t at column base + (r * threads + t) * kRun, kRun
// columns long, so that neighbouring threads touch neighbouring words.
template <int kRun, typename Index>
struct Items {
  Index base;     // column of the block's first item
  Index threads;  // of the block
  Index t;
  Index cols;  // of the row

  __device__ __forceinline__ Index column(int item) const { return t * kRun + offset(item); }
  // Columns from the thread's first, t * kRun, to an item.
  __device__ __forceinline__ Index offset(int item) const { return base + item / kRun * threads * kRun + item % kRun; }
};

// A thread's kN items of a row, by whole accesses of kAccess elements; `p` is the row's column t * kRun (an
// address that is worked out once, and not for each access from the row's). Columns past the row are not
// touched; they read as zero. Without kTail, `cols` is a multiple of kAccess; with it, the access that the
// end of the row cuts short is taken element by element.
template <int kAccess, bool kTail, typename T, int kN, int kRun, typename Index>
__device__ __forceinline__ void load_items(Vec<T, kN>& v, const T* p, const Items<kRun, Index>& at) {
  v = Vec<T, kN>{};
#pragma unroll
  for (int i = 0; i < kN; i += kAccess) {
    const Index col = at.column(i);
    const T* from = p + at.offset(i);
    Vec<T, kAccess> part{};
    if (col + kAccess <= at.cols) {
      load_vec(part, from);
    } else if (kTail && kAccess > 1) {
#pragma unroll
      for (int k = 0; k < kAccess; ++k)
        if (col + k < at.cols) set_item(part, k, from[k]);
    }
    if constexpr (part.kBytes < 4) {
      set_item(v, i, get_item(part, 0));
    } else {
#pragma unroll
      for (int k = 0; k < part.kRegisters; ++k) v.bits[i / kAccess * part.kRegisters + k] = part.bits[k];
    }
  }
}

template <int kAccess, bool kTail, typename T, int kN, int kRun, typename Index>
__device__ __forceinline__ void store_items(T* p, const Vec<T, kN>& v, const Items<kRun, Index>& at) {
#pragma unroll
  for (int i = 0; i < kN; i += kAccess) {
    const Index col = at.column(i);
    T* to = p + at.offset(i);
    Vec<T, kAccess> part{};
    if constexpr (part.kBytes < 4) {
      set_item(part, 0, get_item(v, i));
    } else {
#pragma unroll
      for (int k = 0; k < part.kRegisters; ++k) part.bits[k] = v.bits[i / kAccess * part.kRegisters + k];
    }
    if (col + kAccess <= at.cols) {
      store_vec(to, part);
    } else if (kTail && kAccess > 1) {
#pragma unroll
      for (int k = 0; k < kAccess; ++k)
        if (col + k < at.cols) to[k] = get_item(part, k);
    }
  }
}

}  // namespace fastln
