// CPU kernels behind plain pointers: no torch and no Python headers, so one build fits every torch and every Python.
// The bodies are compiled once per instruction set (instruction_sets.h); parallel regions are here, hot loops in the bodies.

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(_WIN32)
#define EXPORT extern "C" __declspec(dllexport)
#else
#define EXPORT extern "C" __attribute__((visibility("default")))
#endif

namespace {

#include "arguments.h"

}  // namespace

#include "instruction_sets.h"

namespace {

// Rows by themselves, cut among the threads where there are enough numbers to pay for it.
template <typename Arguments>
int64_t by_rows(void (*body)(const Arguments&, int64_t, int64_t), const Arguments& a, int64_t numbers, int64_t threads) {
  const int64_t parts = std::max<int64_t>(1, std::min(threads, numbers / 16384));
#pragma omp parallel for schedule(static) num_threads(static_cast <int>(parts)) if (parts > 1)
  for (int64_t part = 0; part < parts; ++part) body(a, a.rows * part / parts, a.rows * (part + 1) / parts);
  return 0;
}

}  // namespace

// Raised with every change of the structures in arguments.h, so that a stale build is noticed.
EXPORT int64_t semantide_version() { return 10; }

EXPORT const char* semantide_instructions() { return bodies().name; }

// Choose a lower instruction set (0, 1, 2), for tests; returns the one in use.
EXPORT int64_t semantide_limit(int64_t wanted) {
  level = static_cast<int>(std::max<int64_t>(0, std::min<int64_t>(wanted, kBest)));
  return level;
}

// Returns 0, or 1 where an ancestor's row does not exist.
EXPORT int64_t semantide_beam_attention(const BeamAttention* given, int64_t threads) {
  const BeamAttention& a = *given;
  const int64_t rows = a.width * a.share, pairs = a.requests * a.groups;
  // Enough tasks for the threads; each has its own pass over the prompt, so no more than that.
  const int64_t cuts = pairs ? std::max<int64_t>(1, std::min<int64_t>((2 * threads + pairs - 1) / pairs, rows / 24)) : 1;
  const int64_t parts = threads > 1 ? cuts : 1;
  const int64_t chunk = parts > 1 ? ((rows + parts - 1) / parts + 11) / 12 * 12 : rows;
  const int64_t chunks = rows ? (rows + chunk - 1) / chunk : 0, tasks = pairs * chunks;
  const Bodies& body = bodies();
  std::atomic<int64_t> failed{0};
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads)) if (threads > 1 && tasks > 1)
  for (int64_t task = 0; task < tasks; ++task) {
    const int64_t pair = task / chunks, begin = task % chunks * chunk;
    if (!body.beam_attention(a, pair / a.groups, pair % a.groups, begin, std::min(begin + chunk, rows))) failed = 1;
  }
  return failed;
}

EXPORT int64_t semantide_prefix_attention(const PrefixAttention* given, int64_t threads) {
  const PrefixAttention& a = *given;
  struct Task {
    int64_t sequence, group, begin, end;
  };
  std::vector<Task> tasks;
  for (int64_t sequence = 0; sequence < a.sequences; ++sequence) {
    const int64_t rows = (a.new_offsets[sequence + 1] - a.new_offsets[sequence]) * a.share;
    const int64_t chunk = threads > 1 ? std::max<int64_t>(192, (rows / (2 * threads) + 11) / 12 * 12) : rows;
    for (int64_t group = 0; group < a.groups; ++group)
      for (int64_t begin = 0; begin < rows; begin += chunk) tasks.push_back({sequence, group, begin, std::min(begin + chunk, rows)});
  }
  const Bodies& body = bodies();
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads)) if (threads > 1 && tasks.size() > 1)
  for (int64_t task = 0; task < static_cast<int64_t>(tasks.size()); ++task)
    body.prefix_attention(a, tasks[task].sequence, tasks[task].group, tasks[task].begin, tasks[task].end);
  return 0;
}

EXPORT int64_t semantide_normalise_rows(const NormaliseRows* a, int64_t threads) { return by_rows(bodies().normalise_rows, *a, a->rows * a->size, threads); }

EXPORT int64_t semantide_turn_rows(const TurnRows* a, int64_t threads) { return by_rows(bodies().turn_rows, *a, a->rows * a->heads * a->size, threads); }

EXPORT int64_t semantide_gate_rows(const GateRows* a, int64_t threads) { return by_rows(bodies().gate_rows, *a, a->rows * 4, threads); }

// Returns 0, 1 where a live beam's logits are not numbers, or 2 where its node or a code below it does not exist.
EXPORT int64_t semantide_beam_select(const BeamSelect* given, int64_t threads) {
  const BeamSelect& a = *given;
  static thread_local std::vector<double> norms_kept;
  static thread_local std::vector<float> tops_kept;
  const int64_t slots = a.requests * a.width;
  if (static_cast<int64_t>(norms_kept.size()) < slots) norms_kept.resize(slots), tops_kept.resize(slots);
  double* norms = norms_kept.data();
  float* tops = tops_kept.data();
  const Bodies& body = bodies();
  std::atomic<int64_t> failed{0};
#pragma omp parallel for schedule(static) num_threads(static_cast <int>(threads)) if (threads > 1 && slots * a.num_codes > 32768)
  for (int64_t slot = 0; slot < slots; ++slot)
    if (slot % a.width < a.live[slot / a.width])
      if (const int64_t error = body.normalise(a, slot, norms + slot, tops + slot)) failed = error;
  if (failed) return failed;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads)) if (threads > 1 && a.requests > 1)
  for (int64_t request = 0; request < a.requests; ++request) body.beam_select(a, request, norms, tops);
  return 0;
}

// Returns 0, or 1 where a row lies outside the table.
EXPORT int64_t semantide_sampled_sums(const SampledSoftmax* given, int64_t threads) {
  const SampledSoftmax& a = *given;
  const Bodies& body = bodies();
  std::atomic<int64_t> failed{0};
#pragma omp parallel num_threads(static_cast <int>(threads)) if (threads > 1 && a.targets * a.negatives > 4096)
  {
    std::vector<float> scratch(2 * a.negatives + 1);
#pragma omp for schedule(static)
    for (int64_t source = 0; source < a.targets; ++source)
      if (!body.sampled_sums(a, source, scratch.data())) failed = 1;
  }
  return failed;
}

// Gradients after semantide_sampled_sums, which has checked the rows. Sources come in chunks, so that what is kept of them does not grow with negatives.
EXPORT int64_t semantide_sampled_gradients(const SampledSoftmax* given, int64_t threads) {
  const SampledSoftmax& a = *given;
  const Bodies& body = bodies();
  const int64_t places = a.as_logits ? 1 : 1 + a.partners, each = places * a.negatives;
  const int64_t chunk = std::max<int64_t>(1, std::min<int64_t>(a.targets, 65536 / std::max<int64_t>(1, each)));
  std::vector<float> kept(chunk * each + 1);
  const bool many = threads > 1 && a.targets * a.negatives > 4096;
  const int64_t parts = many ? threads : 1;
#pragma omp parallel num_threads(static_cast <int>(parts)) if (many)
  {
    std::vector<float> logits(a.negatives + 1);
    for (int64_t begin = 0; begin < a.targets; begin += chunk) {
      const int64_t end = std::min(begin + chunk, a.targets);
#pragma omp for schedule(static)
      for (int64_t source = begin; source < end; ++source) body.sampled_shares(a, source, kept.data() + (source - begin) * each, logits.data());
      // At one place every target takes from one source only, so no two threads add to the same hidden state.
      for (int64_t place = 0; place < places; ++place) {
#pragma omp for schedule(static)
        for (int64_t source = begin; source < end; ++source) body.sampled_hidden(a, source, place, kept.data() + (source - begin) * each);
      }
#pragma omp for schedule(static)
      for (int64_t part = 0; part < parts; ++part)
        for (int64_t source = begin; source < end; ++source) body.sampled_table(a, source, kept.data() + (source - begin) * each, part, parts);
    }
  }
  return 0;
}

EXPORT int64_t semantide_jagged_fusion(const JaggedFusion* given, int64_t threads) {
  const JaggedFusion& a = *given;
  const bool backward = a.grad_out != nullptr;
  const std::vector<FusionTask> tasks = fusion_tasks(a, backward, threads);
  const TimeBuckets buckets(a.bounds, a.times ? std::min(a.buckets, TimeBuckets::kMost) : 1);
  const Bodies& body = bodies();
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads)) if (threads > 1 && tasks.size() > 1)
  for (int64_t task = 0; task < static_cast<int64_t>(tasks.size()); ++task) body.jagged_fusion(a, tasks[task], buckets, backward);
  if (backward) add_fusion_parts(a);
  return 0;
}

// How many different ids there are, written in ascending order, and the place of each asked one among them; -1 where one lies outside the table.
EXPORT int64_t semantide_unique_ids(const UniqueIds* given, int64_t) {
  const UniqueIds& a = *given;
  for (int64_t i = 0; i < a.count; ++i)
    if (a.ids[i] < 0 || a.ids[i] >= a.rows) return -1;
  for (int64_t i = 0; i < a.count; ++i) a.bits[a.ids[i] >> 6] |= uint64_t{1} << (a.ids[i] & 63);
  const int64_t words = (a.rows + 63) / 64;
  int64_t found = 0;
  for (int64_t word = 0; word < words; ++word) {
    a.ranks[word] = found;
    for (uint64_t left = a.bits[word]; left; left &= left - 1) a.unique[found++] = word * 64 + __builtin_ctzll(left);
  }
  for (int64_t i = 0; i < a.count; ++i) {
    const int64_t word = a.ids[i] >> 6;
    a.inverse[i] = a.ranks[word] + __builtin_popcountll(a.bits[word] & ((uint64_t{1} << (a.ids[i] & 63)) - 1));
  }
  for (int64_t i = 0; i < found; ++i) a.bits[a.unique[i] >> 6] = 0;
  return found;
}

// Counting sort of places by segment; equal segments keep their order. Returns 1 where a segment does not exist.
EXPORT int64_t semantide_segment_order(const SegmentOrder* given, int64_t) {
  const SegmentOrder& a = *given;
  std::fill(a.starts, a.starts + a.segments + 1, int64_t{0});
  for (int64_t i = 0; i < a.count; ++i) {
    if (a.inverse[i] < 0 || a.inverse[i] >= a.segments) return 1;
    ++a.starts[a.inverse[i] + 1];
  }
  for (int64_t segment = 0; segment < a.segments; ++segment) a.starts[segment + 1] += a.starts[segment];
  std::vector<int64_t> next(a.starts, a.starts + a.segments);
  for (int64_t i = 0; i < a.count; ++i) a.order[next[a.inverse[i]]++] = i;
  return 0;
}

EXPORT int64_t semantide_gather_rows(const GatherRows* given, int64_t threads) {
  const GatherRows& a = *given;
  const Bodies& body = bodies();
  const int64_t chunk = 2048, chunks = (a.count + chunk - 1) / chunk;
#pragma omp parallel for schedule(static) num_threads(static_cast <int>(threads)) if (threads > 1 && chunks > 1)
  for (int64_t part = 0; part < chunks; ++part) body.gather_rows(a, part * chunk, std::min((part + 1) * chunk, a.count));
  return 0;
}

EXPORT int64_t semantide_segment_sums(const RowSegments* given, int64_t threads) {
  const RowSegments& a = *given;
  const Bodies& body = bodies();
  const int64_t chunk = 512, chunks = (a.count + chunk - 1) / chunk;
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads)) if (threads > 1 && chunks > 1)
  for (int64_t part = 0; part < chunks; ++part) body.segment_sums(a, part * chunk, std::min((part + 1) * chunk, a.count));
  return 0;
}

EXPORT int64_t semantide_step_rows(const RowStep* given, int64_t threads) {
  const RowStep& a = *given;
  const Bodies& body = bodies();
  const int64_t chunk = 512, chunks = (a.segments.count + chunk - 1) / chunk;
#pragma omp parallel num_threads(static_cast <int>(threads)) if (threads > 1 && chunks > 1)
  {
    std::vector<float> sum(a.segments.size);
#pragma omp for schedule(dynamic)
    for (int64_t part = 0; part < chunks; ++part) body.step_rows(a, part * chunk, std::min((part + 1) * chunk, a.segments.count), sum.data());
  }
  return 0;
}

// Returns 0; 1 where a state or a record does not exist; 2 where two beams write one record, or one is read before it is written.
EXPORT int64_t semantide_beam_linear(const BeamLinear* given, int64_t threads) {
  const BeamLinear& a = *given;
  int64_t low = a.num_records, high = -1;
  for (int64_t beam = 0; beam < a.beams; ++beam) {
    const int64_t* rows = a.rows + beam * a.steps;
    if (a.bases[beam] < 0 || a.bases[beam] >= a.num_states) return 1;
    for (int64_t s = 0; s < a.steps; ++s)
      if (rows[s] < -1 || rows[s] >= a.num_records || (s && s < a.steps - 1 && rows[s] < 0 && rows[s - 1] >= 0)) return 1;
    if (rows[a.steps - 1] >= 0) low = std::min(low, rows[a.steps - 1]), high = std::max(high, rows[a.steps - 1]);
  }
  // Of each row that is written: not in this call (0), not yet (1), or by a beam before (2).
  std::vector<char> written(std::max<int64_t>(0, high - low + 1));
  for (int64_t beam = 0; beam < a.beams; ++beam) {
    if (a.rows[(beam + 1) * a.steps - 1] < 0) continue;
    char& mark = written[a.rows[(beam + 1) * a.steps - 1] - low];
    if (mark) return 2;
    mark = 1;
  }
  bool ordered = false;
  for (int64_t beam = 0; beam < a.beams; ++beam) {
    const int64_t* rows = a.rows + beam * a.steps;
    for (int64_t s = 0; s < a.steps - 1; ++s)
      if (rows[s] >= low && rows[s] <= high && written[rows[s] - low]) {
        if (written[rows[s] - low] == 1) return 2;
        ordered = true;
      }
    if (rows[a.steps - 1] >= 0) written[rows[a.steps - 1] - low] = 2;
  }
  // Beams of one state stay together as far as there is work for every thread; of some tens of them all heads follow one another, whose tokens are neighbours,
  // as long as a state lies in the second-level cache meanwhile. Beams that follow one another stay in order.
  std::vector<int64_t> cuts{0};
  const int64_t wanted = (4 * threads + a.groups - 1) / a.groups, share = threads > 1 ? (a.beams + wanted - 1) / wanted : a.beams;
  const int64_t most = std::max<int64_t>(24, a.heads * a.size * a.value_size > 1 << 18 ? share : std::min<int64_t>(share, 96));
  if (!ordered)
    for (int64_t beam = 1; beam < a.beams; ++beam)
      if (beam - cuts.back() >= (a.bases[beam] != a.bases[beam - 1] ? 24 : most)) cuts.push_back(beam);
  cuts.push_back(a.beams);
  const int64_t parts = static_cast<int64_t>(cuts.size()) - 1, tasks = parts * a.groups;
  const Bodies& body = bodies();
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads)) if (threads > 1 && tasks > 1)
  for (int64_t task = 0; task < tasks; ++task) body.beam_linear(a, task % a.groups, cuts[task / a.groups], cuts[task / a.groups + 1]);
  return 0;
}

EXPORT int64_t semantide_linear_attention(const LinearAttention* given, int64_t threads) {
  const LinearAttention& a = *given;
  std::vector<int64_t> order(a.sequences);
  for (int64_t i = 0; i < a.sequences; ++i) order[i] = i;
  // The longest begin, so that no thread is left alone with one.
  std::stable_sort(order.begin(), order.end(), [&](int64_t i, int64_t j) { return a.offsets[i + 1] - a.offsets[i] > a.offsets[j + 1] - a.offsets[j]; });
  const int64_t tasks = a.sequences * a.heads;
  const Bodies& body = bodies();
#pragma omp parallel for schedule(dynamic) num_threads(static_cast <int>(threads)) if (threads > 1 && tasks > 1)
  for (int64_t task = 0; task < tasks; ++task) body.linear_attention(a, order[task / a.heads], task % a.heads);
  return 0;
}

EXPORT int64_t semantide_short_convolution(const ShortConvolution* given, int64_t threads) {
  const ShortConvolution& a = *given;
  const int64_t blocks = (a.channels + 63) / 64;
  const Bodies& body = bodies();
#pragma omp parallel for schedule(static) num_threads(static_cast <int>(threads)) if (threads > 1 && blocks > 1)
  for (int64_t block = 0; block < blocks; ++block) body.short_convolution(a, block);
  return 0;
}

// Returns 0, or 1 where a request or a kept row does not exist.
EXPORT int64_t semantide_beam_convolution(const BeamConvolution* given, int64_t threads) {
  const BeamConvolution& a = *given;
  for (int64_t beam = 0; beam < a.beams; ++beam) {
    const int64_t* rows = a.rows + beam * a.steps;
    if (a.requests_of[beam] < 0 || a.requests_of[beam] >= a.requests) return 1;
    for (int64_t s = 0; s < a.steps; ++s)
      if (rows[s] < -1 || rows[s] >= a.num_kept || (s && s < a.steps - 1 && rows[s] < 0 && rows[s - 1] >= 0)) return 1;
  }
  const int64_t chunk = 32, chunks = (a.beams + chunk - 1) / chunk;
  const Bodies& body = bodies();
  for (const bool keep : {true, false}) {
#pragma omp parallel for schedule(static) num_threads(static_cast <int>(threads)) if (threads > 1 && a.beams * a.channels > 32768)
    for (int64_t part = 0; part < chunks; ++part) body.beam_convolution(a, part * chunk, std::min((part + 1) * chunk, a.beams), keep);
  }
  return 0;
}
