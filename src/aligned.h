// Where the widest access fits. The launchers and the bindings ask.
#pragma once

#include <cstdint>

namespace fastln {

constexpr int kMaxAccessBytes = 16;  // the widest access the hardware has: 128 bits a thread

inline bool is_aligned(const void* p, int64_t bytes = kMaxAccessBytes) {
  return reinterpret_cast<uintptr_t>(p) % bytes == 0;
}

// Whether each of `rows` rows begins at a multiple of `bytes`, `stride_bytes` from one to the next.
inline bool rows_are_aligned(const void* first, int64_t rows, int64_t stride_bytes, int64_t bytes = kMaxAccessBytes) {
  return is_aligned(first, bytes) && (rows == 1 || stride_bytes % bytes == 0);
}

}  // namespace fastln
