// Checks of what the launchers work out on the host, for GPUs that no test machine has: no CUDA, no torch.
// Prints one line for each thing that does not hold, and "checked N".
#include <cstdint>
#include <cstdio>
#include <initializer_list>

#include "arch_list.h"
#include "norm_backward_shared.h"
#include "tuning.h"

namespace fastln {
namespace {

int64_t checked = 0;

// Shared memory of a multiprocessor and of a block as CUDA reports them.
DeviceFacts gpu(int major, int minor, int sms, int64_t shared_kb) {
  DeviceFacts facts;
  facts.major = major;
  facts.minor = minor;
  facts.sms = sms;
  facts.shared_bytes_sm = shared_kb * 1024;
  facts.shared_bytes_block = (shared_kb - 1) * 1024;
  facts.supported = true;
  facts.has_hopper_code = major >= 9;
  return facts;
}

void check_backward(const DeviceFacts& device, int64_t rows, int64_t cols, int element_bytes, bool dx, bool sums) {
  // As backward_max_cluster() has it.
  const int max_cluster = device.has_hopper_code && device.shared_bytes_block >= 160 * 1024 ? kMaxCluster : 1;
  const BackwardPlan plan = plan_backward(rows, cols, element_bytes, dx, sums, device, max_cluster);
  const BackwardShared shared = backward_shared(plan, cols, element_bytes, sums && !plan.direct, device);
  ++checked;
  NormGrads grads{};
  grads.rows = rows;
  grads.cols = grads.x_stride = grads.dy_stride = cols;
  if (dx) grads.dx = &grads;
  const BackwardBundles bundles = backward_bundles(grads, plan, element_bytes, device);
  if (bundles.rows > 0) {
    const int64_t resident = (bundles.blocks + device.sms - 1) / device.sms;
    const int registers = backward_bundle_registers(plan.pieces, wide_blocks_fit(device));
    const int64_t summed = summed_bytes(bundles.threads, plan.threads, plan.pieces, 8, true, 4);
    const bool fits = bundles.shared_bytes <= device.shared_bytes_block - kStaticSharedBytes &&
                      resident * (bundles.shared_bytes + kStaticSharedBytes) <= device.shared_bytes_sm &&
                      resident * bundles.threads * registers <= kRegistersPerSm;
    const bool holds = 6 * bundles.buffer_bytes <= bundles.shared_bytes && summed <= bundles.shared_bytes &&
                       bundles.buffer_bytes >= 2 * bundles.rows * cols + 2 * kBundleAlignment - 4;
    if (!fits || !holds || bundles.threads % kWarp != 0 || bundles.threads < 2 * kWarp || plan.direct)
      std::printf("backward of %lld rows of %lld columns on %d.%d: bundles of %d rows, %d threads, %lld blocks\n",
                  static_cast<long long>(rows), static_cast<long long>(cols), device.major, device.minor, bundles.rows,
                  bundles.threads, static_cast<long long>(bundles.blocks));
  }
  const bool fits = shared.bytes <= device.shared_bytes_block - kStaticSharedBytes &&
                    plan.blocks_per_sm * (shared.bytes + kStaticSharedBytes) <= device.shared_bytes_sm;
  const bool stages = shared.stages >= (plan.cluster > 1 ? 2 : 1) && shared.stages <= kMaxStages;
  const bool block = plan.block >= plan.threads && plan.block % plan.threads == 0 && plan.block <= kBackwardThreads;
  if (fits && stages && block) return;
  std::printf(
      "compute capability %d.%d, %d bytes an element, %lld rows of %lld columns, dx %d, sums %d: "
      "%d threads of %d pieces in blocks of %d, %d stages, %lld bytes\n",
      device.major, device.minor, element_bytes, static_cast<long long>(rows), static_cast<long long>(cols), dx, sums,
      plan.threads, plan.pieces, plan.block, shared.stages, static_cast<long long>(shared.bytes));
}

void check_all_backwards() {
  const DeviceFacts gpus[] = {gpu(8, 0, 108, 164), gpu(8, 6, 84, 100),   gpu(8, 9, 58, 100),
                              gpu(9, 0, 132, 228), gpu(10, 0, 148, 228), gpu(12, 0, 170, 100)};
  for (const DeviceFacts& device : gpus)
    for (const int element_bytes : {2, 4, 8})
      for (int64_t cols = 1; cols <= 300000; cols += cols < 20000 ? 1 : 997)
        for (const int64_t rows : {1, 24, 100, 500, 1000, 3000, 100000})
          for (const int asked : {1, 2, 3}) check_backward(device, rows, cols, element_bytes, asked & 1, asked & 2);
}

// Groups that walk over rows fill the registers of the GPU once, or as many times as it takes for 32 rows a group.
void check_walks() {
  for (const int sms : {58, 132, 170})
    for (int64_t cols = 1; cols <= 24000; ++cols)
      for (const int64_t rows : {1, 100, 1000, 3001, 40000, 131072, 999983, 100000000}) {
        const Plan forward = plan(cols, 2, 1, true);
        const int64_t many = rows_to_walk(rows, forward.pieces, forward.threads, sms);
        ++checked;
        if (many == 1) continue;
        const int block = forward.threads < kSmallGroupBlock ? kSmallGroupBlock : forward.threads;  // threads
        const int64_t blocks = sms * int64_t{resident_blocks(walk_registers(forward.pieces), block)};
        const int64_t resident = blocks * (block / forward.threads);  // groups
        const int64_t groups = (rows + many - 1) / many;
        const bool one_wave = groups <= resident, many_waves = rows > 32 * resident && many > 16 && many <= 32;
        if (resident > 0 && rows > resident && many >= 2 && (one_wave || many_waves)) continue;
        std::printf("%lld rows of %lld columns on %d multiprocessors: %lld a group of %d threads\n",
                    static_cast<long long>(rows), static_cast<long long>(cols), sms, static_cast<long long>(many),
                    forward.threads);
      }
}

// As the occupancy that CUDA reports for compute capability 9.0.
void check_residents() {
  struct Known {
    int registers, threads, blocks;
  };
  for (const Known& known : {Known{64, 256, 4}, Known{80, 256, 3}, Known{80, 160, 4}, Known{96, 128, 5},
                             Known{96, 224, 2}, Known{120, 512, 1}, Known{168, 352, 1}}) {
    ++checked;
    const int got = resident_blocks(known.registers, known.threads);
    if (got != known.blocks)
      std::printf("%d threads of %d registers: expected %d blocks, got %d\n", known.threads, known.registers,
                  known.blocks, got);
  }
}

// Blocks of norm_bundle() fit a block's and a multiprocessor's shared memory and registers.
void check_bundles() {
  for (const DeviceFacts& device : {gpu(9, 0, 132, 228), gpu(10, 0, 148, 228), gpu(12, 0, 170, 100)})
    for (int64_t cols = 1; cols <= 40000; ++cols)
      for (const int64_t gap : {0, 3, -1}) {
        const Plan forward = plan(cols, 2, kMaxCluster, wide_blocks_fit(device));
        const Bundles bundles = bundles_of(forward, cols, cols + gap, device);
        ++checked;
        if (bundles.rows == 0) continue;
        const int64_t bytes = bundles.shared_bytes() + 512;  // and what is static
        const int registers = bundle_registers(forward.pieces, wide_blocks_fit(device));
        const bool fits = bytes <= device.shared_bytes_block &&
                          bundles.resident * (bytes + kReservedSharedBytes) <= device.shared_bytes_sm &&
                          bundles.resident * bundles.threads * registers <= kRegistersPerSm;
        const bool holds = bundles.buffer_bytes % 128 == 0 &&
                           bundles.buffer_bytes >= 2 * bundles.rows * cols + 2 * kBundleAlignment - 4;
        const bool block = bundles.threads <= 1024 && bundles.threads % kWarp == 0 && bundles.threads >= 2 * kWarp &&
                           bundles.rows * forward.threads == bundles.threads;
        if (fits && holds && block && (gap == 0 || (gap > 0 && bundles.rows == 1)) && cols >= 8) continue;
        std::printf("%lld columns on %d.%d: bundles of %d rows, %d threads, %d blocks, %lld bytes\n",
                    static_cast<long long>(cols), device.major, device.minor, bundles.rows, bundles.threads,
                    bundles.resident, static_cast<long long>(bytes));
      }
}

void check_code(const char* list, Arch gpu, int major) {
  ++checked;
  const int got = code_major(parse_archs(list), gpu);
  if (got != major)
    std::printf("code of '%s' on %d.%d: expected that of %d, got %d\n", list, gpu.major, gpu.minor, major, got);
}

void check_codes() {
  const char* all = "8.0;8.6;8.9;9.0;10.0;12.0+PTX";
  check_code(all, {7, 5}, 0);
  check_code(all, {8, 0}, 8);
  check_code(all, {8, 7}, 8);
  check_code(all, {9, 0}, 9);
  check_code(all, {10, 3}, 10);
  check_code(all, {11, 0}, 0);
  check_code(all, {12, 1}, 12);
  check_code(all, {13, 0}, 12);
  check_code("8.0+PTX", {9, 0}, 8);  // which knows neither clusters nor dependent launch
  check_code("8.0+PTX 9.0", {9, 0}, 9);
  check_code("8.0+PTX 9.0", {10, 0}, 8);
  check_code("9.0+PTX;8.6", {8, 6}, 8);
  check_code("9.0+PTX;8.6", {8, 0}, 0);
}

}  // namespace
}  // namespace fastln

int main() {
  fastln::check_codes();
  fastln::check_all_backwards();
  fastln::check_walks();
  fastln::check_residents();
  fastln::check_bundles();
  std::printf("checked %lld\n", static_cast<long long>(fastln::checked));
}
