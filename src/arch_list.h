// TORCH_CUDA_ARCH_LIST, and which of its code a GPU runs. No CUDA: tests compile this alone.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <string>
#include <vector>

namespace fastln {

struct Arch {
  int major = 0;
  int minor = 0;
  bool ptx = false;  // beside machine code, which every entry has

  // Machine code runs on GPUs of the same major version and no earlier minor one, PTX on every later GPU.
  bool has_machine_code_for(const Arch& gpu) const { return major == gpu.major && minor <= gpu.minor; }
  bool has_ptx_for(const Arch& gpu) const {
    return ptx && (major < gpu.major || (major == gpu.major && minor <= gpu.minor));
  }
};

// Entries are <major>.<minor>[+PTX], separated by semicolons or spaces.
inline std::vector<Arch> parse_archs(const std::string& list) {
  std::vector<Arch> archs;
  for (size_t at = 0; at < list.size();) {
    const size_t end = std::min(list.find_first_of("; ", at), list.size());
    const std::string entry = list.substr(at, end - at);
    at = end + 1;
    const size_t dot = entry.find('.');
    if (dot == std::string::npos) continue;
    archs.push_back({std::atoi(entry.c_str()), std::atoi(entry.c_str() + dot + 1), entry.find("+PTX") != entry.npos});
  }
  return archs;
}

// The major version that the code which `gpu` runs was compiled for; 0 where it can run none. The driver compiles the
// newest PTX where there is no machine code.
inline int code_major(const std::vector<Arch>& archs, const Arch& gpu) {
  int major = 0;
  for (const Arch& arch : archs) {
    if (arch.has_machine_code_for(gpu)) return arch.major;
    if (arch.has_ptx_for(gpu)) major = std::max(major, arch.major);
  }
  return major;
}

}  // namespace fastln
