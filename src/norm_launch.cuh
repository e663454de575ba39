// Host side of the general forward: from a plan and pointers to a launch of the right variant.
#pragma once

#include <algorithm>
#include <climits>

#include <cuda_runtime.h>

#include "norm_forward.cuh"
#include "norm_launch.h"
#include "norm_split.cuh"
#include "norm_staged.cuh"

namespace fastln {

// Launches `kernel` over all rows, as many times as the limit of 2^31 - 1 blocks a grid asks for.
// `shared_bytes` are dynamic shared memory for each row of a block.
template <typename Elem>
cudaError_t launch_rows(void (*kernel)(NormRows), NormRows p, int64_t shared_bytes, cudaStream_t stream) {
  using Acc = AccOf<Elem>;
  const int64_t rows_a_block = p.threads > kWarp ? 1 : kSmallGroupBlock / p.threads;
  const int64_t most_rows = INT_MAX / p.cluster * rows_a_block;
  cudaLaunchConfig_t config{};
  config.blockDim = dim3(p.threads > kWarp ? p.threads : kSmallGroupBlock);
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes * rows_a_block);
  config.stream = stream;
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim.x = static_cast<unsigned>(p.cluster);
  cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
  config.attrs = &cluster;
  config.numAttrs = p.cluster > 1 ? 1 : 0;
  if (config.dynamicSmemBytes > 48 * 1024) {  // what a kernel may have without asking
    const cudaError_t err = cudaFuncSetAttribute(reinterpret_cast<const void*>(kernel), cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                 static_cast<int>(config.dynamicSmemBytes));
    if (err != cudaSuccess) return err;
  }
  for (int64_t left = p.rows; left > 0; left -= most_rows) {
    p.rows = std::min(left, most_rows);
    config.gridDim = dim3(static_cast<unsigned>((p.rows + rows_a_block - 1) / rows_a_block * p.cluster));
    const cudaError_t err = cudaLaunchKernelEx(&config, kernel, p);
    if (err != cudaSuccess) return err;
    p.x = static_cast<const Elem*>(p.x) + p.rows * p.x_stride;
    p.y = static_cast<Elem*>(p.y) + p.rows * p.cols;
    if (p.mean) {
      p.mean = static_cast<Acc*>(p.mean) + p.rows;
      p.rstd = static_cast<Acc*>(p.rstd) + p.rows;
    }
  }
  return cudaSuccess;
}

// Every compiled variant of norm_forward. Weight and bias come late with 8 pieces, where registers are
// short, and with 4 on tensors past L2 (8192x8192 float16 on an H200: 67.9 us, early 89); early is what
// few rows want (1x8192: 2.8 us, late 3.3). When they come does not change what is computed.
template <typename Elem, typename Param>
void (*find_forward(int pieces, int cluster, bool past_l2))(NormRows) {
  if (cluster > 1) return pieces == 8 ? norm_forward<Elem, Param, 8, false, true> : nullptr;
  switch (pieces) {
    case 2: return norm_forward<Elem, Param, 2, true, false>;
    case 3: return norm_forward<Elem, Param, 3, true, false>;
    case 4: return past_l2 ? norm_forward<Elem, Param, 4, false, false> : norm_forward<Elem, Param, 4, true, false>;
    case 8: return norm_forward<Elem, Param, 8, false, false>;
    default: return nullptr;
  }
}

template <typename Elem, typename Param>
cudaError_t launch_split(const NormRows& p, void* workspace, cudaStream_t stream) {
  using Acc = AccOf<Elem>;
  const int64_t chunks = split_chunks(p.cols);
  const int64_t most_rows = INT_MAX / chunks;
  Acc* means = static_cast<Acc*>(workspace);  // [rows, chunks]
  Acc* squares = means + p.rows * chunks;     // [rows, chunks]
  if (most_rows == 0) return cudaErrorInvalidValue;
  NormRows part = p;
  for (int64_t left = p.rows; left > 0; left -= most_rows) {
    part.rows = std::min(left, most_rows);
    const auto blocks = static_cast<unsigned>(part.rows * chunks);
    split_moments<Elem><<<blocks, kSplitThreads, 0, stream>>>(part, means, squares, chunks);
    split_combine<Elem><<<static_cast<unsigned>(part.rows), kSplitThreads, 0, stream>>>(part, means, squares, chunks);
    split_normalize<Elem, Param><<<blocks, kSplitThreads, 0, stream>>>(part, means, squares, chunks);
    const cudaError_t err = cudaGetLastError();
    if (err != cudaSuccess) return err;
    part.x = static_cast<const Elem*>(part.x) + part.rows * part.x_stride;
    part.y = static_cast<Elem*>(part.y) + part.rows * part.cols;
    if (part.mean) {
      part.mean = static_cast<Acc*>(part.mean) + part.rows;
      part.rstd = static_cast<Acc*>(part.rstd) + part.rows;
    }
    means += part.rows * chunks;
    squares += part.rows * chunks;
  }
  return cudaSuccess;
}

template <typename Elem, typename Param>
const char* run_forward(NormRows p, const Plan& plan, int64_t l2_bytes, void* workspace, void* stream) {
  const auto s = static_cast<cudaStream_t>(stream);
  p.threads = plan.threads;
  p.cluster = plan.cluster;
  while (1 << p.threads_log2 < plan.threads) ++p.threads_log2;
  p.per_col = 1.0 / static_cast<double>(p.cols);
  cudaError_t err = cudaErrorInvalidValue;
  if (plan.kind == Plan::kSplit) {
    err = launch_split<Elem, Param>(p, workspace, s);
  } else if (plan.kind == Plan::kStaged) {
    const int64_t bytes = staged_elements<Elem>(p.cols) * static_cast<int64_t>(sizeof(Elem));
    err = launch_rows<Elem>(norm_staged<Elem, Param>, p, bytes, s);
  } else {
    const bool past_l2 = 2 * p.rows * p.cols * static_cast<int64_t>(sizeof(Elem)) > l2_bytes;
    if (const auto kernel = find_forward<Elem, Param>(plan.pieces, plan.cluster, past_l2)) err = launch_rows<Elem>(kernel, p, 0, s);
  }
  if (err == cudaSuccess) return nullptr;
  cudaGetLastError();  // reported here; the next call must not see it again
  return cudaGetErrorString(err);
}

}  // namespace fastln
