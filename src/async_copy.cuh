// Copies from global to shared memory that run on while the thread goes on (cp.async, compute capability 8.0
// and later). A thread sees what it copied itself once it has waited for it; others, behind a barrier after that.
#pragma once

#include <cstdint>

namespace fastln {

constexpr int kMaxStages = 4;  // copies under way at once, in groups

// 4, 8 or 16 bytes, both addresses aligned to that. 16 bytes go past L1.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes) : "memory");
}

// Ends a group: the thread's copies since the last one, which may be none.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `newer` (< kMaxStages) of the thread's groups are under way.
__device__ __forceinline__ void wait_for_copies(int newer) {
  switch (newer) {
    case 0: asm volatile("cp.async.wait_group 0;" ::: "memory"); break;
    case 1: asm volatile("cp.async.wait_group 1;" ::: "memory"); break;
    case 2: asm volatile("cp.async.wait_group 2;" ::: "memory"); break;
    default: asm volatile("cp.async.wait_group 3;" ::: "memory"); break;
  }
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// 16 bytes of shared memory as a vector.
template <typename V>
__device__ __forceinline__ V load_shared_vec(uint32_t address) {
  static_assert(V::kBytes == 16);
  V v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.bits[0]), "=r"(v.bits[1]), "=r"(v.bits[2]), "=r"(v.bits[3])
               : "r"(address)
               : "memory");
  return v;
}

// A vector as 16 bytes of shared memory.
template <typename V>
__device__ __forceinline__ void store_shared_vec(uint32_t address, const V& v) {
  static_assert(V::kBytes == 16);
  asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.bits[0]), "r"(v.bits[1]),
               "r"(v.bits[2]), "r"(v.bits[3])
               : "memory");
}

}  // namespace fastln
