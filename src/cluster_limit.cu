// How many blocks of a cluster the device takes, of those that fill a multiprocessor each.
#include <array>
#include <atomic>
#include <stdexcept>
#include <string>

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
  cudaError_t err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared);
  if (err == cudaSuccess) err = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (err == cudaSuccess) err = cudaOccupancyMaxActiveClusters(&clusters, kernel, config.get());
  if (err == cudaSuccess) return clusters > 0;
  cudaGetLastError();  // the next call must not see it
  if (err == cudaErrorInvalidClusterSize || err == cudaErrorInvalidConfiguration) return false;
  // Any other is no answer, which would plan long rows, and so choose their bits, for as long as the process lives.
  throw std::runtime_error("fastln: cannot query the clusters of CUDA device " + std::to_string(device.index) + ": " +
                           cudaGetErrorString(err));
}

}  // namespace

int forward_max_cluster(const DeviceFacts& device) {
  if (!device.has_hopper_code) return 1;
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
