// Copies from global to shared memory that run on while the thread goes on. A thread sees what it copied itself by
// cp.async (compute capability 8.0 and later) once it has waited for it; others, behind a barrier after that. Bulk
// copies, and stores into the shared memory of other blocks of a cluster (9.0), report to an mbarrier, where all wait.
#pragma once

#include <cstdint>

namespace fastln {

constexpr int kMaxCopyGroups = 4;  // under way at once

// 4, 8 or 16 bytes, both addresses aligned to that. 16 bytes go past L1.
template <int kBytes>
__device__ __forceinline__ void copy_async(uint32_t shared, const void* global) {
  if constexpr (kBytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared), "l"(global) : "memory");
  else asm volatile("cp.async.ca.shared.global [%0], [%1], %2;" ::"r"(shared), "l"(global), "n"(kBytes) : "memory");
}

// Ends a group: the thread's copies since the last one, which may be none.
__device__ __forceinline__ void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Waits until at most `newer` (< kMaxCopyGroups) of the thread's groups are under way.
__device__ __forceinline__ void wait_for_copies(int newer) {
  // The ring mostly has four stages.
  if (newer >= 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
  else if (newer == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
  else if (newer == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
  else asm volatile("cp.async.wait_group 0;" ::: "memory");
}

__device__ __forceinline__ uint32_t shared_address(const void* p) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(p));
}

// A vector of up to 16 bytes from shared memory.
template <typename V>
__device__ __forceinline__ V load_shared_vec(uint32_t address) {
  V v;
  if constexpr (V::kBytes == 16) {
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.bits[0]), "=r"(v.bits[1]), "=r"(v.bits[2]), "=r"(v.bits[3])
                 : "r"(address)
                 : "memory");
  } else if constexpr (V::kBytes == 8) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.bits[0]), "=r"(v.bits[1]) : "r"(address) : "memory");
  } else if constexpr (V::kBytes == 4) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v.bits[0]) : "r"(address) : "memory");
  } else {
    static_assert(V::kBytes == 2);
    asm volatile("{\n\t.reg .u16 h;\n\tld.shared.u16 h, [%1];\n\tcvt.u32.u16 %0, h;\n\t}"
                 : "=r"(v.bits[0])
                 : "r"(address)
                 : "memory");
  }
  return v;
}

// The same to shared memory.
template <typename V>
__device__ __forceinline__ void store_shared_vec(uint32_t address, const V& v) {
  if constexpr (V::kBytes == 16) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(address), "r"(v.bits[0]), "r"(v.bits[1]),
                 "r"(v.bits[2]), "r"(v.bits[3])
                 : "memory");
  } else if constexpr (V::kBytes == 8) {
    asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(address), "r"(v.bits[0]), "r"(v.bits[1]) : "memory");
  } else if constexpr (V::kBytes == 4) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(v.bits[0]) : "memory");
  } else {
    static_assert(V::kBytes == 2);
    asm volatile("st.shared.u16 [%0], %1;" ::"r"(address), "h"(static_cast<uint16_t>(v.bits[0])) : "memory");
  }
}

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
// An mbarrier, 8 bytes of shared memory: a phase of it ends when `arrivals` threads have arrived and all bytes that
// they expect have come.
__device__ __forceinline__ void init_barrier(uint32_t barrier, int arrivals) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes barriers known, behind a barrier of the cluster, to its other blocks; kToCopies: and to bulk copies.
template <bool kToCopies>
__device__ __forceinline__ void publish_barriers() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
  if constexpr (kToCopies) asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// Arrives, and says how many bytes have to come besides; they may have done so already.
__device__ __forceinline__ void arrive_expecting(uint32_t barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

// Waits for the end of the phase whose number is `parity` modulo 2. kCluster: bytes may come from other blocks.
template <bool kCluster>
__device__ __forceinline__ void wait_for_barrier(uint32_t barrier, int parity) {
  uint32_t done = 0;
  while (!done) {
    if constexpr (kCluster)
      asm volatile(
          "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
    else
      asm volatile(
          "{\n\t.reg .pred p;\n\tmbarrier.try_wait.parity.acquire.cta.shared::cta.b64 p, [%1], %2;\n\t"
          "selp.u32 %0, 1, 0, p;\n\t}"
          : "=r"(done)
          : "r"(barrier), "r"(parity)
          : "memory");
  }
}

// Arrives at the barrier, which then waits for the copy. Addresses and size are multiples of 16 bytes.
__device__ __forceinline__ void copy_bulk(uint32_t shared, const void* global, int bytes, uint32_t barrier) {
  arrive_expecting(barrier, bytes);
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(shared),
               "l"(global), "r"(bytes), "r"(barrier)
               : "memory");
}

// Makes this thread's writes to shared memory visible to bulk copies that another thread starts behind a barrier.
__device__ __forceinline__ void publish_to_bulk_copies() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// A bulk copy from shared to global memory; addresses and size are multiples of 16 bytes. The thread that starts it can
// wait until all that it started have read, or have ended.
__device__ __forceinline__ void write_bulk(void* global, uint32_t shared, int bytes) {
  asm volatile(
      "cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;\n\tcp.async.bulk.commit_group;" ::"l"(global),
      "r"(shared), "r"(bytes)
      : "memory");
}
__device__ __forceinline__ void wait_for_bulk_reads() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ __forceinline__ void wait_for_bulk_writes() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The same place in the shared memory of the cluster's block `rank`.
__device__ __forceinline__ uint32_t remote_address(uint32_t shared, int rank) {
  uint32_t address;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

// Stores into another block of the cluster, whose barrier counts the bytes; both addresses are remote ones. One value,
// or two that lie side by side.
__device__ __forceinline__ void store_async(uint32_t address, float v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [%0], %1, [%2];" ::"r"(address), "f"(v),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t address, double v, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.f64 [%0], %1, [%2];" ::"r"(address), "d"(v),
               "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t address, float a, float b, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];" ::"r"(address),
               "f"(a), "f"(b), "r"(barrier)
               : "memory");
}
__device__ __forceinline__ void store_async(uint32_t address, double a, double b, uint32_t barrier) {
  asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f64 [%0], {%1, %2}, [%3];" ::"r"(address),
               "d"(a), "d"(b), "r"(barrier)
               : "memory");
}
#endif

}  // namespace fastln
