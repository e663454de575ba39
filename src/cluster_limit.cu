// How many blocks of a cluster the device takes, of those that fill a multiprocessor each.
#include <array>
#include <atomic>

#include <cuda_runtime.h>

#include "dependent_launch.h"
#include "norm_backward_plan.h"
#include "norm_launch.h"

namespace fastln {
namespace {

__global__ void __launch_bounds__(kBackwardThreads) fills_a_multiprocessor() {}

// More than 8 are not promised: there must be that many multiprocessors side by side, which a part of a GPU lacks.
bool takes_cluster(int blocks, const DeviceFacts& device) {
  const auto kernel = reinterpret_cast<const void*>(fills_a_multiprocessor);
  const auto shared = static_cast<int>(device.shared_bytes_block);
  const LaunchConfig config(dim3(static_cast<unsigned>(blocks)), dim3(kBackwardThreads), shared, blocks, false,
                            nullptr);
  int clusters = 0;
  const bool known = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared) == cudaSuccess &&
                     cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1) == cudaSuccess &&
                     cudaOccupancyMaxActiveClusters(&clusters, kernel, config.get()) == cudaSuccess;
  if (!known) cudaGetLastError();  // the next call must not see it
  return known && clusters > 0;
}

}  // namespace

int forward_max_cluster(const DeviceFacts& device) {
  if (device.major < 9) return 1;
  static std::array<std::atomic<int>, kMaxDevices> known{};
  int most = known[device.index].load(std::memory_order_relaxed);
  if (most == 0) {
    most = takes_cluster(kMaxCluster, device) ? kMaxCluster : kPortableCluster;
    known[device.index].store(most, std::memory_order_relaxed);
  }
  return most;
}

int backward_max_cluster(const DeviceFacts& device) {
  // Two rows' stages of a cluster's block take 128 KB.
  return device.shared_bytes_block < 160 * 1024 ? 1 : forward_max_cluster(device);
}

}  // namespace fastln
