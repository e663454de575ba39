// Launches with the attributes that ours need: clusters, and programmatic dependent launch, see
// wait_for_previous_kernel() in vec.cuh.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <atomic>
#include <cstdint>

#include "device.h"

namespace fastln {

inline cudaLaunchAttribute dependent_launch() {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = 1;
  return attribute;
}

// Clusters of so many blocks along x.
inline cudaLaunchAttribute cluster_launch(int blocks) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeClusterDimension;
  attribute.val.clusterDim.x = static_cast<unsigned>(blocks);
  attribute.val.clusterDim.y = attribute.val.clusterDim.z = 1;
  return attribute;
}

// A cudaLaunchConfig_t and the attributes that it points to. `dependent`: see dependent_launch(), from compute
// capability 9.0 on. `cluster`: blocks of a cluster, of which the grid is a multiple; 1 for none.
class LaunchConfig {
 public:
  LaunchConfig(dim3 grid, dim3 block, int64_t shared_bytes, int cluster, bool dependent, cudaStream_t stream) {
    config_.gridDim = grid;
    config_.blockDim = block;
    config_.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
    config_.stream = stream;
    config_.attrs = attributes_;
    if (dependent) attributes_[config_.numAttrs++] = dependent_launch();
    if (cluster > 1) attributes_[config_.numAttrs++] = cluster_launch(cluster);
  }
  LaunchConfig(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchConfig_t config_{};
  cudaLaunchAttribute attributes_[2]{};
};

// The kernel, which may then be launched with as much shared memory as a block can have, in clusters of any size. CUDA
// is told once a device. kDivideAlike: the multiprocessor's memory is divided alike for all such kernels, most of it
// shared memory, or a block of one could not join those of another there; otherwise L1 has what the blocks leave.
template <auto kKernel, bool kDivideAlike = true>
cudaError_t prepare(const DeviceFacts& device, decltype(kKernel)* out) {
  static std::array<std::atomic<bool>, kMaxDevices> done{};
  *out = kKernel;
  if (done[device.index].load(std::memory_order_acquire)) return cudaSuccess;
  const auto kernel = reinterpret_cast<const void*>(kKernel);
  cudaFuncAttributes facts{};
  cudaError_t err = cudaFuncGetAttributes(&facts, kernel);
  const auto room = static_cast<int>(device.shared_bytes_block) - static_cast<int>(facts.sharedSizeBytes);
  if (err == cudaSuccess) err = cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, room);
  if (err == cudaSuccess && device.has_hopper_code)
    err = cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
  if (err == cudaSuccess && kDivideAlike)
    err = cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
  if (err == cudaSuccess) done[device.index].store(true, std::memory_order_release);
  return err;
}

}  // namespace fastln
