// The best children of a request's beams. Included once per instruction set (see instruction_sets.h).
// Beams are visited best bound first; once W + 1 candidates are known, the worst of them is a bound that whole beams, and then single children, must reach.
// W + 1 and not W, so that the best dropped score comes out exactly too.

struct Candidate {
  double score;
  int64_t child;
  int32_t beam;
  float logit;
};

// Higher scores first; of equal ones the smaller node, which is the one with the smaller codes.
static inline bool ranks_before(const Candidate& a, const Candidate& b) { return a.score > b.score || (a.score == b.score && a.child < b.child); }

static inline double step_score(float logit, double norm) { return std::max(static_cast<double>(logit) - norm, kLowest); }
static inline double path_score(double before, float logit, double norm) { return std::max(before + step_score(logit, norm), kLowest); }

// How many leaves below a range of leaves the request may return.
static inline int64_t allowed_leaves(const int32_t* counts, const int64_t* excluded, const int64_t* excluded_end, int64_t base, int64_t first, int64_t last) {
  int64_t count = counts[last] - counts[first];
  if (count > 0 && excluded != excluded_end) count -= std::lower_bound(excluded, excluded_end, base + last) - std::lower_bound(excluded, excluded_end, base + first);
  return count;
}

// Logits of a beam's children side by side. Codes without a gap are already so.
static const float* gather(const float* row, const int64_t* codes, int64_t count, std::vector<float>& buffer) {
  if (!count) return row;
  if (codes[count - 1] - codes[0] == count - 1) return row + codes[0];
  if (static_cast<int64_t>(buffer.size()) < count) buffer.resize(count);
  float* values = buffer.data();
  for (int64_t i = 0; i < count; ++i) values[i] = row[codes[i]];
  return values;
}

// Norm and highest possible step of the beam in one slot. Returns 1 where the logits are not numbers, 2 where the node or a code below it does not exist.
static int64_t normalise(const BeamSelect& a, int64_t slot, double* norm, float* top) {
  const int64_t node = a.nodes[slot];
  if (node < 0 || node >= a.num_nodes) return 2;
  const float* row = a.logits + slot * a.num_codes;
  const int64_t first = a.offsets[node], count = a.offsets[node + 1] - first;
  const int64_t* codes = a.codes + first;
  if (count && (codes[0] < 0 || codes[count - 1] >= a.num_codes)) return 2;  // they ascend
  if (!a.among_children) {
    *norm = log_sum_exp(row, a.num_codes, top);
  } else {
    static thread_local std::vector<float> buffer;
    *norm = log_sum_exp(gather(row, codes, count, buffer), count, top);
  }
  return std::isfinite(*norm) ? 0 : 1;
}

// Keeps the best `room` of what it is shown; `bound` is the worst of them once there are so many.
struct Shortlist {
  std::vector<Candidate> entries;
  int64_t count = 0, room = 0;
  bool full = false;
  Candidate bound;

  void clear(int64_t size) {
    count = 0, room = size, full = false;
    if (static_cast<int64_t>(entries.size()) < room + room / 2 + 64) entries.resize(room + room / 2 + 64);
  }
  // True where the bound rose.
  bool add(const Candidate& candidate) {
    if (full && !ranks_before(candidate, bound)) return false;
    entries[count++] = candidate;
    if (count < (full ? room + room / 2 + 64 : room)) return false;
    std::nth_element(entries.begin(), entries.begin() + room - 1, entries.begin() + count, ranks_before);
    count = room, full = true, bound = entries[room - 1];
    return true;
  }
};

// Below this logit no child of a beam reaches the bound; a little lower than exact, so that rounding drops nothing.
static inline float lowest_logit(const Shortlist& best, double before, double norm) {
  if (!best.full) return -INFINITY;
  const double exact = best.bound.score - before + norm;
  const double careful = exact - 1e-6 * (std::fabs(best.bound.score) + std::fabs(before) + std::fabs(norm));
  return careful < -3e38 ? -INFINITY : static_cast<float>(careful);
}

static void beam_select(const BeamSelect& a, int64_t request, const double* norms, const float* tops) {
  struct Beam {
    double bound;
    int32_t beam;
  };
  static thread_local std::vector<Beam> beams;
  static thread_local std::vector<float> buffer;
  static thread_local Shortlist best;
  beams.clear();
  const int64_t base_slot = request * a.width, width = a.widths[request];
  best.clear(width + 1);

  const int32_t* counts = nullptr;
  const int64_t *excluded = nullptr, *excluded_end = nullptr;
  int64_t base = 0;
  if (a.counts) {
    const int64_t owner = a.owners[request];
    counts = a.counts + a.mask_of[owner] * (a.num_leaves + 1);
    base = owner * (a.num_leaves + 1);
    excluded = std::lower_bound(a.excluded, a.excluded + a.num_excluded, base);
    excluded_end = std::lower_bound(excluded, a.excluded + a.num_excluded, base + a.num_leaves + 1);
  }

  int64_t dead_ends = 0, children = 0, visited = 0;
  for (int64_t beam = 0; beam < a.live[request]; ++beam) {
    const int64_t slot = base_slot + beam, node = a.nodes[slot];
    children += a.offsets[node + 1] - a.offsets[node];
    if (counts && allowed_leaves(counts, excluded, excluded_end, base, a.leaf_bounds[node], a.leaf_bounds[node + 1]) <= 0) {
      ++dead_ends;
      continue;
    }
    beams.push_back({path_score(a.scores[slot], tops[slot], norms[slot]), static_cast<int32_t>(beam)});
  }
  const int64_t ahead = std::min<int64_t>(beams.size(), 16 + a.live[request] / 16);
  if (ahead < static_cast<int64_t>(beams.size()))
    std::nth_element(beams.begin(), beams.begin() + ahead, beams.end(), [](const Beam& x, const Beam& y) { return x.bound > y.bound; });

  for (const Beam& entry : beams) {
    if (best.full && entry.bound < best.bound.score) continue;
    const int64_t slot = base_slot + entry.beam, first = a.offsets[a.nodes[slot]], count = a.offsets[a.nodes[slot] + 1] - first;
    const double before = a.scores[slot], norm = norms[slot];
    const float* values = gather(a.logits + slot * a.num_codes, a.codes + first, count, buffer);
    float threshold = lowest_logit(best, before, norm);
    for (int64_t begin = 0; begin < count; begin += kLanes) {
      uint32_t mask;
      if (begin + kLanes <= count) {
        mask = at_least(load(values + begin), threshold);
      } else {
        mask = 0;
        for (int64_t i = begin; i < count; ++i) mask |= static_cast<uint32_t>(values[i] >= threshold) << (i - begin);
      }
      while (mask) {
        const int64_t i = begin + __builtin_ctz(mask);
        mask &= mask - 1;
        ++visited;
        const int64_t child = first + i;
        if (counts && allowed_leaves(counts, excluded, excluded_end, base, a.child_bounds[child], a.child_bounds[child + 1]) <= 0) continue;
        if (best.add({path_score(before, values[i], norm), child, entry.beam, values[i]})) threshold = lowest_logit(best, before, norm);
      }
    }
  }

  int64_t kept = best.count;
  a.dropped[request] = -INFINITY;
  if (kept > width) {
    std::nth_element(best.entries.begin(), best.entries.begin() + width, best.entries.begin() + kept, ranks_before);
    a.dropped[request] = best.entries[width].score;
    kept = width;
  }
  std::sort(best.entries.begin(), best.entries.begin() + kept, [](const Candidate& x, const Candidate& y) { return x.child < y.child; });
  const int64_t place = request * a.room;
  for (int64_t i = 0; i < kept; ++i) {
    const Candidate& chosen = best.entries[i];
    a.out_parents[place + i] = chosen.beam;
    a.out_codes[place + i] = a.codes[chosen.child];
    a.out_nodes[place + i] = chosen.child;
    a.out_scores[place + i] = chosen.score;
    a.out_steps[place + i] = step_score(chosen.logit, norms[base_slot + chosen.beam]);
  }
  for (int64_t i = kept; i < a.room; ++i) {
    a.out_parents[place + i] = a.out_codes[place + i] = a.out_nodes[place + i] = 0;
    a.out_scores[place + i] = -INFINITY;
    a.out_steps[place + i] = 0;
  }
  a.kept[request] = kept;
  a.dead_ends[request] = dead_ends;
  a.children[request] = children;
  a.visited[request] = visited;
}
