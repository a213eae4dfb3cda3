// The bodies compiled for three instruction sets, and the choice among them when the library is loaded.

namespace basic {
namespace {
#define VECTOR_BYTES 16
#define TILE_ROWS 4
#include "bodies.h"
#undef VECTOR_BYTES
#undef TILE_ROWS
}  // namespace
}  // namespace basic

#if defined(__x86_64__)

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC push_options
#pragma GCC target("avx2,fma,f16c")
#endif
namespace avx2 {
namespace {
#define VECTOR_BYTES 32
#define TILE_ROWS 6
#include "bodies.h"
#undef VECTOR_BYTES
#undef TILE_ROWS
}  // namespace
}  // namespace avx2
#if defined(__clang__)
#pragma clang attribute pop
#pragma clang attribute push(__attribute__((target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC pop_options
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512dq,avx512vl,avx2,fma,f16c")
#endif
namespace avx512 {
namespace {
#define VECTOR_BYTES 64
#define TILE_ROWS 12
#include "bodies.h"
#undef VECTOR_BYTES
#undef TILE_ROWS
}  // namespace
}  // namespace avx512
#if defined(__clang__)
#pragma clang attribute pop
#else
#pragma GCC pop_options
#endif

#endif  // __x86_64__

namespace {

struct Bodies {
  const char* name;
  bool (*beam_attention)(const BeamAttention&, int64_t, int64_t, int64_t, int64_t);
  void (*prefix_attention)(const PrefixAttention&, int64_t, int64_t, int64_t, int64_t);
  void (*normalise_rows)(const NormaliseRows&, int64_t, int64_t);
  void (*turn_rows)(const TurnRows&, int64_t, int64_t);
  void (*gate_rows)(const GateRows&, int64_t, int64_t);
  int64_t (*normalise)(const BeamSelect&, int64_t, double*, float*);
  void (*beam_select)(const BeamSelect&, int64_t, const double*, const float*);
  bool (*sampled_sums)(const SampledSoftmax&, int64_t, float*);
  void (*sampled_shares)(const SampledSoftmax&, int64_t, float*, float*);
  void (*sampled_hidden)(const SampledSoftmax&, int64_t, int64_t, const float*);
  void (*sampled_table)(const SampledSoftmax&, int64_t, const float*, int64_t, int64_t);
  void (*jagged_fusion)(const JaggedFusion&, const FusionTask&, const TimeBuckets&, bool);
  void (*gather_rows)(const GatherRows&, int64_t, int64_t);
  void (*segment_sums)(const RowSegments&, int64_t, int64_t);
  void (*step_rows)(const RowStep&, int64_t, int64_t, float*);
  void (*beam_linear)(const BeamLinear&, int64_t, int64_t, int64_t);
  void (*linear_attention)(const LinearAttention&, int64_t, int64_t);
  void (*short_convolution)(const ShortConvolution&, int64_t);
  void (*beam_convolution)(const BeamConvolution&, int64_t, int64_t, bool);
};

#define BODIES_OF(set)                                                                                                    \
  {#set, set::beam_attention, set::prefix_attention, set::normalise_rows, set::turn_rows, set::gate_rows, set::normalise, \
   set::beam_select, set::sampled_sums, set::sampled_shares, set::sampled_hidden, set::sampled_table, set::jagged_fusion, \
   set::gather_rows, set::segment_sums, set::step_rows, set::beam_linear, set::linear_attention, set::short_convolution, \
   set::beam_convolution}
const Bodies kBodies[] = {
    BODIES_OF(basic),
#if defined(__x86_64__)
    BODIES_OF(avx2),
    BODIES_OF(avx512),
#endif
};
#undef BODIES_OF

int best_level() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  const bool wide = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c");
  if (wide && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl"))
    return 2;
  if (wide) return 1;
#endif
  return 0;
}

const int kBest = best_level();
std::atomic<int> level{kBest};

const Bodies& bodies() { return kBodies[level.load(std::memory_order_relaxed)]; }

}  // namespace
