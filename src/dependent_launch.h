// Attributes of launches: programmatic dependent launch, see wait_for_previous_kernel() in vec.cuh, and clusters.
#pragma once

#include <cuda_runtime_api.h>

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

}  // namespace fastln
